"""Replays a network's kernels as CUDA graphs: one launch for all of them. Worker processes only.

A graph is captured for certain shapes and always uses the same memory: inputs are copied in,
outputs copied out. Graphs are captured before service begins, since a capture forbids much to the
process and takes long. A batch is computed by the next larger graph, and the outputs are cut to its
size. See "CUDA graphs" in PyTorch's notes on CUDA semantics.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from inferpool.models.accelerator.device import current_stream
from inferpool.models.accelerator.graph_pool import GraphPool
from inferpool.models.accelerator.order import OwnStream

_NUM_WARM = 3
"""Calls before a capture: libraries choose kernels and allocate memory in them."""
_MAX_GRAPHS = 32
"""Most graphs of a network; batches of further shapes are computed without one."""

NetworkFor = Callable[[Sequence[Tensor]], nn.Module]
"""Makes the network for inputs of one shape."""

Capture = Callable[[Callable[[], object]], tuple[object, Callable[[], None]]]
"""Captures a call; returns its outputs, which stay in place, and what recomputes them."""


class _Graph(NamedTuple):
    inputs: tuple[Tensor, ...]
    outputs: object
    replay: Callable[[], None]


class Graphed(nn.Module):
    """A network that is called through CUDA graphs, where there are some for the inputs' shapes.

    One thread calls it at a time. Streams of the accelerator may change from call to call.

    Args:
        network: All its inputs and outputs have the batch first.
        capture: By default captures a CUDA graph.
        network_for: Makes what is captured; by default it is the network.
    """

    def __init__(
        self,
        network: nn.Module,
        capture: Capture | None = None,
        *,
        network_for: NetworkFor | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self._network_for = network_for or (lambda inputs: network)
        self._capture = capture or _DeviceCapture()
        self._is_capturing = False
        self._graphs: dict[tuple[object, ...], dict[int, _Graph]] = {}
        """Graphs by the shapes and dtypes of their inputs without the batch, and by batch size."""
        self._sizes: dict[tuple[object, ...], list[int]] = {}
        """Batch sizes of these graphs, in rising order."""
        self._last_stream = current_stream()
        self.input_dtype: torch.dtype | None = getattr(network, "input_dtype", None)
        """Dtype of the network's own for inputs in float32; None leaves them as they are."""
        memory_format = getattr(network, "memory_format", None)
        if memory_format is not None:
            self.memory_format = memory_format

    @property
    def num_graphs(self) -> int:
        """Number of graphs that were captured."""
        return sum(map(len, self._graphs.values()))

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture a graph for each call in the block with shapes that have none.

        Graphs share memory, so begin with the largest batch: the others then fit into its memory.
        """
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = False

    def forward(self, *inputs: Tensor) -> object:
        """Compute a batch: by the smallest graph that it fits into, or without one."""
        size = len(inputs[0])
        form = tuple((x.shape[1:], self._held_dtype(x)) for x in inputs)
        if self._is_capturing:
            self._add(size, form, inputs)
        sizes = self._sizes.get(form, [])
        place = bisect_left(sizes, size)
        if place == len(sizes):
            return self.network(*inputs)
        graph = self._graphs[form][sizes[place]]
        self._follow_stream()
        for held, x in zip(graph.inputs, inputs, strict=True):
            held[:size].copy_(x)
        graph.replay()
        # The next replay writes over the outputs, while the caller may still hold these.
        return pytree.tree_map_only(Tensor, lambda out: out[:size].clone(), graph.outputs)

    def _add(self, size: int, form: tuple[object, ...], inputs: Sequence[Tensor]) -> None:
        graphs = self._graphs.setdefault(form, {})
        if size in graphs or self.num_graphs >= _MAX_GRAPHS:
            return
        graphs[size] = self._make(size, inputs)
        insort(self._sizes.setdefault(form, []), size)

    def _make(self, size: int, inputs: Sequence[Tensor]) -> _Graph:
        held = tuple(self._laid_out(x) for x in inputs)
        network = self._network_for(held)
        outputs, replay = self._capture(lambda: network(*held))
        for each in (*held, *pytree.tree_leaves(outputs)):
            if not isinstance(each, Tensor) or each.dim() == 0 or len(each) != size:
                raise ValueError(
                    "an input or output does not have the batch first: it cannot be captured"
                )
        return _Graph(held, outputs, replay)

    def _laid_out(self, x: Tensor) -> Tensor:
        """Copy an input in the layout and dtype that the network prefers; batches may differ."""
        is_image = x.dim() == 4
        wanted = (getattr(self, "memory_format", None) if is_image else None) or (
            torch.contiguous_format
        )
        return x.to(self._held_dtype(x), memory_format=wanted, copy=True)

    def _held_dtype(self, x: Tensor) -> torch.dtype:
        """Return the dtype that graphs hold an input in; copying it there converts it."""
        return (self.input_dtype or x.dtype) if x.dtype == torch.float32 else x.dtype

    def _follow_stream(self) -> None:
        """Have this thread's stream wait until the last one is done with the graphs' memory."""
        stream, last = current_stream(), self._last_stream
        if stream is not None and stream != last:
            if last is not None:
                stream.wait_stream(last)
            self._last_stream = stream


class _DeviceCapture:
    """Captures graphs that share a pool of memory, since only one is replayed at a time."""

    def __init__(self) -> None:
        self._pool: GraphPool | None = None

    def __call__(self, call: Callable[[], object]) -> tuple[object, Callable[[], None]]:
        if self._pool is None:
            self._pool = GraphPool()
        with OwnStream().inserted():
            for _ in range(_NUM_WARM):
                call()
        with self._pool.captured() as graph:
            outputs = call()
        return outputs, graph.replay
