"""Which devices this host has, found without a CUDA context.

GPUs are found through NVML, cores through the affinity mask and the cgroup's quota.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from workers.cgroups import MOUNT, read_limits

logger = logging.getLogger(__name__)


class DeviceError(Exception):
    """The devices that the settings ask for are not there, or cannot be used so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One CUDA device of this host."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    cpus: tuple[int, ...]
    """The cores near it; empty if the host does not say."""

    def __str__(self) -> str:
        """For people: cuda:0 (name, memory)."""
        return f"cuda:{self.index} ({self.name}, {self.memory_bytes / 2**30:.0f} GiB)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What there is to place replicas on."""

    cpus: tuple[int, ...]
    """The cores that this process may run on."""
    num_cores: int
    """Cores' worth of time that it may use: fewer than `cpus` under a cgroup quota."""
    gpus: tuple[Gpu, ...] = ()

    def describe(self) -> list[str]:
        """The devices, a line each."""
        cores = f"{self.num_cores} CPU core{'s' if self.num_cores != 1 else ''}"
        return [*map(str, self.gpus), cores]


def find_host(visible: str | None, cgroup: Path = MOUNT) -> Host:
    """Look at this host.

    Args:
        visible: CUDA_VISIBLE_DEVICES as this process was given it, or None: a comma-separated list
            of indices or UUIDs; other GPUs are left alone.
        cgroup: Where the cgroup file system is mounted.
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
    chosen = []
    for name in (part.strip() for part in visible.split(",")):
        found = [g for g in gpus if name and (name == str(g.index) or g.uuid.startswith(name))]
        if not found:
            break  # CUDA, too, stops at the first device that it does not know
        chosen.append(found[0])
    return tuple(chosen)


def _find_gpus() -> list[Gpu]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                found.append(_gpu(pynvml, index))
            except pynvml.NVMLError as error:
                logger.error("cuda:%d is left out: NVML says %s", index, error)
        return found
    finally:
        pynvml.nvmlShutdown()


def _gpu(pynvml: object, index: int) -> Gpu:
    nvml: object = pynvml
    handle = nvml.nvmlDeviceGetHandleByIndex(index)  # type: ignore[attr-defined]
    return Gpu(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),  # type: ignore[attr-defined]
        name=_text(nvml.nvmlDeviceGetName(handle)),  # type: ignore[attr-defined]
        memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,  # type: ignore[attr-defined]
        cpus=_near_cpus(nvml, handle),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _near_cpus(nvml: object, handle: object) -> tuple[int, ...]:
    words = ((os.cpu_count() or 1) + 63) // 64
    try:
        masks = nvml.nvmlDeviceGetCpuAffinity(handle, words)  # type: ignore[attr-defined]
    except nvml.NVMLError:  # type: ignore[attr-defined]
        return ()
    return tuple(
        word * 64 + bit for word, mask in enumerate(masks) for bit in range(64) if mask >> bit & 1
    )
