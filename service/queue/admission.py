"""Admits an instance to the queue, or refuses it at once and says when to try again.

Count and time are bounded here. Bytes are bounded by the arena: the dispatcher refuses a payload
that finds no slot. An API key may use its share of all three.
"""

from collections import deque
from math import ceil
from statistics import median

from inferpool.service.errors import (
    DeadlineExceededError,
    OverloadedError,
    OverShareError,
    UnavailableError,
)
from inferpool.service.queue.batcher import Position
from inferpool.service.telemetry.metrics import RejectReason
from inferpool.workers.shared.arena import Slots, slot_bytes
from inferpool.workers.shared.messages import ItemRef

_WEIGHT = 0.2
"""The weight of the newest batch in the moving averages."""
_NUM_RECENT = 16
_NUM_NEEDED = 4
_RECENT_S = 10.0
_RECENT_BATCHES = 8.0
"""A batch counts for the current rate if it is younger than `_RECENT_S` or than this many times its
own length."""
_SPARE = 1.2
"""The factor on estimates: batches vary, and without it half of those on the edge would be late (3
in 100 of all admitted, at ten times the capacity)."""
_ADMITTED_SPARE, _TIGHT_SPARE = 1.05, 1.1
"""The same factor when checking that what was admitted before stays in time. It is smaller, which
leaves room for instances with a nearer deadline."""
_LOST = 1.5
"""An admitted instance counts as lost if it would take this many times the time that is left.
Estimates vary by less (with 1.2, one simulated mix in 50 lost 128 of 1,356), and an instance that
will be late reaches this as its deadline draws near."""
_TIMES_ROOM = 3
"""The factor of `Admission.check_share`."""
_ESTIMATE_AGAIN_S = 0.1
"""How long an estimate is kept while no batch comes back, since refusals come in thousands."""
_LARGE = 0.75
"""Batches of at least this share of the largest recent one tell how long full ones take."""


class RateMeter:
    """Estimates how fast the workers of one model answer, from what their batches took."""

    def __init__(self, max_batch_size: int) -> None:
        self.item_s = 0.0
        """Moving average of one worker's seconds per instance; 0 until the first batch."""
        self.batch_s = 0.0
        """Moving average of one worker's seconds per batch."""
        self._max_batch_size = max_batch_size
        self._recent: dict[int, deque[tuple[float, int, float]]] = {}
        """Recent batches (time, size, seconds) by worker, since workers may differ a lot."""
        self._kept = (0.0, 0.0)
        self._kept_until = 0.0

    def learn(self, num_items: int, elapsed_s: float, now: float, worker: int = 0) -> None:
        """Learn from a batch of a worker, given by its slot, that was busy all that time."""
        item_s = elapsed_s / num_items
        self.item_s += _WEIGHT * (item_s - self.item_s) if self.item_s else item_s
        self.batch_s += _WEIGHT * (elapsed_s - self.batch_s) if self.batch_s else elapsed_s
        recent = self._recent.get(worker)
        if recent is None:
            recent = self._recent[worker] = deque(maxlen=_NUM_RECENT)
        recent.append((now, num_items, elapsed_s))
        self._kept_until = 0.0

    def under_load(self, now: float) -> tuple[float, float]:
        """Estimate the seconds per instance and per batch once batches are full; 0 if unknown.

        Refusals use it, so it errs on the low side. It uses medians, since one slow batch says
        little about the next. If only small batches were seen, it assumes that full ones take no
        longer.
        """
        if now >= self._kept_until:
            self._kept = self._estimate(now)
            self._kept_until = now + _ESTIMATE_AGAIN_S
        return self._kept

    def _estimate(self, now: float) -> tuple[float, float]:
        recent = {
            worker: [
                (size, elapsed_s)
                for at, size, elapsed_s in each
                if now - at < max(_RECENT_S, _RECENT_BATCHES * elapsed_s)
            ]
            for worker, each in self._recent.items()
        }
        if sum(map(len, recent.values())) < _NUM_NEEDED:
            return 0.0, 0.0
        largest = max(size for each in recent.values() for size, _ in each)
        is_full = largest >= self._max_batch_size / 2
        batches_s = []
        rates = []
        for each in recent.values():
            large = [(size, took_s) for size, took_s in each if size >= _LARGE * largest]
            batches_s += [took_s for _, took_s in large]
            items_s = [
                took_s / (size if is_full else self._max_batch_size) for size, took_s in large
            ]
            if items_s:
                rates.append(1 / max(median(items_s), 1e-9))
        return len(rates) / sum(rates), median(batches_s)


