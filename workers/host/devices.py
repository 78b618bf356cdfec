"""Parses the names of devices in settings, and finds the devices of this host.

GPUs are found through NVML, without a CUDA context; cores through the affinity mask and the
cgroup's quota.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from inferpool.models.accelerator.kinds import (
    CUDA,
    Accelerator,
    accelerator_of,
    known_accelerators,
)
from inferpool.workers.host.gpus import ANSWER_S, DriverError, Gpu, in_time, read_gpus
from inferpool.workers.host.nodes import SYS, Node, read_nodes
from inferpool.workers.shared.cgroups import MOUNT, read_limits

DEVICE_FORMS = (
    '"auto", "cpu", "cuda", GPUs such as "cuda:0,1", UUIDs as `nvidia-smi -L` prints them '
    '("GPU-...", "MIG-..."), or several of these with commas between'
)
_UUID = re.compile(r"(GPU|MIG)-[\w/-]+")
_KIND = re.compile(r"[a-z]+(:\d+)?")
_INDEX = re.compile(r"\d+")
BY_BUS = "PCI_BUS_ID"
"""Value of CUDA_DEVICE_ORDER that makes CUDA count GPUs as NVML does. By default it is
"FASTEST_FIRST", by an unpublished rule (CUDA Programming Guide, "CUDA Environment Variables").
"""


class DeviceError(Exception):
    """The devices in the settings do not exist, or cannot be used in this way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Devices for replicas: the GPUs and cores of this host."""

    cpus: tuple[int, ...]
    """Cores that this process may run on."""
    num_cores: int
    """Cores' worth of time that it may use: fewer than `cpus` under a cgroup quota."""
    gpus: tuple[Gpu, ...] = ()
    """Accelerators, all of one kind: torch uses one kind in a process."""
    nodes: tuple[Node, ...] = ()
    """Its memory nodes; none if they are unknown."""
    problem: str = ""
    """Reason why GPUs of this host are missing from `gpus`; empty if it is known of none."""
    is_told_gpus: bool = False
    """True if the environment names the GPUs to use."""

    @property
    def accelerator(self) -> Accelerator:
        """Kind of the GPUs; CUDA if there are none."""
        return (accelerator_of(self.gpus[0].kind) if self.gpus else None) or CUDA

    def nodes_of(self, cpus: Iterable[int]) -> list[int]:
        """Return the numbers of the memory nodes to which some cores belong."""
        wanted = set(cpus)
        return [node.number for node in self.nodes if wanted.intersection(node.cpus)]

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


def find_host(
    visible: str | None,
    order: str = "",
    cgroup: Path = MOUNT,
    *,
    answer_s: float = ANSWER_S,
    sys: Path = SYS,
) -> Host:
    """Return the devices of this host.

    Args:
        visible: Value of CUDA_VISIBLE_DEVICES: a comma-separated list of indices or UUIDs, which
            are the only GPUs to use. None or "all": every GPU.
        order: Value of CUDA_DEVICE_ORDER: the order that the indices follow.
        cgroup: Folder in which the cgroup file system is mounted.
        answer_s: Time for a driver to describe its GPUs.
        sys: Folder in which sysfs is mounted.
    """
    cpus = _allowed_cpus()
    quota = read_limits(cgroup).num_cores
    num_cores = len(cpus) if quota is None else max(1, min(len(cpus), int(quota)))
    host = Host(cpus=cpus, num_cores=num_cores, nodes=read_nodes(sys))
    host = _find_gpus(host, answer_s, sys)
    if visible in (None, "all") or host.accelerator is not CUDA:
        return host
    gpus, problem = _chosen(host.gpus, visible, order)
    is_told = visible.strip() not in ("", "-1")
    return replace(host, gpus=gpus, problem=host.problem or problem, is_told_gpus=is_told)


def _allowed_cpus() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _chosen(gpus: Sequence[Gpu], visible: str, order: str) -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs that CUDA would show a process, and what is wrong with the names."""
    names = [part.strip() for part in visible.split(",")]
    if not gpus or visible.strip() in ("", "-1"):
        return (), ""
    problem = ""
    chosen: list[Gpu] = []
    for name in names:
        found = called(gpus, name)
        if not found:
            problem = f"{name!r} is none of its GPUs: CUDA ignores it and the names after it"
            break
        chosen += found
    if len(set(chosen)) < len(chosen):
        chosen, problem = [], "it names a GPU twice: CUDA shows none then"
    products = {(gpu.name.partition(" MIG ")[0], bool(gpu.sliced_from)) for gpu in gpus}
    counts = any(map(str.isdecimal, names)) and order != BY_BUS
    if counts and len(products) > 1 and 0 < len(chosen) < len(gpus):
        chosen, problem = (
            [],
            (
                f"this host has several kinds of GPU ({', '.join(map(str, gpus))}), which CUDA and "
                f"nvidia-smi may count differently: name UUIDs, or set CUDA_DEVICE_ORDER={BY_BUS}"
            ),
        )
    return tuple(chosen), f"CUDA_VISIBLE_DEVICES is {visible!r}: {problem}" if problem else ""


def called(gpus: Sequence[Gpu], name: str) -> list[Gpu]:
    """Return the GPU with that index or beginning of a UUID, or its slices if it has some.

    There is none if the UUIDs of several begin in this way.
    """
    if name.isdecimal():
        return [gpu for gpu in gpus if gpu.index == int(name)]
    uuids = {uuid for gpu in gpus for uuid in (gpu.uuid, gpu.sliced_from)}
    meant = {name} & uuids or {uuid for uuid in uuids if name and uuid.startswith(name)}
    if len(meant) != 1:
        return []
    return [gpu for gpu in gpus if meant & {gpu.uuid, gpu.sliced_from}]


def _find_gpus(host: Host, answer_s: float, sys: Path) -> Host:
    """Return a host with its GPUs of the first kind that it has."""
    for each in known_accelerators():
        try:
            gpus = in_time(partial(read_gpus, each.library, each.kind, sys), answer_s)
        except (DriverError, ImportError) as error:
            host = replace(host, problem=str(error))
            continue
        if gpus:
            return replace(host, gpus=tuple(gpus), problem="")
    return host
