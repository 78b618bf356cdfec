"""Made-up machines for the tests of the checks and of `inferpool doctor`."""

from collections.abc import Iterable
from pathlib import Path

from inferpool.service.checks.facts import Facts, gather
from inferpool.service.checks.findings import Finding
from inferpool.service.settings.loader import load
from inferpool.service.settings.settings import Settings
from inferpool.workers.host.devices import Host
from inferpool.workers.host.gpus import Gpu

GIB = 1 << 30
TWO_CORES = Host(cpus=(0, 1), num_cores=2)
GPU = Gpu(index=0, uuid="GPU-0", name="H100", memory_bytes=80 * GIB, cpus=())
ONE_GPU = Host(cpus=tuple(range(16)), num_cores=16, gpus=(GPU,))
_FILES = {
    "proc/meminfo": f"MemTotal: {16 << 20} kB\nMemAvailable: {8 << 20} kB\n"
    "SwapTotal: 100 kB\nSwapFree: 100 kB\n",
    "proc/cpuinfo": "model name\t: Great CPU\nflags\t\t: fpu avx2 avx512f avx512_bf16\n",
    "proc/self/cgroup": "0::/\n",
    "sys/fs/cgroup/memory.max": str(4 * GIB),
    "sys/fs/cgroup/memory.current": str(GIB),
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
}


def settings_of(folder: Path, **flags: str) -> Settings:
    """Load settings as from a command line; the model is `echo` unless a flag names another."""
    return load({"model": "echo", **flags}, {}, folder).settings


def sound_facts(folder: Path) -> Facts:
    """Return the facts about a machine of two cores that has no problem."""
    return gather(settings_of(folder), TWO_CORES, root_of(folder))


def root_of(folder: Path) -> Path:
    """Write what the kernel says of this machine; return the folder that stands for `/`."""
    for name, text in _FILES.items():
        path = folder / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "root"


def lines(findings: Iterable[Finding]) -> str:
    """Return the findings as text, a line for each."""
    return "\n".join(f"{finding.level} {finding}" for finding in findings)
