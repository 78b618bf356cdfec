"""What NVML, the driver's library, says of the GPUs: their state, beyond what placement needs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from inferpool.workers.host.devices import is_cut, slices_of

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """One GPU as it is now. What the driver does not say of this model is None."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    num_processes: int | None
    """Those that compute on it."""
    capability: tuple[int, int] | None
    is_mig: bool
    slices: tuple[str, ...]
    """UUIDs of what MIG has cut it into."""
    is_exclusive: bool
    """One process at a time may use it."""
    is_prohibited: bool
    """No process may compute on it."""
    is_persistent: bool | None
    """The driver stays loaded while nobody uses the GPU."""
    num_ecc_errors: int | None
    """Uncorrected errors of its memory since the driver was loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlState:
    """The driver and its GPUs."""

    problem: str = ""
    """Why NVML cannot be asked; empty if it can."""
    driver: str = ""
    cuda: tuple[int, int] = (0, 0)
    """The newest CUDA that the driver can run."""
    gpus: Sequence[GpuState] = ()


def read_nvml(nvml: Any) -> NvmlState:
    """Ask NVML; makes no CUDA context.

    Args:
        nvml: The module `pynvml`, or what answers as it does.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return NvmlState(problem=str(error))
    try:
        version = nvml.nvmlSystemGetCudaDriverVersion_v2()
        return NvmlState(
            driver=_text(nvml.nvmlSystemGetDriverVersion()),
            cuda=(version // 1000, version % 1000 // 10),
            gpus=[_state(nvml, index) for index in range(nvml.nvmlDeviceGetCount())],
        )
    except nvml.NVMLError as error:
        return NvmlState(problem=str(error))
    finally:
        nvml.nvmlShutdown()


def _state(nvml: Any, index: int) -> GpuState:
    gpu = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(question: Callable[[], _Answer]) -> _Answer | None:
        try:
            return question()
        except nvml.NVMLError:  # not supported by this model, or not permitted
            return None

    memory = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(gpu))  # of a whole GPU, who has a slice is
    is_mig = is_cut(nvml, gpu)  # not told
    mode = ask(lambda: nvml.nvmlDeviceGetComputeMode(gpu))
    processes = ask(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(gpu))
    persistence = ask(lambda: nvml.nvmlDeviceGetPersistenceMode(gpu))
    capability = ask(lambda: nvml.nvmlDeviceGetCudaComputeCapability(gpu))
    return GpuState(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(gpu)),
        name=_text(nvml.nvmlDeviceGetName(gpu)),
        total_bytes=memory.total if memory else 0,
        used_bytes=memory.used if memory else 0,
        num_processes=None if processes is None else len(processes),
        capability=None if capability is None else (capability[0], capability[1]),
        is_mig=is_mig,
        slices=tuple(_text(nvml.nvmlDeviceGetUUID(each)) for each in slices_of(nvml, gpu))
        if is_mig
        else (),
        is_exclusive=mode == nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
        is_prohibited=mode == nvml.NVML_COMPUTEMODE_PROHIBITED,
        is_persistent=None if persistence is None else bool(persistence),
        num_ecc_errors=ask(
            lambda: int(
                nvml.nvmlDeviceGetTotalEccErrors(
                    gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            )
        ),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
