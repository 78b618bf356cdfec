"""Collectives and transfers between simulated devices: the backend `simccl` of torch.distributed.

It orders its work as NCCL does, since that is where programs go wrong. An operation goes to a
stream of the communicator, which first waits for what the current stream was given so far. The host
does not wait. `Work.wait()` makes the current stream wait for the operation, and not the host. A
send ends when its receiver has the data. A rank whose peer has died hangs, on the device only.

Each pair of ranks has a communicator, and a stream, for its transfers in both directions. A group
that is bound to a device (`device_id`) has one for everything. Data travels through gloo.
"""

import ctypes
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "simccl"
_DATA_TAG, _RECEIPT_TAG = 1, 2
_HIGH_PRIORITY = -1
"""Streams of this priority are not those that programs use."""
_ENDED = timedelta(days=365)
logger = logging.getLogger(__name__)


class _OnStream(dist._Work):
    """An operation that a communicator's stream was given."""

    def __init__(self, stream: torch.Stream, *, holds_host: bool = False) -> None:
        super().__init__()
        self._event = torch.Event(stream.device)
        stream.record_event(self._event)
        self._device = stream.device
        self._holds_host = holds_host

    def wait(self, timeout: timedelta = _ENDED) -> bool:
        """Make the current stream of this thread wait for the operation."""
        torch.accelerator.current_stream(self._device).wait_event(self._event)
        if self._holds_host:
            self._event.synchronize()
        return True

    synchronize = block_current_stream = wait

    def is_completed(self) -> bool:
        return bool(self._event.query())

    is_success = is_completed


class _WithoutSplitting:
    """The answer to torch's question for a backend: groups are not made from other ones."""

    supports_splitting = False


class Communicators(dist.ProcessGroup):
    """A group of ranks, each with a simulated device."""

    def __init__(self, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        self._host = dist.ProcessGroupGloo(options.store, rank, size, timeout=options.timeout)
        whole = getattr(options, "process_group", None)  # torch 2.11 does not tell
        bound = getattr(whole, "bound_device_id", None)
        if bound is not None:
            self.bound_device_id = bound
        self._is_bound = bound is not None
        self._streams: dict[tuple[torch.device, int | None], torch.Stream] = {}
        self._lock = threading.Lock()
        self._receipt = torch.zeros(1, dtype=torch.uint8)

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def getSize(self) -> int:  # noqa: N802
        return int(self.size())

    @property
    def pg_name(self) -> str:
        return self.group_name

    def _get_backend(self, device: torch.device) -> Any:
        return _WithoutSplitting()

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> dist.Work:
        (data,) = map(_InKernel, tensors)

        def act() -> None:
            self._host.send([data.view()], to, _DATA_TAG).wait()
            self._host.recv([torch.empty(1, dtype=torch.uint8)], to, _RECEIPT_TAG).wait()

        return self._enqueue(tensors, act, peer=to)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> dist.Work:
        (data,) = map(_InKernel, tensors)

        def act() -> None:
            self._host.recv([data.view()], source, _DATA_TAG).wait()
            self._host.send([torch.zeros(1, dtype=torch.uint8)], source, _RECEIPT_TAG).wait()

        return self._enqueue(tensors, act, peer=source)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return self._on_host(self._host.allreduce, tensors, opts or dist.AllreduceOptions())

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return self._on_host(self._host.broadcast, tensors, opts or dist.BroadcastOptions())

    def allgather(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: Any = None,
    ) -> dist.Work:
        to = [_InKernel(tensor) for tensor in outputs[0]]
        (data,) = map(_InKernel, inputs)
        return self._enqueue(
            [*outputs[0], *inputs],
            lambda: self._host.allgather([[d.view() for d in to]], [data.view()]).wait(),
        )

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        return self.allgather([list(output.view(self.size(), -1))], [given.view(-1)])

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        to, data = _InKernel(output), _InKernel(given)
        reduced = dist.AllreduceOptions()
        reduced.reduceOp = opts.reduceOp if opts else dist.ReduceOp.SUM

        def act() -> None:
            whole = data.view().clone()
            self._host.allreduce([whole], reduced).wait()
            to.view().copy_(whole.view(self.size(), *to.shape)[self.rank()])

        return self._enqueue([output, given], act)

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base
    """Names that torch 2.15 calls."""

    def barrier(self, opts: Any = None) -> dist.Work:
        self._enqueue([], lambda: self._host.barrier().wait())
        return _OnStream(self._stream(_here(), None), holds_host=True)

    def _on_host(
        self, call: Callable[..., dist.Work], tensors: Sequence[Tensor], opts: Any
    ) -> dist.Work:
        data = [_InKernel(tensor) for tensor in tensors]
        return self._enqueue(tensors, lambda: call([d.view() for d in data], opts).wait())

    def _enqueue(
        self, tensors: Sequence[Tensor], act: Callable[[], object], peer: int | None = None
    ) -> dist.Work:
        device = tensors[0].device if tensors else _here()
        if any(tensor.device != device for tensor in tensors):
            raise ValueError(f"{NAME} needs all tensors of a call on one device")
        with self._lock:
            stream = self._stream(device, None if self._is_bound else peer)
            stream.wait_stream(torch.accelerator.current_stream(device))
            for tensor in tensors:
                tensor.record_stream(stream)  # nobody gets its memory before we are done with it
            launch(stream, act)
            return _OnStream(stream)

    def _stream(self, device: torch.device, peer: int | None) -> torch.Stream:
        key = (device, peer)
        if key not in self._streams:
            self._streams[key] = torch.Stream(device, priority=_HIGH_PRIORITY)
        return self._streams[key]


class _InKernel:
    """A device tensor as operations of a stream see it: by its place in memory, without owning."""

    def __init__(self, tensor: Tensor) -> None:
        if tensor.device.type != "sim" or not tensor.is_contiguous():
            raise ValueError(f"{NAME} needs contiguous tensors of a simulated device")
        self.shape, self._dtype, self._num_bytes = tensor.shape, tensor.dtype, tensor.nbytes
        self._address = torch.ops.sim.kernel_address(tensor.data_ptr())

    def view(self) -> Tensor:
        """Return the same numbers as a CPU tensor."""
        if not self._num_bytes:
            return torch.empty(self.shape, dtype=self._dtype)
        memory = (ctypes.c_char * self._num_bytes).from_address(self._address)
        return torch.frombuffer(memory, dtype=self._dtype).view(self.shape)


_acts: dict[int, Callable[[], object]] = {}
_numbers = itertools.count()


@ctypes.CFUNCTYPE(None, ctypes.c_int64)
def _run(number: int) -> None:
    """Do what a stream has come to. Runs in the thread that is the stream."""
    act = _acts.pop(number)
    try:
        act()
    except RuntimeError as error:
        logger.warning("a transfer of simulated devices hangs from now on: %s", error)
        threading.Event().wait()  # as a kernel of NCCL whose peer is gone; until the process ends


_run_address = ctypes.cast(_run, ctypes.c_void_p).value


def launch(stream: torch.Stream, act: Callable[[], object]) -> None:
    """Give a stream a Python function."""
    number = next(_numbers)
    _acts[number] = act
    torch.ops.sim.launch_host(stream.device_index, stream.stream_id, _run_address, number)


def _here() -> torch.device:
    return torch.device("sim", torch.accelerator.current_device_index())


def register() -> None:
    """Make torch.distributed know the backend."""
    dist.Backend.register_backend(
        NAME, lambda options, _: Communicators(options), extended_api=True, devices=["sim"]
    )
