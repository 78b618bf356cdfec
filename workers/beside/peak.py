"""The most memory that a process, or torch on its GPU, has had in use. In a process of its own."""

from pathlib import Path

import psutil
import torch

from inferpool.workers.inside.allocator import give_back

_FORGET_PEAK = "5"
"""Written to /proc/PID/clear_refs, it resets the peak of the resident set (proc(5))."""


class PeakMemory:
    """Measures what is in use at most, beyond what was at the start.

    On a CPU that is the process's resident set, and so counts whatever libraries keep; on a GPU
    what torch has allocated. Where the system does not know the peak, what is in use at the end is
    taken.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = 0

    def start(self) -> None:
        """Take what is in use now for nothing."""
        self._start = 0
        self.reset()
        self._start = self.read()

    def reset(self) -> None:
        """Forget what was in use at most."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        give_back()
        try:
            Path("/proc/self/clear_refs").write_text(_FORGET_PEAK)
        except OSError:  # another system, or one that does not allow it
            return

    def read(self) -> int:
        """The most that was in use since then, in bytes."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._start
        return _peak_bytes() - self._start


def _peak_bytes() -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        lines = []
    found = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(found[0]) << 10 if found else int(psutil.Process().memory_info().rss)
