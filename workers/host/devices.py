"""Parses the names of devices in settings, and finds the devices of this host.

GPUs are found through NVML, without a CUDA context; cores through the affinity mask and the
cgroup's quota.
"""

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from inferpool.models.accelerator.kinds import (
    CUDA,
    Accelerator,
    accelerator_of,
    known_accelerators,
)
from inferpool.workers.cgroups import MOUNT, read_limits

logger = logging.getLogger(__name__)

DEVICE_FORMS = (
    '"auto", "cpu", "cuda", GPUs such as "cuda:0,1", UUIDs as `nvidia-smi -L` prints them '
    '("GPU-...", "MIG-..."), or several of these with commas between'
)
_UUID = re.compile(r"(GPU|MIG)-[\w/-]+")
_KIND = re.compile(r"[a-z]+(:\d+)?")
_INDEX = re.compile(r"\d+")


class DeviceError(Exception):
    """The devices in the settings do not exist, or cannot be used in this way."""


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
    sliced_from: str = ""
    """UUID of the GPU that it is a slice of; empty for a whole GPU."""
    kind: str = CUDA.kind
    """Kind of accelerator: the type of its device in torch."""
    distances: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Distances of the other GPUs by UUID: 0 over NVLink, else NVML's value, from 10 for the same
    PCIe switch to 50 for another socket. GPUs with an unknown distance are left out."""

    def __str__(self) -> str:
        """Return a description for people: cuda:0 (name, memory)."""
        name = self.uuid if self.sliced_from else f"{self.kind}:{self.index}"
        return f"{name} ({self.name}, {self.memory_bytes / 2**30:.0f} GiB)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Devices for replicas: the GPUs and cores of this host."""

    cpus: tuple[int, ...]
    """Cores that this process may run on."""
    num_cores: int
    """Cores' worth of time that it may use: fewer than `cpus` under a cgroup quota."""
    gpus: tuple[Gpu, ...] = ()
    """Accelerators, all of one kind: torch uses one kind in a process."""

    @property
    def accelerator(self) -> Accelerator:
        """Kind of the GPUs; CUDA if there are none."""
        return (accelerator_of(self.gpus[0].kind) if self.gpus else None) or CUDA

    def describe(self) -> list[str]:
        """Return one line per device, for people."""
        cores = f"{self.num_cores} CPU core{'s' if self.num_cores != 1 else ''}"
        return [*map(str, self.gpus), cores]


def parse_devices(text: str) -> tuple[str, ...]:
    """Return the devices that a text names, one by one.

    Args:
        text: "auto" alone, or names with commas between. An index may follow a GPU's name:
            "cuda:0,1" means "cuda:0,cuda:1". The same device may be named twice.

    Returns:
        "auto", "cpu", a kind such as "cuda" (every GPU), "cuda:N" with a GPU's index in NVML's
        order, or a UUID or the beginning of one.

    Raises:
        ValueError: The text is invalid.
    """
    if text == "auto":
        return (text,)
    names: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        kind, colon, _ = names[-1].partition(":") if names else ("", "", "")
        if colon and _INDEX.fullmatch(part):
            names.append(f"{kind}:{part}")
        elif part == "cpu" or _UUID.fullmatch(part) or _is_of_known_kind(part):
            names.append(part)
        else:
            raise ValueError(f"is not {DEVICE_FORMS}")
    return tuple(names)


def _is_of_known_kind(name: str) -> bool:
    return bool(_KIND.fullmatch(name)) and accelerator_of(name) is not None


def find_host(visible: str | None, cgroup: Path = MOUNT) -> Host:
    """Return the devices of this host.

    Args:
        visible: Value of CUDA_VISIBLE_DEVICES, or None: a comma-separated list of indices or UUIDs,
            which are the only GPUs to use.
        cgroup: Folder in which the cgroup file system is mounted.
    """
    cpus = _allowed_cpus()
    quota = read_limits(cgroup).num_cores
    num_cores = len(cpus) if quota is None else max(1, min(len(cpus), int(quota)))
    return Host(cpus=cpus, num_cores=num_cores, gpus=_chosen(_find_gpus(), visible))


def _allowed_cpus() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _chosen(gpus: Sequence[Gpu], visible: str | None) -> tuple[Gpu, ...]:
    if visible is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for name in (part.strip() for part in visible.split(",")):
        found = called(gpus, name)
        if not found:
            break  # CUDA, too, ignores all names after the first unknown one
        chosen += found
    return tuple(chosen)


def called(gpus: Sequence[Gpu], name: str) -> list[Gpu]:
    """Return the GPU with that index or beginning of a UUID, or its slices if it has some."""
    if not name:
        return []
    exact = [gpu for gpu in gpus if name == str(gpu.index) or gpu.uuid.startswith(name)]
    slices = [gpu for gpu in gpus if gpu.sliced_from.startswith(name)]
    return slices or (exact if name.isdecimal() else exact[:1])


def _find_gpus() -> list[Gpu]:
    """Return the GPUs of the first kind of which this host has some."""
    found = (read_gpus(each.library, each.kind) for each in known_accelerators())
    return next(filter(None, found), [])


def read_gpus(nvml: Any, kind: str = CUDA.kind) -> list[Gpu]:
    """Return the GPUs that NVML reports, and the slices of GPUs in MIG mode; none without a driver.

    Args:
        nvml: The module `pynvml`, or one with its functions.
        kind: Kind of the accelerators that it reports.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        found: list[Gpu] = []
        handles: dict[str, object] = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                gpus = list(_gpus_of(nvml, handle, index))
            except nvml.NVMLError as error:
                logger.error("%s:%d is left out: NVML says %s", kind, index, error)
                continue
            found += gpus
            handles |= {gpu.uuid: handle for gpu in gpus if not gpu.sliced_from}
        return [
            replace(gpu, kind=kind, distances=_distances(nvml, handles, gpu.uuid)) for gpu in found
        ]
    finally:
        nvml.nvmlShutdown()


def _gpus_of(nvml: Any, handle: object, index: int) -> Iterator[Gpu]:
    cpus = _near_cpus(nvml, handle)
    if not is_cut(nvml, handle):
        yield _gpu(nvml, handle, index, cpus)
        return
    whole = nvml.nvmlDeviceGetUUID(handle)
    for each in slices_of(nvml, handle):
        yield replace(_gpu(nvml, each, index, cpus), sliced_from=whole)


def is_cut(nvml: Any, handle: object) -> bool:
    """Return True if a GPU is in MIG mode, in which CUDA sees only its slices."""
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


def _gpu(nvml: Any, handle: object, index: int, cpus: tuple[int, ...]) -> Gpu:
    return Gpu(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
        cpus=cpus,
    )


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
