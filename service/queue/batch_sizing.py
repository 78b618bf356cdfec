"""Bounds the size of batches by what pays and by the deadlines of their instances.

A batch takes longer the more instances it has, and its first is answered with its last. So a batch
does not grow past what the tightest deadline among its members allows. An instance that would be
late even in a batch of its own does not count: it would only slow down the others.

Everything here is pure computation.
"""

from itertools import islice
from math import inf
from typing import TYPE_CHECKING

from inferpool.models.speed_names import LONG_S, MOST_GROWN

if TYPE_CHECKING:
    from inferpool.service.queue.batcher import Batcher, Q
    from inferpool.service.queue.scheduling.lanes import CostCurve

AUTO_SIZE = 8
"""The largest batch, unless the settings say otherwise or more instances cost next to nothing."""
_AUTO_MOST = 64
_PAYS = 0.9
"""A batch of twice the size pays if an instance takes no more than this share of its time."""
_NUM_COLD = 2
"""First full batches of a size, while libraries of an accelerator choose and load kernels."""
_TRIED_AGAIN_AFTER = 512
"""Full batches after which an accelerator gets larger ones again that did not pay before."""
_FREE_S = 0.002
"""A worker's time for a batch below which messages and wake-ups cost more than the batch does. An
echo of 64 takes 0.9 ms, and needs an eighth of the messages that batches of 8 need."""
_NUM_FULL = 8
"""Full batches that are averaged before the limit changes."""
_SLOW = 3.0
"""A full batch counts for at most this many times the average: it may have been interrupted."""
SPARE = 1.2
"""The factor on the estimated time of a batch: batches vary, and half of them take longer."""


class SizeLimit:
    """The most instances that a batch may have: a fixed number, or with `auto` what pays.

    With `auto` (None) it starts at 8, which workers have warmed up with. On CPUs it doubles, up to
    64, while full batches come back so fast that twice as many would still cost next to nothing,
    and falls back when they turn out slower. On accelerators, which compute many instances at once,
    it doubles, up to 256, as long as the time per instance falls clearly, and falls back if it does
    not. Networks that were compiled for some sizes stay with them.
    """

    def __init__(self, max_batch_size: int | None) -> None:
        self.now = self.own = max_batch_size or AUTO_SIZE
        """`own` is the limit without an objective."""
        self._may_grow = max_batch_size is None
        self._is_accelerated = False
        self._full_s = 0.0
        self._num_full = 0
        self._half_s = 0.0
        """Time per instance in batches of half the size, while it is compared; else 0."""
        self._num_until_trial = 0

    def hold(self) -> None:
        """Stay at the size that workers have warmed up with."""
        if self._may_grow:
            self._may_grow = False
            self.now = self.own = AUTO_SIZE

    def accelerate(self) -> None:
        """Grow as it pays on accelerators, which the fast workers have."""
        if not self._is_accelerated:
            self._is_accelerated, self._num_full = True, -_NUM_COLD

    def bound(self, most: int) -> None:
        """Allow no more than an objective does."""
        self.now = min(self.own, most)

    def learn(self, size: int, prepare_s: float, compute_s: float) -> None:
        """Learn from the seconds that a worker took to prepare and to compute a batch."""
        if size < self.own or not self._may_grow:
            return
        # An accelerator computes a batch while the next one is prepared.
        took_s = max(prepare_s, compute_s) if self._is_accelerated else prepare_s + compute_s
        if self._num_full > 0:
            took_s = min(took_s, _SLOW * self._full_s)
        self._num_full += 1
        if self._num_full <= 0:
            return
        self._full_s += (took_s - self._full_s) / min(self._num_full, _NUM_FULL)
        if self._num_full < _NUM_FULL:
            return
        if self._is_accelerated:
            self._judge()
        elif self._full_s <= _FREE_S / 2 and self.own < _AUTO_MOST:
            self._change(self.own * 2)
        elif self._full_s > 2 * _FREE_S and self.own > AUTO_SIZE:
            self._change(self.own // 2)

    def _judge(self) -> None:
        """Try batches of twice the size, or go back to half the size if these do not pay."""
        item_s = self._full_s / self.own
        does_not_pay = self._half_s and item_s > _PAYS * self._half_s
        self._half_s = 0.0
        self._num_until_trial -= 1
        if self.own > AUTO_SIZE and (does_not_pay or self._full_s > 2 * LONG_S):
            self._num_until_trial = _TRIED_AGAIN_AFTER
            self._change(self.own // 2)
        elif self._num_until_trial <= 0 and self._full_s <= LONG_S and self.own < MOST_GROWN:
            self._half_s = item_s
            self._change(self.own * 2)
            self._num_full = -_NUM_COLD

    def _change(self, size: int) -> None:
        self.now = self.own = size
        self._full_s, self._num_full = 0.0, 0


def fitting(queue: "Batcher[Q]", most: int, begin: float, curve: "CostCurve") -> int:
    """Return the largest size of the next batch that keeps the deadlines of its members.

    Deadlines that even a batch of one would miss don't count.

    Args:
        queue: The waiting instances; at least one.
        most: The largest size.
        begin: When the worker will begin with the batch.
        curve: The worker's times.
    """
    if begin + curve.time_s(most) * SPARE <= queue.soonest():
        return most
    alone_s = curve.time_s(1) * SPARE
    num, allowed, tightest = 0, most, inf
    for instance in islice(queue, most):
        deadline = instance.ref.deadline
        if deadline < tightest and begin + alone_s <= deadline:
            # At least 1, as `alone_s` shows; rounding might say 0.
            fits = max(1, curve.size_within((deadline - begin) / SPARE, allowed))
            if num >= fits:
                break  # with it the batch would be too large for its own deadline
            allowed, tightest = fits, deadline
        if num == allowed:
            break
        num += 1
    return num