class KeyShare:
    """Bounds one API key's share of the queue, the time and the arena.

    A key may have this share of what the others leave. So a key alone may have this share of the
    whole, several that ask for more have equal parts, and some stays free for one more (the rule
    of `Admission.check_share`). So everything that a key has counts `weight` times. A key that has
    nothing is refused nothing.
    """

    def __init__(self, share: float, rejected: dict[RejectReason, int]) -> None:
        self.share = share
        self.weight = 1 / share
        self._rejected = rejected

    def check_places(self, num_own: int, num_waiting: int, most: int, retry_after_s: int) -> None:
        """Check that a key with `num_own` of the waiting instances may have one more.

        Raises:
            OverShareError: It would have more than its share of the queue.
        """
        if num_own and num_own + 1 > self.share * (most - num_waiting + num_own):
            raise self.over(f"the {num_own} requests of this key that wait", retry_after_s)

    def check_bytes(self, slots: Slots, ref: ItemRef) -> None:
        """Check that a key may have a slot for one more payload.

        Raises:
            OverShareError: It would have more than its share of the arena.
        """
        own = slots.used_by[ref.caller]
        left = slots.num_bytes - slots.used_bytes + own
        if own and own + slot_bytes(ref.num_bytes) > self.share * left:
            raise self.over(f"the payloads of this key, {own >> 10} KiB,", 1)

    def extra(self, num_own: int) -> float:
        """Return how many more than they are the instances of a key count as."""
        return num_own * (self.weight - 1)

    def over(self, what: str, retry_after_s: int) -> OverShareError:
        """Count a refusal, and return its error."""
        self._rejected["key_share"] += 1
        return OverShareError(
            f"{what} have its share (per_key_share = {self.share:g} of what other keys leave)",
            retry_after_s=retry_after_s,
        )


