"""All that the product says to an accelerator. Worker processes only.

The kind of a device is its type in torch ("cuda"). Calls go through `torch.accelerator` where it
has them, else through the module that torch has for the kind (`torch.cuda`), so that another kind
of accelerator needs no change elsewhere.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from inferpool.models.accelerator.kinds import accelerator_of

Device = torch.device | str


def is_accelerator(device: Device) -> bool:
    """Return True for a device that computes apart from the host, from a queue of work."""
    return torch.device(device).type not in ("cpu", "meta")


def module_of(device: Device) -> Any:
    """Return the module that torch has for a kind of accelerator, such as `torch.cuda`."""
    return torch.get_device_module(torch.device(device).type)


def module_in_use() -> Any:
    """Return the module of the accelerator that this process uses; None if it uses none.

    This never initialises an accelerator.
    """
    device = torch.accelerator.current_accelerator()
    if device is None or accelerator_of(device.type) is None:
        return None
    module = module_of(device)
    return module if module.is_initialized() else None


def name_of(device: Device) -> str:
    """Return a description of a device for people, such as "NVIDIA H100 80GB HBM3" or "cpu"."""
    if not is_accelerator(device):
        return str(device)
    return str(module_of(device).get_device_name(torch.device(device)))


def build_of(device: Device) -> str:
    """Return what compiled code for an accelerator depends on; empty for the CPU.

    That is its compute capability, and the versions of CUDA and Triton.
    """
    if not is_accelerator(device):
        return ""
    capability = module_of(device).get_device_capability(torch.device(device))
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = ""
    return f"{capability} {torch.version.cuda} {triton}"


def select(device: Device) -> None:
    """Select an accelerator as the current device of this thread; do nothing for the CPU."""
    if is_accelerator(device):
        module_of(device).set_device(torch.device(device))


def synchronize(device: Device | None = None) -> None:
    """Wait until a device has done all queued work; by default the one in use.

    Raises:
        torch.AcceleratorError: The device's context is lost, perhaps by an earlier call.
    """
    if device is None:
        if (module := module_in_use()) is not None:
            module.synchronize()
    elif is_accelerator(device):
        module_of(device).synchronize(torch.device(device))


def current_stream() -> torch.Stream | None:
    """Return this thread's stream of the accelerator in use; None if this process uses none."""
    module = module_in_use()
    return module.current_stream() if module is not None else None


def finish_stream(device: Device) -> None:
    """Wait until a device has done all work queued on this thread's stream.

    Then its allocator returns no memory to this thread that is still read or written.

    Raises:
        torch.AcceleratorError: The device's context is lost, perhaps by an earlier call.
    """
    if is_accelerator(device):
        torch.accelerator.current_stream(torch.device(device)).synchronize()


def use_stream(stream: torch.Stream) -> None:
    """Use a stream, and its device, as the current ones of this thread."""
    module = module_of(stream.device)
    module.set_device(stream.device)
    module.set_stream(stream)


def use_float32() -> None:
    """Compute convolutions of float32 in float32: by default torch rounds their inputs to TF32.

    It does not round matrix products by default. This switch keeps the newer ones
    (`fp32_precision`) in step, while after these torch raises errors where a library reads it.
    """
    with warnings.catch_warnings():  # some versions prefer the newer ones, and say so once
        warnings.simplefilter("ignore", UserWarning)
        torch.backends.cudnn.allow_tf32 = False


def has_tf32() -> bool:
    """Return whether convolutions or matrix products of float32 may be rounded to TF32."""
    backends: Any = torch.backends  # its annotations leave out `conv` and `rnn`
    found = (backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul)
    return any(each.fp32_precision == "tf32" for each in found)


@contextmanager
def tf32() -> Iterator[None]:
    """Allow the block to round float32 to TF32, in a process that has called `use_float32`.

    Other threads' calls meanwhile may be rounded, too.
    """
    _allow_tf32(True)
    try:
        yield
    finally:
        _allow_tf32(False)


def _allow_tf32(is_allowed: bool) -> None:
    torch.backends.cudnn.allow_tf32 = is_allowed
    torch.backends.cuda.matmul.allow_tf32 = is_allowed


def limit_memory(device: Device, fraction: float) -> None:
    """Limit this process to that part of a device's memory."""
    module_of(device).set_per_process_memory_fraction(fraction, torch.device(device))


