"""How many requests the next batch may have: as many as its deadlines and the settings allow. Pure.

A batch takes longer the more it has, and its first member is answered with its last. So a batch
does not grow past what the tightest deadline among its members allows. One whose deadline cannot be
met by a batch of its own is not looked at: it would only slow down the others.
"""

from itertools import islice
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inferpool.service.queue.batch_costs import CostCurve
    from inferpool.service.queue.batcher import Batcher, Q

AUTO_SIZE = 8
"""The most requests of a batch unless the settings say, or more are as good as free."""
_AUTO_MOST = 64
_FREE_S = 0.002
"""A worker's time for a batch below which messages and wake-ups cost more than the batch does: an
echo of 64 takes 0.9 ms, and needs an eighth of the messages that batches of 8 need."""
_NUM_FULL = 8
"""Full batches that tell what they take."""
_SLOW = 3.0
"""A batch tells no more than so many times what the others took: it may have been interrupted."""
SPARE = 1.2
"""What the time of a batch is multiplied with: batches vary, and half of them take longer."""


def fitting(queue: "Batcher[Q]", most: int, begin: float, curve: "CostCurve") -> int:
    """The size of the next batch, such that each of its members that can be in time is.

    Where no deadline is near, this costs the same whatever the size.

    Args:
        queue: Those that wait; at least one.
        most: The largest size.
        begin: When the worker will begin with it.
        curve: What it takes the worker.
    """
    if begin + curve.time_s(most) * SPARE <= queue.soonest():
        return most
    alone_s = curve.time_s(1) * SPARE
    num, allowed, tightest = 0, most, inf
    for request in islice(queue, most):
        deadline = request.ref.deadline
        if deadline < tightest and begin + alone_s <= deadline:
            fits = max(1, curve.size_within((deadline - begin) / SPARE, allowed))  # as was seen
            if num >= fits:
                break  # it would make the batch too large for itself
            allowed, tightest = fits, deadline
        if num == allowed:
            break
        num += 1
    return num


class SizeLimit:
    """The most requests that a batch may have now: as set, or with `auto` for as long as it pays.

    With `auto` it is 8, which workers have warmed up with. It doubles, up to 64, while full batches
    come back so fast that twice as many would still be next to nothing, and falls back when they
    turn out slower. Networks that were compiled for some sizes stay with those.
    """

    def __init__(self, max_batch_size: int | None) -> None:
        """Begin with a size, or with None for `auto`."""
        self.now = self.own = max_batch_size or AUTO_SIZE
        """The latter as it is without an objective."""
        self._may_grow = max_batch_size is None
        self._full_s = 0.0
        self._num_full = 0

    def hold(self) -> None:
        """A worker takes no more than it has warmed up with."""
        if self._may_grow:
            self._may_grow = False
            self.now = self.own = AUTO_SIZE

    def bound(self, most: int) -> None:
        """An objective allows no more than this."""
        self.now = min(self.own, most)

    def note(self, size: int, took_s: float) -> None:
        """A batch has taken a worker this long, to prepare and to compute."""
        if size < self.own or not self._may_grow:
            return
        if self._num_full:
            took_s = min(took_s, _SLOW * self._full_s)
        self._num_full += 1
        self._full_s += (took_s - self._full_s) / min(self._num_full, _NUM_FULL)
        if self._num_full < _NUM_FULL:
            return
        if self._full_s <= _FREE_S / 2 and self.own < _AUTO_MOST:
            self._change(self.own * 2)
        elif self._full_s > 2 * _FREE_S and self.own > AUTO_SIZE:
            self._change(self.own // 2)

    def _change(self, size: int) -> None:
        self.now = self.own = size
        self._full_s, self._num_full = 0.0, 0
