"""Reads the GPUs of this host, and slices of them, from NVML, without using them. Front end."""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil

from inferpool.models.accelerator.kinds import CUDA
from inferpool.workers.host.nodes import SYS, place_on_bus

logger = logging.getLogger(__name__)

_PCI_DEVICES = "bus/pci/devices"
_NVIDIA, _DISPLAY = "0x10de", "0x03"
"""NVIDIA's number, and the class of GPUs, in the PCI ID repository."""
ANSWER_S = 60.0
"""Time for a driver to describe the GPUs; it may have to start each of them first."""
_Answer = TypeVar("_Answer")
_REMEDIES = {
    "NVML_ERROR_DRIVER_NOT_LOADED": "`modprobe nvidia` loads its kernel module, or says why not",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": "the driver was updated while it was loaded: restart "
    "this machine",
    "NVML_ERROR_NO_PERMISSION": "this user may not open /dev/nvidia*",
    "NVML_ERROR_UNKNOWN": "if this is a container, restart it: it has lost its devices",
}
"""Remedies for errors of `nvmlInit`."""


class DriverError(Exception):
    """The driver of the GPUs is there, but does not work."""


def in_time(read: Callable[[], _Answer], answer_s: float = ANSWER_S) -> _Answer:
    """Return what a function reads from a driver, which may block for ever if it fails.

    Raises:
        DriverError: The driver does not answer.
    """
    answer: Future[_Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(read())
        except Exception as error:  # the caller raises it
            answer.set_exception(error)

    threading.Thread(target=run, name="read GPUs", daemon=True).start()
    try:
        return answer.result(answer_s)
    except TimeoutError:
        said = f"no GPU can be used: the driver has not answered in {answer_s:g} s"
        raise DriverError(said) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator of this host: a GPU, or a MIG slice of one."""

    index: int
    """NVML's index of the GPU."""
    uuid: str
    name: str
    memory_bytes: int
    cpus: tuple[int, ...]
    """Cores near it; empty if unknown."""
    node: int | None = None
    """Memory node near it; None if unknown."""
    sliced_from: str = ""
    """UUID of the GPU that it is a slice of; empty for a whole GPU."""
    kind: str = CUDA.kind
    """Kind of accelerator: the type of its device in torch."""
    is_unified: bool = False
    """True if it has no memory of its own: `memory_bytes` is that of the host."""
    distances: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Distances of the other GPUs by UUID: 0 over NVLink, else NVML's value, from 10 for the same
    PCIe switch to 50 for another socket. GPUs with an unknown distance are left out."""

    def __str__(self) -> str:
        """Return a description for people: cuda:0 (name, memory)."""
        name = self.uuid if self.sliced_from else f"{self.kind}:{self.index}"
        shared = " shared with the host" if self.is_unified else ""
        return f"{name} ({self.name}, {self.memory_bytes / 2**30:.0f} GiB{shared})"


def read_gpus(nvml: Any, kind: str = CUDA.kind, sys: Path = SYS) -> list[Gpu]:
    """Return the GPUs that NVML reports, and the slices of GPUs in MIG mode; none without a driver.

    Args:
        nvml: The module `pynvml`, or one with its functions.
        kind: Kind of the accelerators that it reports.
        sys: Folder in which sysfs is mounted.

    Raises:
        DriverError: There is a driver, but it does not work.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if not has_driver(nvml, error, sys / _PCI_DEVICES):
            return []
        raise DriverError(problem_of(nvml, error)) from error
    try:
        found: list[Gpu] = []
        handles: dict[str, object] = {}
        for index in _indices(nvml):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                gpus = list(_gpus_of(nvml, handle, index, sys))
            except nvml.NVMLError as error:
                level = logging.INFO if is_foreign(nvml, error) else logging.ERROR
                logger.log(level, "%s:%d is left out: NVML says %s", kind, index, error)
                continue
            found += gpus
            handles |= {gpu.uuid: handle for gpu in gpus if not gpu.sliced_from}
        return [
            replace(gpu, kind=kind, distances=_distances(nvml, handles, gpu.uuid)) for gpu in found
        ]
    finally:
        nvml.nvmlShutdown()


def has_driver(nvml: Any, error: Exception, pci_devices: Path = SYS / _PCI_DEVICES) -> bool:
    """Return False if `nvmlInit` failed only because this host has no driver, or no GPU for it."""
    if _is(nvml, error, "NVML_ERROR_DRIVER_NOT_LOADED"):
        return any(map(_is_gpu, pci_devices.glob("*")))
    return not _is(nvml, error, "NVML_ERROR_LIBRARY_NOT_FOUND")


def _is_gpu(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor.startswith(_NVIDIA) and kind.startswith(_DISPLAY)


def problem_of(nvml: Any, error: Exception) -> str:
    """Return why a driver cannot be used, for people."""
    advice = next((f"; {text}" for name, text in _REMEDIES.items() if _is(nvml, error, name)), "")
    return f"no GPU can be used: NVML says {str(error).rstrip('.')}{advice}"


def is_foreign(nvml: Any, error: Exception) -> bool:
    """Return True if a GPU is not for this process, but for another job on this host, say."""
    return _is(nvml, error, "NVML_ERROR_NO_PERMISSION")


def _is(nvml: Any, error: Exception, name: str) -> bool:
    value = getattr(error, "value", None)
    return value is not None and value == getattr(nvml, name, None)


def _indices(nvml: Any) -> range:
    try:
        return range(nvml.nvmlDeviceGetCount())
    except nvml.NVMLError as error:
        raise DriverError(problem_of(nvml, error)) from error


def _gpus_of(nvml: Any, handle: object, index: int, sys: Path) -> Iterator[Gpu]:
    node, local_cpus = place_on_bus(_bus_id(nvml, handle), sys)
    cpus = _near_cpus(nvml, handle) or local_cpus
    if not is_cut(nvml, handle):
        yield _gpu(nvml, handle, index, cpus, node)
        return
    whole = nvml.nvmlDeviceGetUUID(handle)
    for each in slices_of(nvml, handle):
        yield replace(_gpu(nvml, each, index, cpus, node), sliced_from=whole)


def _bus_id(nvml: Any, handle: object) -> str:
    try:
        found = nvml.nvmlDeviceGetPciInfo(handle).busId
    except nvml.NVMLError:
        return ""
    return found.decode() if isinstance(found, bytes) else str(found)


def is_cut(nvml: Any, handle: object) -> bool:
    """Return True if a GPU is in MIG mode: CUDA then sees only its slices."""
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE)
    except nvml.NVMLError:  # a GPU without MIG
        return False


def slices_of(nvml: Any, handle: object) -> Iterator[object]:
    """Return the handles of the MIG slices of a GPU."""
    try:
        most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except nvml.NVMLError:
        return
    for number in range(most):
        try:
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except nvml.NVMLError:  # there are fewer than the most
            continue


def _gpu(nvml: Any, handle: object, index: int, cpus: tuple[int, ...], node: int | None) -> Gpu:
    own = own_memory(nvml, handle)
    return Gpu(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        memory_bytes=own.total if own else psutil.virtual_memory().total,
        is_unified=own is None,
        cpus=cpus,
        node=node,
    )


def own_memory(nvml: Any, handle: object) -> Any:
    """Return what NVML says about a GPU's memory; None if it uses that of the host (GB10, Jetson).

    Raises:
        nvml.NVMLError: The memory cannot be asked for.
    """
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        if not _is(nvml, error, "NVML_ERROR_NOT_SUPPORTED"):
            raise
        return None
    return memory if memory.total else None


def _distances(nvml: Any, handles: Mapping[str, object], uuid: str) -> dict[str, int]:
    if uuid not in handles:
        return {}
    found = {}
    for other, handle in handles.items():
        pair = (handles[uuid], handle)
        try:
            link = nvml.nvmlDeviceGetP2PStatus(*pair, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            is_linked = link == nvml.NVML_P2P_STATUS_OK
        except nvml.NVMLError:
            is_linked = False
        try:
            if other != uuid:
                found[other] = (
                    0 if is_linked else int(nvml.nvmlDeviceGetTopologyCommonAncestor(*pair))
                )
        except nvml.NVMLError:  # unknown to this driver or machine
            continue
    return found


def _near_cpus(nvml: Any, handle: object) -> tuple[int, ...]:
    words = ((os.cpu_count() or 1) + 63) // 64
    try:
        masks = nvml.nvmlDeviceGetCpuAffinity(handle, words)
    except nvml.NVMLError:
        return ()
    return tuple(
        word * 64 + bit for word, mask in enumerate(masks) for bit in range(64) if mask >> bit & 1
    )
