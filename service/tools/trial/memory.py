"""The memory of processes, shared pages counted by share. Linux only."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Pss:
    """Bytes of memory of a process, shared pages counted by share."""

    total: int
    files: int
    """Pages of files, such as libraries: they count for less while strangers map them, too."""

    @property
    def own(self) -> int:
        """Memory of no file, which only the service itself shares among its processes."""
        return self.total - self.files


def pss_of(pid: int) -> Pss:
    """The memory of a process; none if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        lines = []
    found = {
        name: int(size.split()[0]) * 1024
        for name, _, size in (line.partition(":") for line in lines)
    }
    return Pss(total=found.get("Pss", 0), files=found.get("Pss_File", 0))
