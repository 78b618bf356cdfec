"""Which devices this host has, and which replica goes where, without a CUDA context.

GPUs are found through NVML, cores through the affinity mask and the cgroup's quota.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from models.spec import Placement
from workers.cgroups import MOUNT, read_limits

logger = logging.getLogger(__name__)

_MAX_CPU_REPLICAS = 8
"""Beyond this many, replicas on one host take more threads rather than more memory."""


class DeviceError(Exception):
    """The devices that the settings ask for are not there."""


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


def place(
    host: Host, *, devices: str, replicas: int | None, threads: int | None
) -> list[Placement]:
    """Decide where the replicas of one model go.

    Args:
        host: What there is.
        devices: "auto" (every GPU, else the CPU), "cpu", "cuda", or "cuda:0,1".
        replicas: How many, or None for one per GPU, or one per group of cores without one.
        threads: Intra-op threads of each, or None for an equal share of the cores.

    Returns:
        One placement per replica.

    Raises:
        DeviceError: A device asked for is not on this host.
    """
    gpus = _gpus_for(host, devices)
    if gpus:
        return _place_on_gpus(host, gpus, replicas or len(gpus), threads)
    return _place_on_cpus(host, replicas, threads)


def _gpus_for(host: Host, devices: str) -> Sequence[Gpu]:
    if devices == "auto":
        return host.gpus
    if devices == "cpu":
        return ()
    kind, _, wanted = devices.partition(":")
    if kind != "cuda":
        raise DeviceError(f'devices = "{devices}": say "auto", "cpu", "cuda" or "cuda:0,1"')
    have = ", ".join(map(str, host.gpus)) or "no CUDA device"
    if not host.gpus:
        raise DeviceError(f'devices = "{devices}", but this host has {have}')
    if not wanted:
        return host.gpus
    by_index = {str(gpu.index): gpu for gpu in host.gpus}
    missing = [index for index in wanted.split(",") if index.strip() not in by_index]
    if missing:
        raise DeviceError(f"there is no cuda:{missing[0].strip()} on this host: it has {have}")
    return [by_index[index.strip()] for index in wanted.split(",")]


def _place_on_gpus(
    host: Host, gpus: Sequence[Gpu], replicas: int, threads: int | None
) -> list[Placement]:
    share = threads or max(1, host.num_cores // replicas)
    placements = []
    for replica in range(replicas):
        gpu = gpus[replica % len(gpus)]
        near = tuple(cpu for cpu in gpu.cpus if cpu in host.cpus)
        placements.append(
            Placement(devices=("cuda:0",), visible=(gpu.uuid,), cpus=near, num_threads=share)
        )
    return placements


def _place_on_cpus(host: Host, replicas: int | None, threads: int | None) -> list[Placement]:
    if replicas is None:
        replicas = max(1, host.num_cores // threads) if threads else host.num_cores
        replicas = min(replicas, _MAX_CPU_REPLICAS)
    share, rest = divmod(host.num_cores, replicas)
    counts = [threads or max(1, share + (i < rest)) for i in range(replicas)]
    # Without a quota each replica may keep a group of cores to itself; the scheduler does better
    # where the groups are single cores, since the front end needs a core now and then.
    has_groups = min(counts) > 1 and sum(counts) <= len(host.cpus) == host.num_cores
    placements = []
    start = 0
    for count in counts:
        cpus = host.cpus[start : start + count] if has_groups else ()
        placements.append(Placement(devices=("cpu",), cpus=cpus, num_threads=count))
        start += count
    return placements


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
