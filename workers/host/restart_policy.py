"""Says how often a process that fails is started again, and after which pauses."""

import random
from dataclasses import dataclass

from inferpool.workers.shared.backoff import Backoff

_MAX_BACKOFF_S = 30.0
_MAX_JITTER = 0.2
"""Largest random extension of a pause, as a share: workers that died at once start apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Number of failures before a process is given up (OTP calls this the restart intensity)."""

    max_restarts: int = 5
    """Restarts in a row without success."""
    stable_s: float = 60.0
    """An incarnation that was ready for longer counts as healthy, even if it had no work."""
    first_pause_s: float = 0.5
    """Pause after the second failure in a row; each later one is twice as long."""

    def pause_s(self, num_in_row: int) -> float:
        """Return the seconds to wait before the next start, after a number of failures in a row."""
        if num_in_row <= 1:
            return 0.0
        pause_s = Backoff(self.first_pause_s, _MAX_BACKOFF_S).pause_s(num_in_row - 2)
        return pause_s * (1 + random.random() * _MAX_JITTER)
