"""Reads the limits of this process's control groups, version 1 and 2.

Each group above a process may have a limit; the smallest one applies. Files and units: Linux,
Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst; Documentation/scheduler/sched-bwc.
"""

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60
"""Limits from here on mean none: version 1 uses the largest multiple of a page for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupLimits:
    """Limits of this process; None if there is none."""

    memory_bytes: int | None = None
    memory_left_bytes: int | None = None
    """Memory still allowed; page cache counts as free, since the kernel frees it on demand."""
    num_cores: float | None = None
    """Cores' worth of time."""
    num_pids: int | None = None
    """Processes and threads."""
    num_pids_left: int | None = None


def read_limits(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> CgroupLimits:
    """Read the limits of this process's groups.

    Args:
        mount: Folder in which the cgroup file systems are mounted.
        membership: File that names this process's groups.
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


def processes_left(
    mount: Path = MOUNT, membership: Path = MEMBERSHIP, proc: Path = Path("/proc")
) -> int | None:
    """Return the processes and threads that may still be started; None if no limit is known.

    The limits of the kernel and of the control groups count, and that of the user. Other
    processes of the user are not counted: their number is unknown.
    """
    left = [read_limits(mount, membership).num_pids_left]
    running = _read(proc / "loadavg").split()[3:4]
    num_running = int(running[0].partition("/")[2]) if running else 0
    for name in ("threads-max", "pid_max"):
        limit = _number(proc / "sys/kernel" / name)
        left.append(None if limit is None else limit - num_running)
    if os.geteuid():
        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        left.append(None if soft == resource.RLIM_INFINITY else soft)
    return min((each for each in left if each is not None), default=None)


def groups_of(mount: Path, membership: str, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's group and of the groups above it.

    In a container the mount may show the container's group as its root although the membership
    names the whole path. Then only the root exists.

    Args:
        mount: Folder in which the cgroup file systems are mounted.
        membership: Content of the file that names this process's groups.
        controller: Name of the controller in version 1.
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
    except (ValueError, ZeroDivisionError):  # "max", or no such file
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
