"""Reads the memory nodes (NUMA) of this host, and of its GPUs, from sysfs. Front end.

Files: Linux, Documentation/ABI/stable/sysfs-devices-node and testing/sysfs-bus-pci. Nothing here
binds memory. Linux takes a page from the node of the core that first touches it (set_mempolicy(2),
"MPOL_DEFAULT"), so a process that runs on a node's cores has its memory there, pinned memory too.
This needs no permission, while most containers may not set a policy.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

SYS = Path("/sys")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A part of the host's memory, and the cores for which it is near."""

    number: int
    cpus: tuple[int, ...]
    memory_bytes: int


def read_nodes(sys: Path = SYS) -> tuple[Node, ...]:
    """Return the memory nodes of this host in order; none if the kernel does not say.

    Args:
        sys: Folder in which sysfs is mounted.
    """
    found = []
    for folder in (sys / "devices/system/node").glob("node*"):
        memory = re.search(r"MemTotal:\s+(\d+) kB", _read(folder / "meminfo"))
        found.append(
            Node(
                number=int(folder.name.removeprefix("node")),
                cpus=parse_cpus(_read(folder / "cpulist")),
                memory_bytes=int(memory[1]) << 10 if memory else 0,
            )
        )
    return tuple(sorted(found, key=lambda node: node.number))


def place_on_bus(bus_id: str, sys: Path = SYS) -> tuple[int | None, tuple[int, ...]]:
    """Return the node that a device on the PCI bus is near, and its cores, as the kernel knows it.

    Args:
        bus_id: Address as NVML writes it, "00000000:3B:00.0".
        sys: Folder in which sysfs is mounted.

    Returns:
        None and no cores where they are unknown, as in most virtual machines.
    """
    domain, _, place = bus_id.lower().partition(":")
    folder = sys / "bus/pci/devices" / f"{domain.lstrip('0'):0>4}:{place}"
    number = _read(folder / "numa_node").strip()
    return int(number) if number.isdecimal() else None, parse_cpus(_read(folder / "local_cpulist"))


def parse_cpus(text: str) -> tuple[int, ...]:
    """Return the cores in a list of the kernel, such as "0-3,8"."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            cpus += range(int(first), int(last or first) + 1)
    return tuple(cpus)


def cpus_in_words(cpus: Iterable[int]) -> str:
    """Return cores in the form of the kernel's lists."""
    ordered = sorted(cpus)
    breaks = [i for i, (one, next) in enumerate(pairwise(ordered), 1) if next != one + 1]
    runs: Sequence[Sequence[int]] = [
        ordered[begin:end] for begin, end in pairwise([0, *breaks, len(ordered)])
    ]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs if run)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
