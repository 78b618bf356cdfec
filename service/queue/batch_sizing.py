"""Bounds the size of batches by what pays and by the deadlines of their instances.

A batch takes longer the more instances it has, and its first is answered with its last. So a batch
does not grow past what the tightest deadline among its members allows. An instance that would be
late even in a batch of its own does not count: it would only slow down the others.

Everything here is pure computation.
"""

from collections.abc import Sequence
from itertools import islice
from math import inf
from statistics import median
from typing import TYPE_CHECKING

from inferpool.models.speed_names import LONG_S, MOST_GROWN

if TYPE_CHECKING:
    from inferpool.service.queue.batcher import Batcher, Q
    from inferpool.service.queue.scheduling.lanes import CostCurve

AUTO_SIZE = 8
"""The largest batch, unless the settings say otherwise or more instances cost next to nothing."""
_AUTO_MOST = 64
_PAYS, _LOSES = 0.98, 1.02
"""The time per instance in batches of twice the size, as a share of that in the smaller ones, up
to which the larger size is chosen, and above which it is given up. ResNet-50 in a graph on an H100
takes 0.96 of the time from 64 to 128."""
_DOUBT = 0.1
"""How far from these bounds the first comparison must be to decide alone. Of n comparisons, the
median must be as far as this divided by n."""
_MOST_TURNS = 9
"""Comparisons after which the median alone decides."""
_NUM_COLD = 2
"""First batches after each change of size, while libraries choose and load kernels."""
_REST = 256
"""Turns of a size, of eight batches each, between a trial that changed nothing and the next."""
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
    it doubles, up to 256, as long as more instances per second are computed: see `SizeTrial`.
    Networks that were compiled for some sizes stay with them.
    """

    def __init__(self, max_batch_size: int | None) -> None:
        self.now = self.own = max_batch_size or AUTO_SIZE
        """`own` is the limit without an objective."""
        self._may_grow = max_batch_size is None
        self.is_accelerated = False
        """Part-full batches count, too; else there is no need to call `learn` with them."""
        self._full_s = 0.0
        self._num_full = 0
        self._turn: list[tuple[int, float]] = []
        """Sizes and seconds of an accelerator's batches since the limit changed, eight at most."""
        self._num_stale = 0
        """Instances that workers held when the limit changed."""
        self._num_cold = 0
        """Batches that do not count before the turn."""
        self._trial: SizeTrial | None = None
        self._rest = 0
        """Turns until the next trial."""
        self._may_shrink = False
        """The next trial compares the limit with half of it, and not with twice as much."""

    def hold(self, size: int = AUTO_SIZE) -> None:
        """Stay at a size, by default the one that workers have warmed up with."""
        if self._may_grow:
            self._may_grow = False
            self.now = self.own = size

    def accelerate(self) -> None:
        """Grow as it pays on accelerators, which the fast workers have.

        A worker that is attached may compute in another way than those before, so that other sizes
        pay. The next trial is soon, and one that is going on begins anew.
        """
        self.is_accelerated, self._rest, self._may_shrink = True, 0, False
        self._turn, self._num_cold = [], _NUM_COLD
        if self._trial is not None:
            self._trial = SizeTrial(self._trial.small, self._trial.bound)

    def bound(self, most: int) -> None:
        """Allow no more than an objective does."""
        self.now = min(self.own, most)

    def learn(self, size: int, worked_s: float, took_s: float, num_held: int) -> None:
        """Learn from a batch that a worker has answered.

        Args:
            size: The number of its instances.
            worked_s: Seconds that the worker prepared and computed it.
            took_s: Seconds since it was sent, or since the worker's answer before, whichever is
                less. So batches that overlap count by how soon one follows the other.
            num_held: Instances that workers still hold.
        """
        if not self._may_grow:
            return
        if self.is_accelerated:
            self._learn_accelerated(size, took_s, num_held)
        elif size >= self.own:
            self._learn_full(worked_s)

    def _learn_full(self, took_s: float) -> None:
        """Learn from a full batch on CPUs."""
        if self._num_full > 0:
            took_s = min(took_s, _SLOW * self._full_s)
        self._num_full += 1
        self._full_s += (took_s - self._full_s) / min(self._num_full, _NUM_FULL)
        if self._num_full < _NUM_FULL:
            return
        if self._full_s <= _FREE_S / 2 and self.own < _AUTO_MOST:
            self._change(self.own * 2, 0)
        elif self._full_s > 2 * _FREE_S and self.own > AUTO_SIZE:
            self._change(self.own // 2, 0)

    def _learn_accelerated(self, size: int, took_s: float, num_held: int) -> None:
        if self._num_stale > 0 or size > self.own:
            self._num_stale -= size
        elif self._num_cold:
            self._num_cold -= 1
        else:
            self._turn.append((size, took_s))
            if len(self._turn) == _NUM_FULL:
                turn, self._turn = self._turn, []
                self._judge(turn, num_held)

    def _judge(self, turn: Sequence[tuple[int, float]], num_held: int) -> None:
        """Change the limit after a turn of batches, or go on with a trial."""
        instance_s, batch_s = _instance_s(turn), median(took_s for _, took_s in turn)
        trial = self._trial
        if trial is not None:
            least = self.now if self.own == trial.small else trial.small // 2
            if _num_from(turn, least) < _NUM_FULL / 2:
                return  # less came than before
            is_long = self.own > trial.small and batch_s > 2 * LONG_S
            chosen = trial.small if is_long else trial.learn(self.own, instance_s)
            if chosen is None:
                self._change(trial.other(self.own), num_held)
            else:
                self._end(trial, chosen, num_held)
            return
        self._rest -= 1
        if self.own > AUTO_SIZE and batch_s > 2 * LONG_S:
            self._change(self.own // 2, num_held)
        elif self._rest <= 0 and self.now == self.own:
            self._begin_trial(turn, instance_s, batch_s, num_held)

    def _begin_trial(
        self, turn: Sequence[tuple[int, float]], instance_s: float, batch_s: float, num_held: int
    ) -> None:
        """Compare the limit with twice as much or with half of it, if it matters."""
        may_grow = self.own < MOST_GROWN and batch_s <= LONG_S
        shrinks = self.own > AUTO_SIZE and (self._may_shrink or not may_grow)
        small = self.own // 2 if shrinks else self.own
        if (shrinks or may_grow) and _num_from(turn, small) >= _NUM_FULL / 2:
            self._trial = trial = SizeTrial(small, _LOSES if shrinks else _PAYS)
            trial.learn(self.own, instance_s)
            self._change(trial.other(self.own), num_held)

    def _end(self, trial: "SizeTrial", chosen: int, num_held: int) -> None:
        """End the trial with one of its sizes."""
        self._trial = None
        has_grown = chosen > trial.small and trial.bound == _PAYS
        self._rest = 0 if has_grown else _REST
        self._may_shrink = not has_grown and not self._may_shrink
        self._change(chosen, num_held)

    def _change(self, size: int, num_held: int) -> None:
        self.now = self.own = size
        self._full_s, self._num_full = 0.0, 0
        self._turn, self._num_cold, self._num_stale = [], _NUM_COLD, num_held


class SizeTrial:
    """Compares batches of a size with batches of twice that size, which take turns.

    So what changes meanwhile (the load, the clock of a device) meets both. A clear difference
    decides after one turn of each, a small one after several.
    """

    def __init__(self, small: int, bound: float) -> None:
        """Begin to compare.

        Args:
            small: The smaller size.
            bound: The larger one is chosen up to this share of the smaller one's time per instance.
        """
        self.small = small
        self.bound = bound
        self._latest_s: dict[int, float] = {}
        """The time per instance in the latest turn of each size, while they are compared."""
        self._shares: list[float] = []
        """The larger size's time per instance as a share of the smaller one's, in each turn."""

    def other(self, size: int) -> int:
        """Return the size that has its turn after this one."""
        return 2 * self.small if size == self.small else self.small

    def learn(self, size: int, instance_s: float) -> int | None:
        """Learn the time per instance from a turn; return the size that pays, once it is clear."""
        self._latest_s[size] = instance_s
        if len(self._latest_s) < 2:
            return None
        self._shares.append(self._latest_s[2 * self.small] / self._latest_s[self.small])
        self._latest_s = {}
        share, num = median(self._shares), len(self._shares)
        if num < _MOST_TURNS and abs(share - self.bound) < _DOUBT / num:
            return None
        return 2 * self.small if share <= self.bound else self.small


def _instance_s(turn: Sequence[tuple[int, float]]) -> float:
    """Return the seconds per instance of batches, without the slowest: it may be interrupted."""
    slowest = max(turn, key=lambda batch: batch[1] / batch[0])
    num = sum(size for size, _ in turn) - slowest[0]
    return max((sum(took_s for _, took_s in turn) - slowest[1]) / num, 1e-9)


def _num_from(turn: Sequence[tuple[int, float]], least: int) -> int:
    """Return how many batches have at least that size."""
    return sum(size >= least for size, _ in turn)


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
