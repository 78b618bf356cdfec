"""Decides when the next batch goes, and to which worker.

- An idle worker gets what there is, at once. Several idle workers share it, unless one alone would
  be done so soon that a second batch costs more than it gains.
- A busy worker gets its next batch when that is full, or just before it finishes the current one.
- Work in the background goes to workers that no other work has a use for; see `background.py`.
- A replica more than twice as slow as the fastest (a CPU beside a GPU) takes only instances from
  the end of the queue that it can finish before the fast ones would. So it delays no instance, and
  still helps as much as it can under load.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from math import inf

from inferpool.service.queue.admission import Admission, RateMeter
from inferpool.service.queue.batch_sizing import SPARE, SizeLimit, fitting
from inferpool.service.queue.batcher import Batcher, Position
from inferpool.service.queue.instance import Instance
from inferpool.service.queue.scheduling.background import Background, TurnsQueue
from inferpool.service.queue.scheduling.lanes import Lane, Lanes
from inferpool.workers.shared.messages import BatchDone

EARLY_S = 0.001
"""How long before the end of a batch the next is sent, besides the time to prepare it."""
_RESOLUTION_S = 1e-6
"""Less than this may round to no delay at all, and a timer that is over at once look for ever."""
_LEAST_WAIT_S = 0.001
"""The shortest timer for a lagging worker. A shorter one may be over at once by rounding, again and
again."""
_SHARING_PAYS_S = 0.0005
"""Work that takes one worker less than this is not shared. An echo answers 16 instances in 0.12 ms,
while each batch of any size costs the front end 80 µs and a worker 45 µs."""
_OVERLAP_PAYS_S = 0.002
"""A worker with a shorter batch is back before a timer could be of use."""
_Queue = Batcher[Instance] | TurnsQueue
_NEAR_BATCHES = 100.0
"""A deadline further off than this many recent batches needs no closer look."""


class QueuePolicy:
    """A part's say in what the queue of one model admits, how large batches are and when they go.

    A part adds one to `BatchScheduler.policies`, and overrides what it needs: these methods leave
    everything as it is. Without any policy nothing is called.
    """

    @property
    def useful_s(self) -> float:
        """Seconds after an instance's arrival within which an answer is of use."""
        return inf

    def is_welcome(self, num_ahead: int, now: float) -> bool:
        """Return whether an instance behind `num_ahead` others may be admitted without `check`."""
        return True

    def check(self, position: Position, admission: Admission, now: float) -> None:
        """Check an instance by its place in the queue; raise a `ServiceError` to refuse it."""

    def takes_over(self) -> bool:
        """Return whether the policy itself calls `BatchScheduler.send_next` when it is time."""
        return False

    def begin(self, lane: Lane, batch: list[Instance], now: float) -> None:
        """Learn that a worker was sent a batch."""

    def end(self, lane: Lane, batch: list[Instance], done: BatchDone | None, now: float) -> float:
        """Learn that a worker returns a batch, which it still holds, or is lost with it (None).

        Returns:
            The seconds for which the policy had kept the worker idle before the batch.
        """
        return 0.0

    def plan(self, now: float) -> None:
        """Bound the next batch, after workers were sent one or have answered one."""

    def bound(self, waiting: Sequence[Instance]) -> int:
        """Return how many of these, from the first on, may share a batch; at least one of any."""
        return len(waiting)


