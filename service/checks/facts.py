"""Facts about this machine that can be read without starting a process."""

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
from inferpool.workers.host.devices import DeviceError, Host
from inferpool.workers.host.mps import is_mps_running
from inferpool.workers.host.nodes import parse_cpus
from inferpool.workers.shared.cgroups import CgroupLimits, read_limits

_RLIMITS = ("NPROC", "MEMLOCK", "CORE", "AS", "FSIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder, and the space in its file system."""

    path: Path
    is_writable: bool
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Build of an installed package, read from its files without an import."""

    version: str
    cuda: str = ""
    """CUDA version that the package was built for; empty for a CPU build."""
    requires: Sequence[str] = ()
    """Versions of torch that the package needs, such as ">=2.14"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about this machine, and the placements of the models on it."""

    host: Host
    placements: Mapping[str, Sequence[Placement]]
    """Placements by model, for models with existing devices."""
    misplaced: Mapping[str, str]
    """Reasons by model, for models with missing devices."""
    num_decoders: int
    """Number of decoders of all workers, if every model allows them."""
    cgroup: CgroupLimits
    memory_bytes: int
    available_bytes: int
    swap_used_bytes: int
    memory_nodes: Sequence[int]
    """Memory nodes that this process may use; none if they are unknown."""
    rlimits: Mapping[str, int | None]
    """Soft limits by name ("FSIZE"); None for no limit."""
    num_files: int
    """File descriptors that the service may have once it has raised its limit."""
    shm: Folder | None
    tmp: Folder | None
    """Temporary folder; None if there is no writable one."""
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
        """Number of workers."""
        return sum(map(len, self.placements.values()))

    @property
    def num_processes(self) -> int:
        """Number of worker processes; a split replica has one per part."""
        return sum(p.num_ranks for placements in self.placements.values() for p in placements)

    def is_unified(self, placement: Placement) -> bool:
        """Return True if the placement's GPUs use the host's memory."""
        return any(gpu.is_unified for gpu in self.host.gpus if gpu.uuid in placement.visible)

    @property
    def free_bytes(self) -> int:
        """Free memory, of the host or of the control group, whichever is less."""
        left = self.cgroup.memory_left_bytes
        return self.available_bytes if left is None else min(self.available_bytes, left)


def gather(settings: Settings, host: Host, root: Path = Path("/")) -> Facts:
    """Read the facts about this machine; /proc and /sys lie in `root`."""
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
        num_decoders=sum(
            settings.models[name].num_decoders(placement)
            for name, each in placements.items()
            for placement in each
        ),
        cgroup=read_limits(sys / "fs/cgroup", root / "proc/self/cgroup"),
        memory_bytes=memory.get("MemTotal", 0),
        available_bytes=memory.get("MemAvailable", 0),
        swap_used_bytes=memory.get("SwapTotal", 0) - memory.get("SwapFree", 0),
        memory_nodes=parse_cpus(_field(_read(root / "proc/self/status"), "Mems_allowed_list")),
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
    """Return the facts about a folder; None if it cannot be read."""
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
    return {name: int(kib) << 10 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}


def _field(cpuinfo: str, name: str) -> str:
    found = re.search(rf"^{name}\s*:[ \t](.*)$", cpuinfo, re.M)
    return found[1] if found else ""


def _chosen(text: str) -> str:
    """Return the word in brackets: "madvise" for "always [madvise] never"."""
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
