"""When the next batch goes, and to which worker.

An idle worker gets what there is, at once. Several idle ones share it, unless one alone is done
with it so soon that a second batch would cost more than it gains. A busy one gets its next batch
when that is full, or just before it is done with the one that it has. A worker that is clearly
slower than others (a CPU beside a GPU) gets of what would be answered last, as much as it has
answered by the time when the others would have answered everything: so it never makes a request
wait, and is as busy as it can be where there is a lot to do.
"""

import asyncio
import time
from collections.abc import Callable
from math import inf

from inferpool.service.queue.batch_sizes import SizeLimit
from inferpool.service.queue.batcher import Batcher
from inferpool.service.queue.instance import Instance
from inferpool.service.queue.lanes import Lane, Lanes

_EARLY_S = 0.001
"""How long before the end of a batch the next one is sent, beyond what its preparation takes."""
_LEAST_WAIT_S = 0.001
"""A shorter one may be over by the clock's own rounding before it has begun, again and again."""
_SHARING_PAYS_S = 0.0005
"""What a worker answers in less time is not divided among idle ones. With an echo, whose batches of
16 take 0.12 ms, each batch costs the front end 80 µs and a worker 45 µs whatever its size."""
_OVERLAP_PAYS_S = 0.002
"""Below this, a worker is back for more before a timer could be of use."""


class Schedule:
    """The order of the day of one model's workers."""

    def __init__(
        self,
        queue: Batcher[Instance],
        lanes: Lanes,
        limit: SizeLimit,
        batch_wait_s: float,
        send: Callable[[Lane, int, float], None],
        send_last: Callable[[Lane, int, float], bool],
    ) -> None:
        """Begin with nothing due.

        Args:
            queue: What waits.
            lanes: The workers.
            limit: How large batches may be.
            batch_wait_s: How long an idle worker waits for a batch to fill.
            send: Gives a worker a batch of at most so many, at a moment.
            send_last: Likewise, of those whose turn is furthest off, as far as they have the time;
                returns whether there were any.
        """
        self.prepare_s = 0.0
        """What it took to prepare the last batch."""
        self._queue = queue
        self._lanes = lanes
        self._limit = limit
        self._batch_wait_s = batch_wait_s
        self._send = send
        self._send_last = send_last
        self._loop = asyncio.get_running_loop()
        self.is_due = False
        """It looks once more in the next turn of the loop anyway."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0

    def soon(self) -> None:
        """Send what can be sent, once all that arrived in this turn of the loop is queued."""
        if not self.is_due and self._queue.num_waiting:
            self.is_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self.is_due = False
        while self._queue.num_waiting:
            now = time.monotonic()
            idle = [lane for lane in self._lanes.leading if not lane.batches]
            if idle:
                if self._waits_for_more(now):
                    return
                self._give_idle(idle, now)
                continue
            if self._lanes.lagging and self._give_rest(now):
                continue
            lane = self._next_busy(now)
            if lane is None:
                return
            self._send(lane, self._limit.now, now)

    def _give_idle(self, idle: list[Lane], now: float) -> None:
        """Divide what waits evenly among idle workers, or give one what it is soon done with."""
        num = self._queue.num_waiting
        if len(idle) == 1 or (
            (curve := idle[0].next_curve).is_known and curve.time_s(num) < _SHARING_PAYS_S
        ):
            self._send(idle[0], num, now)
            return
        for position, lane in enumerate(idle):
            if num := self._queue.num_waiting:
                self._send(lane, -(-num // (len(idle) - position)), now)

    def _give_rest(self, now: float) -> bool:
        """Give a slower worker what it can answer no later than the others would; whether it was.

        Where none of the others is on time, it gets what it can answer in as long as they have been
        overdue: little, if they were only held up, and more and more if they do not come back.
        """
        lanes, most = self._lanes, self._limit.now
        num = self._queue.num_waiting
        by = lanes.answered_by(num, most, now)
        for lane in lanes.lagging:
            if not lane.has_credit:
                continue
            if by == inf:
                if lane.batches:
                    continue
                overdue_s = now - max(other.ends_at for other in lanes.leading)
                if size := lane.next_curve.size_within(overdue_s, most):
                    self._send(lane, size, now)
                    return True
                self.wake_in(max(_LEAST_WAIT_S, lane.next_curve.time_s(1) - overdue_s))
                continue
            left_s = by - lane.begins_at(now)
            size = lane.next_curve.size_within(left_s, min(num, most))
            if (size == most or (size and not lane.batches)) and self._send_last(lane, size, now):
                return True
        late_at = min((lane.late_at for lane in lanes.leading if lane.late_at > now), default=now)
        if late_at > now:
            self.wake_in(late_at - now)  # unless it comes back before, as it should
        return False

    def _waits_for_more(self, now: float) -> bool:
        """Whether `batch_wait_ms` still holds the next batch back."""
        if not self._batch_wait_s or self._queue.num_waiting >= self._limit.now:
            return False
        oldest = self._queue.oldest()
        assert oldest is not None
        left_s = oldest.arrived + self._batch_wait_s - now
        if left_s <= 0 or oldest.is_solo:
            return False
        self.wake_in(left_s)
        return True

    def _next_busy(self, now: float) -> Lane | None:
        """A busy worker that should have its next batch now: a full one, or the end is near."""
        lanes = [lane for lane in self._lanes.leading if lane.has_credit]
        oldest = self._queue.oldest()
        if not lanes or oldest is None or oldest.is_solo:  # which waits for an idle worker
            return None
        lane = min(lanes, key=lambda lane: (len(lane.batches), lane.ends_at))
        if self._queue.num_waiting >= self._limit.now:
            return lane
        if len(lane.batches) > 1 or lane.ends_at - lane.busy_since < _OVERLAP_PAYS_S:
            return None
        left_s = lane.ends_at - now - self.prepare_s - _EARLY_S
        if left_s <= 0:
            return lane
        self.wake_in(left_s)
        return None

    def wake_in(self, delay_s: float) -> None:
        """Look again after this long, or before."""
        due = self._loop.time() + delay_s
        if self._timer is not None:
            if self._timer_due <= due:
                return
            self._timer.cancel()
        self._timer_due = due  # uvloop's handles for less than a millisecond do not say
        self._timer = self._loop.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._pump()