class BatchScheduler:
    """Sends batches to the workers of one model."""

    def __init__(
        self,
        queue: Batcher[Instance],
        background: Background,
        lanes: Lanes,
        limit: SizeLimit,
        batch_wait_s: float,
        filler: "BatchFiller",
        give: Callable[[Lane, list[Instance], float], None],
    ) -> None:
        """Start with nothing due.

        Args:
            queue: The waiting instances.
            background: Those that wait until nothing else does.
            lanes: The workers.
            limit: How large batches may be.
            batch_wait_s: How long an idle worker waits for a batch to fill.
            filler: Takes batches out of the queues.
            give: Sends a worker a batch, at a time.
        """
        self.prepare_s = 0.0
        """The time that it took to prepare the last batch."""
        self.lanes = lanes
        self.policies = filler.policies
        """Added by parts."""
        self._queue = queue
        self.background = background
        self.limit = limit
        self._batch_wait_s = batch_wait_s
        self._filler = filler
        self._give = give
        self._loop = asyncio.get_running_loop()
        self.is_due = False
        """It runs in the next iteration of the loop."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0

    def soon(self) -> None:
        """Send what can be sent, after all that arrives in this iteration of the loop is queued."""
        if not self.is_due and self.num_waiting:
            self.is_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self.is_due = False
        lanes, policies = self.lanes, self.policies
        if policies and self.num_waiting and any(policy.takes_over() for policy in policies):
            return
        while self.num_waiting and self.send_next(lanes.leading, lanes.lagging):
            pass

    @property
    def num_waiting(self) -> int:
        """Instances that wait, those in the background too."""
        return self._queue.num_waiting + self.background.queue.num_waiting

    def learn(
        self, lane: Lane, batch: list[Instance], done: BatchDone, now: float, *, was_computed: bool
    ) -> None:
        """Learn how long batches take from one that has come back."""
        took_s, lanes = now - lane.busy_since, self.lanes
        lanes.answered(lane, batch, now, was_computed=was_computed)
        if was_computed and not lane.is_lagging:
            if len(batch) >= self.limit.own or self.limit.is_accelerated:
                worked_s = done.prepare_s + done.compute_s
                self.limit.learn(len(batch), worked_s, took_s, lanes.num_sent)
            self.prepare_s = done.prepare_s

    def send_next(
        self, leading: Sequence[Lane], lagging: Sequence[Lane], most: int | None = None
    ) -> bool:
        """Send a batch to one of these workers, or one to each of several that are idle.

        Args:
            leading: Fast workers.
            lagging: Slow ones, the fastest first.
            most: The most batches to send to workers that are idle; None: one to each.

        Returns:
            Whether anything was sent. If not, nothing will be before something changes, or a timer
            that was set here is over.
        """
        now = time.monotonic()
        idle = [lane for lane in leading if not lane.batches]
        if not self._queue.num_waiting:
            return self._give_background(
                idle or [lane for lane in lagging if not lane.batches], leading, now
            )
        if idle:
            if self._waits_for_more(now):
                return False
            if self.background.queue.num_waiting and self.background.is_due(idle[0]):
                self._send_background(idle[0], now)
            else:
                self._give_idle(idle[:most], now)
            return True
        if lagging and self._give_rest(lagging, now):
            return True
        lane = self._next_busy(leading, now)
        if lane is None:
            return False
        if self.background.queue.num_waiting and self.background.is_due(lane):
            self._send_background(lane, now)
        else:
            self._send(lane, self.limit.now, now)
        return True

    def _give_background(self, idle: Sequence[Lane], leading: Sequence[Lane], now: float) -> bool:
        """Send a batch of the background to an idle worker, or to one that is about to be idle.

        The latter has to prepare it, which takes it as long as its present batch still does. So
        what comes next waits no longer than for a batch that an idle worker has just got.
        """
        if idle:
            self._send_background(idle[0], now)
            return True
        lanes = [lane for lane in leading if len(lane.batches) == 1 and lane.has_credit]
        lane = min(lanes, key=lambda lane: lane.ends_at, default=None)
        if lane is None or not self._is_almost_free(lane, now):
            return False
        self._send_background(lane, now)
        return True

    def _give_idle(self, idle: Sequence[Lane], now: float) -> None:
        """Divide what waits evenly among idle workers, or give it all to one that is soon done."""
        num = self._queue.num_waiting
        if len(idle) == 1 or (
            (curve := idle[0].next_curve).is_known and curve.time_s(num) < _SHARING_PAYS_S
        ):
            self._send(idle[0], num, now)
            return
        for position, lane in enumerate(idle):
            if num := self._queue.num_waiting:
                self._send(lane, -(-num // (len(idle) - position)), now)

    def _give_rest(self, lagging: Sequence[Lane], now: float) -> bool:
        """Send a lagging worker what it can answer no later than the leading ones would.

        If none of the leading workers is on time, it gets what it can answer in as long as they
        have been overdue: little if they were only held up, and more and more if they do not come
        back.

        Returns:
            Whether it was given anything.
        """
        lanes, most = self.lanes, self.limit.now
        num = self._queue.num_waiting
        by = lanes.answered_by(num, most, now)
        for lane in lagging:
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
            self.wake_in(late_at - now)  # it should come back before
        return False

    def _send(self, lane: Lane, most: int, now: float) -> None:
        self._give(lane, self._filler.fill(lane, most, now), now)

    def _send_last(self, lane: Lane, most: int, now: float) -> bool:
        useful_s = min((policy.useful_s for policy in self.policies), default=inf)
        batch = self._filler.fill_from_end(lane, most, now, useful_s)
        if batch:
            self._give(lane, batch, now)
        return bool(batch)

    def _send_background(self, lane: Lane, now: float) -> None:
        self._give(lane, self._filler.fill_from_background(lane, now), now)

    def _waits_for_more(self, now: float) -> bool:
        """Return whether `batch_wait_ms` still holds the next batch back, and set a timer if so."""
        if not self._batch_wait_s or self._fills_batch():
            return False
        oldest = self._queue.oldest()
        assert oldest is not None
        left_s = oldest.arrived + self._batch_wait_s - now
        if left_s <= 0 or oldest.is_solo:
            return False
        self.wake_in(left_s)
        return True

    def _next_busy(self, leading: Sequence[Lane], now: float) -> Lane | None:
        """Return a busy worker that should get a batch now: a full one, or its end is near."""
        lanes = [lane for lane in leading if lane.has_credit]
        oldest = self._queue.oldest()
        if not lanes or oldest is None or oldest.is_solo:  # a solo one waits for an idle worker
            return None
        lane = min(lanes, key=lambda lane: (len(lane.batches), lane.ends_at))
        if self._fills_batch():
            return lane
        return lane if len(lane.batches) == 1 and self._is_almost_free(lane, now) else None

    def _fills_batch(self) -> bool:
        num = self._queue.num_waiting
        return num >= self.limit.now or self._filler.most_of(self._queue) < num

    def _is_almost_free(self, lane: Lane, now: float) -> bool:
        """Return whether it is time to send a worker the next batch; if not, set a timer."""
        if lane.ends_at - lane.busy_since < _OVERLAP_PAYS_S:
            return False
        left_s = lane.ends_at - now - self.prepare_s - EARLY_S
        if left_s > 0:
            self.wake_in(left_s)
        return left_s <= 0

    def wake_in(self, delay_s: float) -> None:
        """Try to send again after this long, or sooner."""
        due = self._loop.time() + max(delay_s, _RESOLUTION_S)
        if self._timer is not None:
            if self._timer_due <= due:
                return
            self._timer.cancel()
        self._timer_due = due  # uvloop's handles do not tell it to less than a millisecond
        self._timer = self._loop.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._pump()


class BatchFiller:
    """Picks the instances of the next batch from the queues of one model."""

    def __init__(
        self,
        queue: Batcher[Instance],
        background: Background,
        limit: SizeLimit,
        rate: RateMeter,
    ) -> None:
        """Store the queues to take from and the limits to respect."""
        self._queue = queue
        self._background = background
        self._limit = limit
        self._rate = rate
        self.policies: list[QueuePolicy] = []

    def fill(self, lane: Lane, most: int, now: float) -> list[Instance]:
        """Return instances from the front of the queue, as many as can be in time together."""
        queue = self._queue
        most = min(most, queue.num_waiting, self._limit.now)
        if queue.soonest() - now < _NEAR_BATCHES * self._rate.batch_s:
            begin, curve = lane.begins_at(now), lane.next_curve
            queue.put_last(begin + curve.time_s(1))
            most = fitting(queue, most, begin, curve)
        batch = self._take(queue, most)
        self._background.others_at = now
        if self._background.queue.num_waiting:
            self._add_companions(batch, lane, now)
        return batch

    def _add_companions(self, batch: list[Instance], lane: Lane, now: float) -> None:
        """Fill the rest of a batch with work in the background, if all can be in time."""
        background, curve = self._background, lane.next_curve
        background.count_others(curve.time_s(len(batch)))
        num = background.companions(curve, len(batch), self._limit.now)
        if num and not batch[0].is_solo:
            end = lane.begins_at(now) + curve.time_s(len(batch) + num) * SPARE
            if end <= min(instance.ref.deadline for instance in batch):
                batch += self._take(background.queue, num, batch)

    def fill_from_end(self, lane: Lane, most: int, now: float, useful_s: float) -> list[Instance]:
        """Return instances from the end of the queue that have the time for this worker."""
        end = lane.begins_at(now) + lane.next_curve.time_s(most) * SPARE
        taken: list[Instance] = []

        def fits(instance: Instance) -> bool:
            if end > min(instance.ref.deadline, instance.arrived + useful_s):
                return False
            taken.append(instance)
            return self.most_of(taken) >= len(taken) or not taken.pop()

        return self._queue.last_batch(most, fits)

    def fill_from_background(self, lane: Lane, now: float) -> list[Instance]:
        """Return instances of the background alone."""
        curve = lane.next_curve
        size = self._background.size(curve, self._limit.now, now)
        batch = self._take(self._background.queue, size)
        self._background.count_own(curve.time_s(len(batch)))
        return batch

    def _take(self, queue: _Queue, num: int, batch: Sequence[Instance] = ()) -> list[Instance]:
        """Return the next instances of a queue that may join a batch."""
        more = queue.next_batch(num)
        most = self.most_of([*batch, *more]) if self.policies else inf
        while more and most < len(batch) + len(more):
            queue.push_front(more.pop())
        return more

    def most_of(self, waiting: Iterable[Instance]) -> float:
        """Return how many of these, from the first on, the policies allow in a batch."""
        return min((policy.bound([*waiting]) for policy in self.policies), default=inf)
