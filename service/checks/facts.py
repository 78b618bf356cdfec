"""What there is to know of this machine without starting a process, read once."""

import importlib.util
import os
import platform
import re
import resource
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from inferpool.models.spec import Placement
from inferpool.service.api.wire.descriptors import limit_to_be
from inferpool.service.settings.settings import Settings
from inferpool.workers.cgroups import CgroupLimits, read_limits
from inferpool.workers.host.devices import DeviceError, Host
from inferpool.workers.host.mps import is_mps_running

_RLIMITS = ("NPROC", "MEMLOCK", "CORE", "AS", "FSIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder, and the room in its file system."""

    path: Path
    is_writable: bool
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """An installed package with native code, read from its files rather than imported."""

    version: str
    cuda: str = ""
    """The CUDA version that it was built for; empty for a CPU build."""
    requires: Sequence[str] = ()
    """Of torch: ">=2.14"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the checks judge."""

    host: Host
    placements: Mapping[str, Sequence[Placement]]
    """Of each model whose devices are there."""
    misplaced: Mapping[str, str]
    """Of each other model: why its devices are not."""
    cgroup: CgroupLimits
    memory_bytes: int
    available_bytes: int
    swap_used_bytes: int
    rlimits: Mapping[str, int | None]
    """Soft limits by name ("FSIZE"); None where there is none."""
    num_files: int
    """How many descriptors the service may have once it has raised its limit."""
    shm: Folder | None
    tmp: Folder | None
    """None where there is no temporary folder that can be written to."""
    cwd: Folder
    pid: int
    is_root_read_only: bool
    cpu_model: str
    cpu_flags: frozenset[str]
    huge_pages: str
    clock: str
    libc: str
    is_mps_running: bool
    torch: Build | None
    torchvision: Build | None

    @property
    def num_workers(self) -> int:
        """Workers that serve."""
        return sum(map(len, self.placements.values()))

    @property
    def num_processes(self) -> int:
        """Their processes: a worker whose replica is split has one for each part."""
        return sum(p.num_ranks for placements in self.placements.values() for p in placements)

    @property
    def free_bytes(self) -> int:
        """Memory that can be had: of the host, and of its control groups."""
        left = self.cgroup.memory_left_bytes
        return self.available_bytes if left is None else min(self.available_bytes, left)


def gather(settings: Settings, host: Host, root: Path = Path("/")) -> Facts:
    """Look at this machine.

    Args:
        settings: What it is to serve.
        host: Its devices.
        root: What /proc and /sys lie under.
    """
    placements: dict[str, Sequence[Placement]] = {}
    misplaced: dict[str, str] = {}
    for name in settings.models:
        try:
            placements[name] = settings.placements_of(name, host)
        except DeviceError as error:
            misplaced[name] = str(error)
    memory = _meminfo(_read(root / "proc/meminfo"))
    cpu = _read(root / "proc/cpuinfo")
    sys = root / "sys"
    return Facts(
        host=host,
        placements=placements,
        misplaced=misplaced,
        cgroup=read_limits(sys / "fs/cgroup", root / "proc/self/cgroup"),
        memory_bytes=memory.get("MemTotal", 0),
        available_bytes=memory.get("MemAvailable", 0),
        swap_used_bytes=memory.get("SwapTotal", 0) - memory.get("SwapFree", 0),
        rlimits=_rlimits(),
        num_files=limit_to_be(),
        shm=folder(root / "dev/shm"),
        tmp=_temporary(),
        cwd=folder(Path.cwd())
        or Folder(path=Path(), is_writable=False, total_bytes=0, free_bytes=0),
        pid=os.getpid(),
        is_root_read_only=bool(os.statvfs("/").f_flag & os.ST_RDONLY),
        cpu_model=_field(cpu, "model name"),
        cpu_flags=frozenset((_field(cpu, "flags") or _field(cpu, "Features")).split()),
        huge_pages=_chosen(_read(sys / "kernel/mm/transparent_hugepage/enabled")),
        clock=_read(sys / "devices/system/clocksource/clocksource0/current_clocksource").strip(),
        libc=" ".join(platform.libc_ver()).strip(),
        is_mps_running=is_mps_running(
            root / settings.cuda_mps_pipe_directory.lstrip("/"), root / "proc"
        ),
        torch=_build("torch"),
        torchvision=_build("torchvision"),
    )


def folder(path: Path) -> Folder | None:
    """What there is to know of a folder; None where it cannot be looked at."""
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    return Folder(
        path=path,
        is_writable=os.access(path, os.W_OK | os.X_OK) and not stat.f_flag & os.ST_RDONLY,
        total_bytes=stat.f_blocks * stat.f_frsize,
        free_bytes=stat.f_bavail * stat.f_frsize,
    )


def _temporary() -> Folder | None:
    try:
        return folder(Path(tempfile.gettempdir()))
    except FileNotFoundError:
        return None


def _rlimits() -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for name in _RLIMITS:
        if hasattr(resource, f"RLIMIT_{name}"):
            soft, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
            found[name] = None if soft == resource.RLIM_INFINITY else soft
    return found


def _meminfo(text: str) -> dict[str, int]:
    """The fields of /proc/meminfo, in bytes."""
    return {name: int(kib) << 10 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}


def _field(cpuinfo: str, name: str) -> str:
    found = re.search(rf"^{name}\s*: (.*)$", cpuinfo, re.M)
    return found[1] if found else ""


def _chosen(text: str) -> str:
    """Of "always [madvise] never", the word in brackets."""
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else ""


def _build(name: str) -> Build | None:
    try:
        number = version(name)
        needs = requires(name) or []
    except PackageNotFoundError:
        return None
    spec = importlib.util.find_spec(name)
    text = _read(Path(spec.origin).parent / "version.py") if spec and spec.origin else ""
    cuda = re.search(r"^cuda\b[^=\n]*= '([\d.]+)'", text, re.M)
    full = re.search(r"^__version__ = '([^']+)'", text, re.M)
    torch = [re.sub(r"[()\s]|^torch", "", n) for n in needs if re.match(r"torch\b(?!\w)", n)]
    return Build(version=full[1] if full else number, cuda=cuda[1] if cuda else "", requires=torch)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
