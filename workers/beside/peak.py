"""Measures the peak memory of a process, or of torch on its GPU. Runs in a separate process."""

from pathlib import Path

import psutil
import torch

from inferpool.models.accelerator.device import is_accelerator, peak_bytes, reset_peak
from inferpool.workers.inside.allocator import give_back

_FORGET_PEAK = "5"
"""Value for /proc/PID/clear_refs that resets the peak of the resident set (proc(5))."""


class PeakMemory:
    """Peak of the memory in use, above the level at the start.

    On a CPU it is the peak of the resident set, which includes what libraries keep; on a GPU the
    peak of torch's allocations. Where the system does not record the peak, it is the present value.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = 0

    def start(self) -> None:
        """Make the memory in use now the level that counts as zero."""
        self._start = 0
        self.reset()
        self._start = self.read()

    def reset(self) -> None:
        """Begin a new peak."""
        if is_accelerator(self._device):
            reset_peak(self._device)
            return
        give_back()
        try:
            Path("/proc/self/clear_refs").write_text(_FORGET_PEAK)
        except OSError:  # another system, or not permitted
            return

    def read(self) -> int:
        """Return the peak since the last reset, in bytes."""
        is_apart = is_accelerator(self._device)
        return (peak_bytes(self._device) if is_apart else _peak_bytes()) - self._start


def _peak_bytes() -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        lines = []
    found = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(found[0]) << 10 if found else int(psutil.Process().memory_info().rss)
