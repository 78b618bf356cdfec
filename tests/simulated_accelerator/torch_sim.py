"""The module `torch.sim`: the names that `torch.cuda` has, and what tests do to the device.

`import torch` loads it, where the folder of the built library is on the path.
"""

import atexit
import contextlib
import gc
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import distribution
from types import SimpleNamespace
from typing import Any

import torch
from torch import Event, Stream  # noqa: F401  # names of torch.cuda
from torch.accelerator import (  # noqa: F401  # names of torch.cuda
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
    set_stream,
)

from tests.simulated_accelerator import collectives
from tests.simulated_accelerator.build import LIBRARY, NAME

Device = torch.device | str | int | None
Pool = tuple[int, int]

_CAPTURE_MODES = {"global": 0, "thread_local": 1, "relaxed": 2}
_DRAINED_WITHIN_S = 10.0
_pools = itertools.count(1)


def autoload() -> None:
    """Register the device with torch: the entry point of `torch.backends`."""
    torch.utils.rename_privateuse1_backend("sim")
    torch.ops.load_library(str(distribution(NAME).locate_file(LIBRARY)))
    torch._register_device_module("sim", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    collectives.register()
    for name, us in json.loads(os.environ.get("SIM_DURATIONS_US") or "{}").items():
        set_duration_us(name, **us) if isinstance(us, Mapping) else set_duration_us(name, us)
    atexit.register(lambda: _ops().drain(_DRAINED_WITHIN_S))


def _ops() -> Any:
    return torch.ops.sim


def _index(device: Device) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


def _place(stream: torch.Stream | None) -> tuple[int, int]:
    stream = stream or current_stream()
    return stream.device_index, stream.stream_id


# ---- devices


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    """Return True once this process has used a device, not only asked about it."""
    return bool(_ops().was_used())


def _is_in_bad_fork() -> bool:
    return bool(_ops().is_forked())


def init() -> None:
    """Do nothing: a device is initialised when it is used."""


_lazy_init = init


def device_count() -> int:
    return int(_ops().num_devices())


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Device) -> None:
    torch.accelerator.set_device_index(_index(device))


def device(device: Device) -> contextlib.AbstractContextManager[Any]:
    return torch.accelerator.device_index(_index(device))


def synchronize(device: Device = None) -> None:
    torch.accelerator.synchronize(_index(device))


def get_device_name(device: Device = None) -> str:
    return "Simulated accelerator"


def get_device_capability(device: Device = None) -> tuple[int, int]:
    return 9, 0


def get_arch_list() -> list[str]:
    return ["sm_90"]


def get_device_properties(device: Device = None) -> SimpleNamespace:
    major, minor = get_device_capability(device)
    return SimpleNamespace(
        name=get_device_name(device),
        major=major,
        minor=minor,
        total_memory=_ops().capacity(_index(device)),
        multi_processor_count=1,
        uuid=f"51000000-0000-4000-8000-{_ops().number_of(_index(device)):012d}",
    )


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported() -> bool:
    return True


# ---- random numbers, which are those of the CPU


def manual_seed(seed: int) -> None:
    """Do nothing: torch seeds the CPU's generator itself."""


manual_seed_all = manual_seed


def get_rng_state(device: Device = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Device = None) -> None:
    torch.set_rng_state(state)


# ---- streams


def current_stream(device: Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Device = None) -> torch.Stream:
    index = _index(device)
    kind = current_stream(index).device_type
    return torch.Stream(stream_id=0, device_index=index, device_type=kind)


def stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if stream is None else stream


# ---- memory


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Return the free and the total memory; all processes that share the device use it."""
    free, total = _ops().memory_info(_index(device))
    return free, total


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    _ops().limit_memory(_index(device), float(fraction))


def host_register(address: int, num_bytes: int) -> None:
    """Mark a range of host memory as pinned: copies from and to it are asynchronous."""
    _ops().register_host(address, num_bytes)


def host_unregister(address: int) -> None:
    """Wait for copies from and to a range that `host_register` marked, and mark it no more."""
    _ops().unregister_host(address)


def cudart() -> SimpleNamespace:
    """Return the functions of CUDA's runtime that `torch.cuda.cudart()` has, as far as needed."""

    def register(address: int, num_bytes: int, _: int) -> int:
        host_register(address, num_bytes)
        return 0

    def unregister(address: int) -> int:
        host_unregister(address)
        return 0

    return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)


