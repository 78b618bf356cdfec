"""Whether a request may wait: bounds on count and time, and when another try makes sense.

The bound on bytes is the arena: a payload that finds no slot is refused by the dispatcher.
"""

from math import ceil

from service.errors import OverloadedError, UnavailableError
from service.metrics import RejectReason

_WEIGHT = 0.2
"""Of the newest batch in the moving averages."""


class RateMeter:
    """How fast the workers of one model answer, from what their batches took."""

    def __init__(self) -> None:
        self.item_s = 0.0
        """Seconds of one worker per instance; 0 until the first batch."""

    def note(self, num_items: int, elapsed_s: float) -> None:
        """A worker that was never without work took this long for a batch."""
        item_s = elapsed_s / num_items
        self.item_s += _WEIGHT * (item_s - self.item_s) if self.item_s else item_s

    def wait_s(self, num_queued: int, num_workers: int) -> float:
        """How long an instance behind `num_queued` others will wait, as far as can be told."""
        return num_queued * self.item_s / max(num_workers, 1)


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

    def check(self, *, num_queued: int, num_workers: int, left_s: float) -> None:
        """Admit an instance, or say why not.

        Args:
            num_queued: How many wait.
            num_workers: How many workers are ready.
            left_s: Seconds until its deadline.

        Raises:
            UnavailableError: Nobody is there, or nobody for long, to answer it.
            OverloadedError: The queue is full, or too long for the deadline.
        """
        if self.is_draining:
            self._rejected["draining"] += 1
            raise UnavailableError("this server is shutting down", retry_after_s=1)
        if num_workers == 0:
            self._rejected["unavailable"] += 1
            raise UnavailableError("no worker of this model is ready", retry_after_s=1)
        if num_queued >= self._max_queue_length:
            self._rejected["queue_full"] += 1
            raise OverloadedError(
                f"the queue is full ({num_queued} requests wait)",
                retry_after_s=self._retry_after_s(num_queued, num_workers, 0.0),
            )
        wait_s = num_queued * self.rate.item_s / num_workers
        if wait_s > left_s:
            self._rejected["deadline"] += 1
            raise OverloadedError(
                f"the deadline cannot be met: about {wait_s:.1f} s of work is waiting, "
                f"and {max(left_s, 0.0):.1f} s are left",
                retry_after_s=self._retry_after_s(num_queued, num_workers, left_s),
            )

    def _retry_after_s(self, num_queued: int, num_workers: int, left_s: float) -> int:
        """Until half of the queue, or the excess over the deadline, will have been worked off."""
        wait_s = self.rate.wait_s(num_queued, num_workers)
        return max(1, ceil(wait_s - left_s if left_s else wait_s / 2))
