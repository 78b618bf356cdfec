"""Whether a request may wait: bounds on count and time, and when another try makes sense.

The bound on bytes is the arena: a payload that finds no slot is refused by the dispatcher.
"""

from collections import deque
from math import ceil

from service.errors import OverloadedError, UnavailableError
from service.metrics import RejectReason

_WEIGHT = 0.2
"""Of the newest batch in the moving average."""
_NUM_RECENT = 16
_NUM_NEEDED = 4
_RECENT_S = 10.0
"""Older batches say nothing of the rate now."""


class RateMeter:
    """How fast the workers of one model answer, from what their batches took."""

    def __init__(self) -> None:
        self.item_s = 0.0
        """Seconds of one worker per instance, as a moving average; 0 until the first batch."""
        self._recent: deque[tuple[float, float]] = deque(maxlen=_NUM_RECENT)

    def note(self, num_items: int, elapsed_s: float, now: float) -> None:
        """A worker that was never without work took this long for a batch."""
        item_s = elapsed_s / num_items
        self.item_s += _WEIGHT * (item_s - self.item_s) if self.item_s else item_s
        self._recent.append((now, item_s))

    def least_item_s(self, now: float) -> float:
        """Seconds per instance that lately three batches in four were slower than; 0 if unknown.

        What must not be refused by mistake is judged by this: one slow batch, or a small one,
        says little of the next.
        """
        recent = sorted(item_s for at, item_s in self._recent if now - at < _RECENT_S)
        return recent[len(recent) // 4] if len(recent) >= _NUM_NEEDED else 0.0


class Admission:
    """Admits a request to the queue of one model, or refuses it at once."""

    def __init__(self, *, max_queue_length: int, rejected: dict[RejectReason, int]) -> None:
        """Begin to admit.

        Args:
            max_queue_length: Requests that may wait.
            rejected: Counts of the refused, by reason.
        """
        self.rate = RateMeter()
        self._rejected = rejected
        self.is_draining = False
        self._max_queue_length = max_queue_length

    def check(self, *, num_queued: int, num_workers: int, left_s: float, now: float) -> None:
        """Admit an instance, or say why not.

        Args:
            num_queued: How many wait.
            num_workers: How many workers are ready, or one that soon will be.
            left_s: Seconds until its deadline.
            now: CLOCK_MONOTONIC seconds.

        Raises:
            UnavailableError: The service is shutting down.
            OverloadedError: The queue is full, or too long for the deadline.
        """
        if self.is_draining:
            self._rejected["draining"] += 1
            raise UnavailableError("this server is shutting down", retry_after_s=1)
        if num_queued >= self._max_queue_length:
            self._rejected["queue_full"] += 1
            raise OverloadedError(
                f"the queue is full ({num_queued} requests wait)",
                retry_after_s=self._time_for_half(num_queued, num_workers),
            )
        if num_queued * self.rate.item_s <= left_s * num_workers:
            return
        wait_s = num_queued * self.rate.least_item_s(now) / num_workers
        if wait_s > left_s:
            self._rejected["deadline"] += 1
            raise OverloadedError(
                f"the deadline cannot be met: about {wait_s:.1f} s of work is waiting, "
                f"and {max(left_s, 0.0):.1f} s are left",
                retry_after_s=max(1, ceil(wait_s - left_s)),
            )

    def _time_for_half(self, num_queued: int, num_workers: int) -> int:
        """Whole seconds until half of the queue will have been worked off, to the best guess."""
        return max(1, ceil(num_queued * self.rate.item_s / num_workers / 2))