# ---- graphs


def graph_pool_handle() -> Pool:
    return 0, next(_pools)


def is_current_stream_capturing() -> bool:
    return bool(_ops().is_stream_capturing(*_place(None)))


class CUDAGraph:
    """Work that a stream was given during a capture; has the methods of `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self._number: int | None = None

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global") -> None:
        """Capture what the current stream is given, until `capture_end`."""
        mode = _CAPTURE_MODES[capture_error_mode]
        self._number = _ops().capture_begin(pool[1] if pool else 0, mode)

    def capture_end(self) -> None:
        """End the capture; this fails if a forbidden call has spoilt it."""
        _ops().capture_end(self._number)

    def replay(self) -> None:
        """Give the current stream all that was captured."""
        _ops().replay(self._number)

    def pool(self) -> Pool:
        """Return the pool, so that other graphs can use it too."""
        return 0, _ops().graph_pool(self._number)

    def reset(self) -> None:
        """Forget what was captured."""
        if self._number is not None:
            _ops().forget_graph(self._number)
            self._number = None

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.reset()


class graph:  # noqa: N801  # as in torch.cuda
    """Captures the block in a graph, on a stream of its own; like `torch.cuda.graph`."""

    def __init__(
        self,
        cuda_graph: CUDAGraph,
        pool: Pool | None = None,
        stream: torch.Stream | None = None,
        capture_error_mode: str = "global",
    ) -> None:
        self._graph, self._pool, self._mode = cuda_graph, pool, capture_error_mode
        self._stream = stream or torch.Stream(f"sim:{current_device()}")

    def __enter__(self) -> None:
        synchronize()
        gc.collect()
        empty_cache()
        self._stream.__enter__()
        try:
            self._graph.capture_begin(self._pool, self._mode)
        except BaseException:
            self._stream.__exit__(None, None, None)
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            self._graph.capture_end()
        finally:
            self._stream.__exit__(*error)


# ---- what tests do to a device


@contextlib.contextmanager
def held(stream: torch.Stream | None = None) -> Iterator[None]:
    """Hold a stream: nothing that it is given from now on is done before the block ends."""
    gate = _ops().hold(*_place(stream))
    try:
        yield
    finally:
        _ops().let_go(gate)


def hang(stream: torch.Stream | None = None) -> None:
    """Let a stream do nothing from now on that it is given."""
    _ops().hold(*_place(stream))


def call(function: Callable[[], object], stream: torch.Stream | None = None) -> None:
    """Give a stream a function of Python, as `cudaLaunchHostFunc` does; it may wait."""
    collectives.launch(stream or current_stream(), function)


def busy(us: float, stream: torch.Stream | None = None) -> None:
    """Give a stream work that takes so long, and no core."""
    _ops().busy(*_place(stream), float(us))


def busy_s(device: Device = None) -> float:
    """Return how long the device's streams have worked, added up."""
    return float(_ops().busy_us(_index(device))) / 1e6


def set_delay_us(us: int, device: Device = None) -> None:
    """Let each operation begin later by that time. SIM_DELAY_US does so from the start."""
    _ops().set_delay_us(_index(device), int(us))


def set_duration_us(operator: str, us: int, *, computes: bool = True) -> None:
    """Let an operator take that time, which needs no core, beside its computing.

    SIM_DURATIONS_US='{"aten::addmm": 500, "aten::relu": {"us": 90, "computes": false}}' does so in
    all processes.

    Args:
        operator: Name of it on a device: "aten::convolution_overrideable" for convolutions.
        us: Microseconds for each call; on all devices.
        computes: False leaves out the computing; the outputs are whatever was in their memory.
    """
    _ops().set_duration_us(operator, int(us), computes)


def lose(device: Device = None) -> None:
    """Make every further call of this process to the device fail, and drop what is queued."""
    _ops().lose(_index(device))


def fault_after(num_operations: int, device: Device = None) -> None:
    """Let an operation access wrong memory, after `num_operations`."""
    _ops().fault_after(_index(device), num_operations)


def out_of_memory_after(num_allocations: int, device: Device = None) -> None:
    """Let one allocation of this thread fail for want of memory, after `num_allocations`."""
    _ops().out_of_memory_after(_index(device), num_allocations)


def revive(device: Device = None) -> None:
    """Undo `lose` and `fault_after`, and an error of the device."""
    _ops().revive(_index(device))
