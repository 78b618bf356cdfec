"""Reads the full state of the GPUs from NVML, the driver's library."""

from collections.abc import Callable, Mapping, Sequence
from ctypes import byref
from dataclasses import dataclass, field
from typing import Any, TypeVar

from inferpool.workers.host.gpus import (
    ANSWER_S,
    DriverError,
    has_driver,
    in_time,
    is_cut,
    is_foreign,
    own_memory,
    problem_of,
    slices_of,
)

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """Present state of one GPU. Values that the driver does not know for its model are None."""

    index: int
    uuid: str
    name: str
    total_bytes: int | None
    """Its own memory; None if it uses the host's, or if a container may not ask."""
    used_bytes: int | None
    num_processes: int | None
    """Processes that compute on it."""
    capability: tuple[int, int] | None
    is_mig: bool
    slices: tuple[str, ...]
    """UUIDs of its MIG slices."""
    is_exclusive: bool
    """True if only one process at a time may use it."""
    is_prohibited: bool
    """True if no process may compute on it."""
    is_persistent: bool | None
    """True if the driver stays loaded while nobody uses the GPU."""
    num_ecc_errors: int | None
    """Uncorrected memory errors since the driver was loaded."""
    is_fabric_up: bool | None = None
    """False if it hangs on NVSwitches that are not set up yet; CUDA refuses it then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlState:
    """State of the driver and its GPUs."""

    problem: str = ""
    """Reason why NVML cannot be used; empty if it can."""
    is_broken: bool = False
    """True if there is a driver, but it does not work."""
    driver: str = ""
    cuda: tuple[int, int] = (0, 0)
    """Newest version of CUDA that the driver supports."""
    gpus: Sequence[GpuState] = ()
    failed: Mapping[int, str] = field(default_factory=dict)
    """GPUs that cannot be asked, by index, with the reason."""


def read_nvml(nvml: Any, answer_s: float = ANSWER_S) -> NvmlState:
    """Return what NVML reports, without a CUDA context. A driver that hangs is broken.

    Args:
        nvml: The module `pynvml`, or a fake of it.
        answer_s: Time for the driver to answer.
    """
    try:
        return in_time(lambda: _read(nvml), answer_s)
    except DriverError as error:
        return NvmlState(problem=str(error), is_broken=True)


def _read(nvml: Any) -> NvmlState:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if has_driver(nvml, error):
            return NvmlState(problem=problem_of(nvml, error), is_broken=True)
        return NvmlState(problem=str(error))
    try:
        version = nvml.nvmlSystemGetCudaDriverVersion_v2()
        gpus: list[GpuState] = []
        failed: dict[int, str] = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                gpus.append(_state(nvml, index))
            except nvml.NVMLError as error:
                if not is_foreign(nvml, error):
                    failed[index] = str(error)
        return NvmlState(
            driver=nvml.nvmlSystemGetDriverVersion(),
            cuda=(version // 1000, version % 1000 // 10),
            gpus=gpus,
            failed=failed,
        )
    except nvml.NVMLError as error:
        return NvmlState(problem=problem_of(nvml, error), is_broken=True)
    finally:
        nvml.nvmlShutdown()


def _state(nvml: Any, index: int) -> GpuState:
    gpu = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(question: Callable[[], _Answer]) -> _Answer | None:
        try:
            return question()
        except nvml.NVMLError:  # not supported by this model, or not permitted
            return None

    memory = ask(lambda: own_memory(nvml, gpu))
    is_mig = is_cut(nvml, gpu)
    mode = ask(lambda: nvml.nvmlDeviceGetComputeMode(gpu))
    processes = ask(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(gpu))
    persistence = ask(lambda: nvml.nvmlDeviceGetPersistenceMode(gpu))
    capability = ask(lambda: nvml.nvmlDeviceGetCudaComputeCapability(gpu))
    return GpuState(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(gpu),
        name=nvml.nvmlDeviceGetName(gpu),
        total_bytes=memory.total if memory else None,
        used_bytes=memory.used if memory else None,
        num_processes=None if processes is None else len(processes),
        capability=None if capability is None else (capability[0], capability[1]),
        is_mig=is_mig,
        slices=tuple(nvml.nvmlDeviceGetUUID(each) for each in slices_of(nvml, gpu))
        if is_mig
        else (),
        is_exclusive=mode == nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
        is_prohibited=mode == nvml.NVML_COMPUTEMODE_PROHIBITED,
        is_persistent=None if persistence is None else bool(persistence),
        is_fabric_up=ask(lambda: _is_fabric_up(nvml, gpu)),
        num_ecc_errors=ask(
            lambda: int(
                nvml.nvmlDeviceGetTotalEccErrors(
                    gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            )
        ),
    )


def _is_fabric_up(nvml: Any, gpu: object) -> bool | None:
    if not hasattr(nvml, "c_nvmlGpuFabricInfoV_t"):  # not NVIDIA's
        return None
    info = nvml.c_nvmlGpuFabricInfoV_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(gpu, byref(info))
    waiting = (nvml.NVML_GPU_FABRIC_STATE_NOT_STARTED, nvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS)
    return info.state not in waiting