def free_bytes(device: Device) -> int:
    """Return the free memory of an accelerator."""
    free, _ = module_of(device).mem_get_info(torch.device(device))
    return int(free)


def foreign_bytes(device: Device) -> int:
    """Return the memory in use beside this process's tensors: by contexts and other processes."""
    module = module_of(device)
    free, total = module.mem_get_info(torch.device(device))
    return int(total - free - module.memory_reserved(torch.device(device)))


def most_reserved_bytes(device: Device) -> int:
    """Return the most memory that torch has reserved on an accelerator so far."""
    return int(module_of(device).max_memory_reserved(torch.device(device)))


def reset_peak(device: Device) -> None:
    """Begin to measure the peak of the memory in use on an accelerator."""
    module_of(device).reset_peak_memory_stats(torch.device(device))


def peak_bytes(device: Device) -> int:
    """Return the most memory that tensors took on an accelerator since `reset_peak`."""
    return int(module_of(device).max_memory_allocated(torch.device(device)))


def release_memory() -> None:
    """Return unused memory of the accelerator in use to its driver."""
    if (module := module_in_use()) is not None:
        module.empty_cache()


def pinned(value: object) -> Any:
    """Pin a CPU tensor, so that a device can copy it itself; return other values as they are."""
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return value
    return value.pin_memory()


def stack_pinned(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors like `torch.stack`; those on the CPU in pinned memory, with one copy.

    torch keeps pinned memory for the next batches of about this size.
    """
    first = tensors[0]
    is_plain = first.device.type == "cpu" and first.layout is torch.strided
    # torch would round numbers of several dtypes to that of `out`.
    if not is_plain or first.is_quantized or any(each.dtype != first.dtype for each in tensors):
        return torch.stack([*tensors])
    out = torch.empty((len(tensors), *first.shape), dtype=first.dtype, pin_memory=True)
    return torch.stack([*tensors], out=out)


def pin_in_place(memory: Tensor, device: Device) -> bool:
    """Pin host memory where it lies, for as long as this process has it mapped.

    Returns:
        True if a device copies it itself now; not every kind of accelerator has a way.
    """
    runtime = getattr(module_of(device), "cudart", None)
    if runtime is None:
        return False
    return int(runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0


class HandOver:
    """The moment at which a stream has done all work queued until now."""

    def __init__(self, stream: torch.Stream) -> None:
        """Mark the moment on a stream; the host does not wait for it."""
        self._module = module_of(stream.device)
        # A thread that waits for a blocking event sleeps, and leaves its core to others. torch's
        # own `Event`, for any kind, ignores that wish.
        self._event: torch.Event = self._module.Event(enable_timing=True, blocking=True)
        stream.record_event(self._event)

    def take(self, values: Iterable[object]) -> None:
        """Have this thread's stream wait for the moment, and then use what the other one made.

        The memory of the tensors among the values is reused only after this thread's stream is done
        with them. The host does not wait.
        """
        stream: torch.Stream = self._module.current_stream()
        stream.wait_event(self._event)
        for value in values:
            if isinstance(value, Tensor) and is_accelerator(value.device):
                value.record_stream(stream)

    def wait(self) -> None:
        """Block this thread, asleep, until the moment.

        Raises:
            torch.AcceleratorError: The device's context is lost, perhaps by an earlier call.
        """
        self._event.synchronize()

    def is_over(self) -> bool:
        """Return whether the moment has passed, without waiting.

        Raises:
            torch.AcceleratorError: The device's context is lost, perhaps by an earlier call.
        """
        return self._event.query()

    def seconds_since(self, earlier: "HandOver") -> float:
        """Return the device's time between two moments that are over."""
        return earlier._event.elapsed_time(self._event) / 1000


def mark_here() -> HandOver:
    """Mark the moment at which this thread's stream has done all work queued until now."""
    stream = current_stream()
    assert stream is not None, "the device is in use"
    return HandOver(stream)


class SideStream:
    """A stream of a device that runs beside the one that computes. Any thread may use it.

    What the one stream has made may be used by the other only after a `HandOver`.
    """

    def __init__(self, device: Device) -> None:
        self._stream: torch.Stream = module_of(device).Stream(torch.device(device))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Queue all work of this thread in the block on this stream."""
        before = module_of(self._stream.device).current_stream()
        use_stream(self._stream)
        try:
            yield
        finally:
            use_stream(before)

    def mark(self) -> HandOver:
        """Mark the moment at which it has done all work queued until now."""
        return HandOver(self._stream)
