"""What the control groups of this process allow, in version 1 and in version 2.

A limit may be set on any group above a process; the least of them holds. Files and units: Linux,
Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst; Documentation/scheduler/sched-bwc.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60
"""Version 1 says "none" as the largest multiple of a page, version 2 as "max"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupLimits:
    """What may be used; None where nothing limits it."""

    memory_bytes: int | None = None
    memory_left_bytes: int | None = None
    """Page cache counts as left: the kernel gives it up when asked."""
    num_cores: float | None = None
    """Cores' worth of time."""
    num_pids: int | None = None
    """Processes and threads."""
    num_pids_left: int | None = None


def read_limits(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> CgroupLimits:
    """Read the limits of this process's groups.

    Args:
        mount: Where the cgroup file systems are mounted.
        membership: The file that names this process's groups.
    """
    groups = _read(membership)
    memory = [m for group in groups_of(mount, groups, "memory") if (m := _memory(group))]
    cores = [c for group in groups_of(mount, groups, "cpu") if (c := _cores(group))]
    pids = [p for group in groups_of(mount, groups, "pids") if (p := _pids(group))]
    return CgroupLimits(
        memory_bytes=min((limit for limit, _ in memory), default=None),
        memory_left_bytes=min((left for _, left in memory), default=None),
        num_cores=min(cores, default=None),
        num_pids=min((limit for limit, _ in pids), default=None),
        num_pids_left=min((left for _, left in pids), default=None),
    )


def groups_of(mount: Path, membership: str, controller: str) -> Iterator[Path]:
    """The folders of this process's group and of those above it.

    In a container the mount may show the container's group as its root while the membership names
    the whole path: then only the root is there to be read.

    Args:
        mount: Where the cgroup file systems are mounted.
        membership: What the file says that names this process's groups.
        controller: As version 1 calls it.
    """
    for line in membership.splitlines() or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = mount / controller if controllers else mount
        names = [name for name in path.split("/") if name not in ("", "..")]
        for depth in range(len(names), -1, -1):
            yield root.joinpath(*names[:depth])


def _memory(group: Path) -> tuple[int, int] | None:
    for limit_file, used_file, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit, used = _number(group / limit_file), _number(group / used_file)
        if limit is not None:
            stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
            cache = sum(int(stat.get(f"{prefix}{k}_file", 0)) for k in ("active", "inactive"))
            return limit, max(0, limit - (used or 0) + cache)
    return None


def _cores(group: Path) -> float | None:
    quota, _, period = _read(group / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    try:
        cores = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max", or not there
        return None
    return cores if cores > 0 else None


def _pids(group: Path) -> tuple[int, int] | None:
    limit = _number(group / "pids.max")
    used = _number(group / "pids.current") or 0
    return None if limit is None else (limit, max(0, limit - used))


def _number(path: Path) -> int | None:
    try:
        number = int(_read(path))
    except ValueError:
        return None
    return number if number < _UNLIMITED else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