class Admission:
    """Admits instances to the queue of one model, or refuses them at once."""

    stream_limits = (60.0, 300.0, 100_000)
    """Bounds of a stream: see `StreamLimits`."""

    def __init__(
        self,
        *,
        max_queue_length: int,
        max_batch_size: int,
        rejected: dict[RejectReason, int],
        key_share: float = 1.0,
    ) -> None:
        self.rate = RateMeter(max_batch_size)
        self.key_share = KeyShare(key_share, rejected)
        self.rejected = rejected
        self.is_draining = False
        self.max_queue_length = max_queue_length
        """Instances that may wait."""

    def check(self, num_queued: int, num_workers: int, left_s: float) -> None:
        """Check that there is room for an instance.

        Args:
            num_queued: Instances that wait.
            num_workers: Ready workers, or 1 if one will soon be ready.
            left_s: Seconds until the instance's deadline.

        Raises:
            UnavailableError: The service is shutting down.
            DeadlineExceededError: The deadline has passed.
            OverloadedError: The queue is full.
        """
        if self.is_draining:
            self.rejected["draining"] += 1
            raise UnavailableError("this server is shutting down", retry_after_s=1)
        if left_s <= 0:
            self.rejected["deadline"] += 1
            raise DeadlineExceededError("the deadline passed before it could be queued")
        if num_queued >= self.max_queue_length:
            self.rejected["queue_full"] += 1
            raise OverloadedError(
                f"the queue is full ({num_queued} requests wait)",
                retry_after_s=self._time_for_half(num_queued, num_workers),
            )

    def is_welcome(self, num_queued: int, num_ahead: int, num_workers: int, left_s: float) -> bool:
        """Return whether there is room and the deadline is so far off that no check is needed.

        Everything that waits is answered by then, so an instance behind it is in time too.
        """
        if num_queued >= self.max_queue_length or self.is_draining or left_s <= 0:
            return False
        rate = self.rate
        return (num_ahead * rate.item_s / num_workers + rate.batch_s) * _SPARE <= left_s

    def check_share(self, position: Position, num_queued: int, num_workers: int) -> None:
        """Check that an instance's key and kind do not get more than their shares of the queue.

        Each kind may have three times as many instances as there are free places (Choudhury and
        Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998). So a
        flood of one kind leaves room for others, and two floods have equal shares.

        Raises:
            OverShareError: Its key would get more.
            OverloadedError: Its kind would get more.
        """
        if num_own := position.num_own:
            retry_after_s = self._time_for_half(num_own, num_workers)
            self.key_share.check_places(num_own, num_queued, self.max_queue_length, retry_after_s)
        num_kin = position.num_kin
        if num_kin > _TIMES_ROOM * (self.max_queue_length - num_queued):
            self.rejected["queue_full"] += 1
            raise _share_taken(num_kin, self._time_for_half(num_kin, num_workers))

    def check_time(
        self, position: Position, free_s: float, num_workers: int, left_s: float, now: float
    ) -> None:
        """Check that an instance would be answered in time, and would make no admitted one late.

        An instance that is admitted and then late takes the time of another that could have been
        in time. At ten times the capacity, with deadlines shorter than the queue, nearly all would
        be late.

        Args:
            position: The place that it would have in the queue.
            free_s: Seconds until workers are done with what they hold, on average.
            num_workers: Ready workers.
            left_s: Seconds until its deadline.
            now: CLOCK_MONOTONIC seconds.

        Raises:
            OverShareError: Its key would take more than its share of the time until its deadline.
            OverloadedError: It would be late, or make an admitted one late, or take more than its
                share of time. Its kind may use half of the time until its deadline, so that an
                instance with a higher priority need not wait for it. If an admitted instance is
                lost already, nothing is refused for the sake of admitted ones.
        """
        item_s, batch_s = self.rate.under_load(now)
        item_s /= num_workers
        batch_s += free_s
        num_ahead = position.num_by_deadline
        answered_s = num_ahead * item_s + batch_s
        if (num_ahead or free_s) and answered_s * _SPARE > left_s:
            self.rejected["deadline"] += 1
            raise OverloadedError(
                f"the deadline cannot be met: an answer would take about {answered_s:.1f} s, "
                f"and {left_s:.1f} s are left",
                retry_after_s=max(1, ceil(answered_s * _SPARE - left_s)),
            )
        if num_own := position.num_own_by_deadline:
            over_s = (answered_s + self.key_share.extra(num_own) * item_s) * _SPARE - left_s
            if over_s > 0:
                what = f"the {num_own} requests of this key with an earlier deadline"
                raise self.key_share.over(what, max(1, ceil(over_s)))
        if num_kin := position.num_kin_by_deadline:
            over_s = (answered_s + num_kin * item_s) * _SPARE - left_s
            if over_s > 0:
                self.rejected["deadline"] += 1
                raise _share_taken(num_kin, max(1, ceil(over_s)))
        late_s = 0.0
        for deadline, num in position.behind:
            other_s, other_left_s = num * item_s + batch_s, deadline - now
            if other_s > _LOST * other_left_s:
                return  # this one takes the place of one that will be late anyway
            late_s = max(late_s, (other_s + item_s) * _ADMITTED_SPARE - other_left_s)
        if late_s > 0:
            self.rejected["deadline"] += 1
            raise OverloadedError(
                "a request that was admitted before would miss its deadline",
                retry_after_s=max(1, ceil(late_s)),
            )

    def are_in_time(
        self, num: int, free_s: float, num_workers: int, left_s: float, now: float
    ) -> bool:
        """Return whether `num` are answered in time if one other batch goes before them."""
        item_s, batch_s = self.rate.under_load(now)
        return (free_s + num * item_s / num_workers + 2 * batch_s) * _TIGHT_SPARE <= left_s

    def _time_for_half(self, num_queued: int, num_workers: int) -> int:
        """Estimate the whole seconds until half of the queue has been worked off."""
        return max(1, ceil(num_queued * self.rate.item_s / num_workers / 2))


def _share_taken(num_kin: int, retry_after_s: int) -> OverloadedError:
    return OverloadedError(
        f"the {num_kin} requests that wait with about this priority and timeout have their share "
        "of the queue",
        retry_after_s=retry_after_s,
    )
