"""Replays a network's kernels as CUDA graphs: one launch for all of them. Worker processes only.

A graph is captured for certain shapes and always uses the same memory: inputs are copied in,
outputs copied out. A batch is filled up to the next power of two, which has a graph, and the
outputs are cut to its size. See "CUDA graphs" in PyTorch's notes on CUDA semantics.

CUDA graphs have never run on a device, so `auto` does not try them.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from inferpool.models.accelerator.device import GraphPool

_NUM_WARM = 3
"""Calls before a capture, in which libraries choose kernels and allocate memory."""
_MAX_GRAPHS = 32
"""Most graphs of a network; batches of further shapes are computed without one."""

Capture = Callable[[Callable[[], object]], tuple[object, Callable[[], None]]]
"""Captures a call; returns its outputs, which stay in place, and what recomputes them."""


class _Graph(NamedTuple):
    inputs: tuple[Tensor, ...]
    outputs: object
    replay: Callable[[], None]


class Graphed(nn.Module):
    """A network that is called through CUDA graphs, for batches of any size.

    Args:
        network: All its inputs and outputs have the batch first.
        capture: By default captures a CUDA graph.
    """

    def __init__(self, network: nn.Module, capture: Capture | None = None) -> None:
        super().__init__()
        self.network = network
        self._capture = capture or _DeviceCapture()
        self._graphs: dict[tuple[object, ...], _Graph] = {}
        memory_format = getattr(network, "memory_format", None)
        if memory_format is not None:
            self.memory_format = memory_format

    def forward(self, *inputs: Tensor) -> object:
        """Compute a batch."""
        size = len(inputs[0])
        full = 1 << (size - 1).bit_length()
        key = (full, *((x.shape[1:], x.dtype, x.stride()[1:]) for x in inputs))
        graph = self._graphs.get(key)
        if graph is None:
            if len(self._graphs) >= _MAX_GRAPHS:
                return self.network(*inputs)
            graph = self._graphs[key] = self._make(full, inputs)
        for held, x in zip(graph.inputs, inputs, strict=True):
            held[:size].copy_(x)
        graph.replay()
        return pytree.tree_map_only(Tensor, lambda out: out[:size].clone(), graph.outputs)

    def _make(self, full: int, inputs: tuple[Tensor, ...]) -> _Graph:
        # Of the layout that the inputs have; what fills them up is the last instance, again.
        held = tuple(x[[*range(len(x)), *[-1] * (full - len(x))]].clone() for x in inputs)
        outputs, replay = self._capture(lambda: self.network(*held))
        for out in pytree.tree_leaves(outputs):
            if not isinstance(out, Tensor) or out.dim() == 0 or len(out) != full:
                raise ValueError("an output does not have the batch first: it cannot be captured")
        return _Graph(held, outputs, replay)


class _DeviceCapture:
    """Captures graphs that share a pool of memory, since only one is replayed at a time."""

    def __init__(self) -> None:
        self._pool: GraphPool | None = None

    def __call__(self, call: Callable[[], object]) -> tuple[object, Callable[[], None]]:
        if self._pool is None:
            self._pool = GraphPool()
        with self._pool.side_stream():
            for _ in range(_NUM_WARM):
                call()
        with self._pool.captured() as graph:
            outputs = call()
        return outputs, graph.replay
