"""Decides when the next batch goes, and to which worker.

- An idle worker gets what there is, at once. Several idle workers share it, unless one alone would
  be done so soon that a second batch costs more than it gains.
- A busy worker gets its next batch when that is full, or just before it finishes the current one.
- A replica more than twice as slow as the fastest (a CPU beside a GPU) takes only instances from
  the end of the queue that it can finish before the fast ones would. So it delays no instance, and
  still helps as much as it can under load.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Protocol

from inferpool.service.queue.batch_sizing import BatchCosts, CostCurve, SizeLimit
from inferpool.service.queue.batcher import Batcher
from inferpool.service.queue.instance import Instance
from inferpool.workers.host.engine import WorkerHandle
from inferpool.workers.messages import BatchDone

EARLY_S = 0.001
"""How long before the end of a batch the next is sent, besides the time to prepare it."""
_RESOLUTION_S = 1e-6
"""Less than this may round to no delay at all, and a timer that is over at once look for ever."""
_LEAST_WAIT_S = 0.001
"""The shortest timer for a lagging worker. A shorter one may be over at once by rounding, again and
again."""
_SHARING_PAYS_S = 0.0005
"""Work that takes one worker less than this is not shared. An echo answers 16 instances in 0.12 ms,
while each batch costs the front end 80 µs and a worker 45 µs whatever its size."""
_OVERLAP_PAYS_S = 0.002
"""A worker with a shorter batch is back before a timer could be of use."""

_COMPARED_AT = 4
"""The batch size at which workers are compared."""
_LAGS_FROM, _LAGS_UNTIL = 2.0, 1.5
"""A worker lags from and until it takes so many times as long as the fastest. Workers on the same
kind of device vary by less."""
_LEAST_S = 0.002
"""Workers that take less than this for such a batch are all fast enough."""
_COMPARED_AFTER = 16
"""Batches between comparisons, after as many batches of each worker."""
_LATE, _LATE_S = 0.5, 0.01
"""How much longer than expected a batch may take, as a share and in seconds, before nobody counts
on its worker any more."""


class Lane:
    """The batches that one worker holds, and when it should be free."""

    __slots__ = (
        "_was_idle", "batches", "busy_since", "costs", "ends_at", "idle_since", "is_lagging",
        "worker",
    )  # fmt: skip

    def __init__(self, worker: WorkerHandle, costs: BatchCosts) -> None:
        self.worker = worker
        self.costs = costs
        self.batches: list[list[Instance]] = []
        """The batches that the worker holds, oldest first."""
        self.busy_since = 0.0
        """When the worker began its oldest batch. For a pipeline, which works on several, it is the
        time of the last answer, so the curves learn how far apart answers come."""
        self.ends_at = 0.0
        """When the worker should answer that batch."""
        self.idle_since = 0.0
        """When the worker last became idle; 0 if it has not, or nobody takes turns with it."""
        self.is_lagging = False
        """The worker is clearly slower than another."""
        self._was_idle = True
        """The worker was idle when it was sent its oldest batch."""

    @property
    def has_credit(self) -> bool:
        """The worker may be sent a batch now. Nothing is sent behind a solo instance."""
        batches = self.batches
        return not batches or (len(batches) < self.worker.credit and not batches[-1][0].is_solo)

    @property
    def next_curve(self) -> CostCurve:
        """The costs of the next batch that it is sent, counted from `begins_at`."""
        return self.costs.curve(is_idle=not self.batches)

    @property
    def late_at(self) -> float:
        """The time after which nobody counts on its oldest batch any more."""
        if not self.batches:
            return inf
        return self.ends_at + max(_LATE_S, _LATE * (self.ends_at - self.busy_since))

    def begins_at(self, now: float) -> float:
        """Estimate when it would begin with a batch that is sent now."""
        if not self.batches:
            return now
        curve = self.costs.curve(is_idle=False)
        rest_s = sum(curve.time_s(len(batch)) for batch in self.batches[1:])
        return max(now, self.ends_at) + rest_s

    def begin(self, now: float, *, was_idle: bool) -> None:
        """Note that it begins with its oldest batch now."""
        self.busy_since = now
        self._was_idle = was_idle
        self.ends_at = now + self.costs.time_s(len(self.batches[0]), is_idle=was_idle)

    def learn(self, size: int, now: float) -> None:
        """Learn from its oldest batch, which had this size and was answered now."""
        self.costs.note(size, now - self.busy_since, was_idle=self._was_idle)


class Lanes:
    """The lanes of all workers of one model."""

    def __init__(self) -> None:
        self.open: list[Lane] = []
        """Lanes of the workers that take batches."""
        self.leading: list[Lane] = []
        """The fast ones among them: all, if they are about equally fast."""
        self.lagging: list[Lane] = []
        """The others, the fastest first."""
        self.num_sent = 0
        """Instances that workers hold, settled or not."""
        self._free_at = 0.0
        """The cached result of `free_in`; 0 after any change of workers or batches."""
        self._num_learned = 0
        self._costs: dict[int, BatchCosts] = {}
        """Costs by slot, since the next incarnation of a worker is as fast as the one before."""
        self._leaving: list[Lane] = []
        """Lanes of workers that take no more batches, and still hold some."""

    def attach(self, worker: WorkerHandle) -> None:
        """Add a worker that takes batches."""
        costs = self._costs.setdefault(worker.id.slot, BatchCosts())
        self.open.append(Lane(worker, costs))
        self._compare()

    def detach(self, worker: WorkerHandle) -> None:
        """Send a worker nothing more. It keeps what it holds until it returns it or is lost."""
        for lane in self.open:
            if lane.worker is worker:
                self.open.remove(lane)
                self._compare()
                if lane.batches:
                    self._leaving.append(lane)
                return

    def give(self, lane: Lane, batch: list[Instance]) -> None:
        """Note that a worker holds one more batch."""
        self.num_sent += len(batch)
        self._free_at = 0.0
        lane.batches.append(batch)

    def take(self, lane: Lane, batch: list[Instance]) -> None:
        """Note that a worker has returned a batch, or is lost with it."""
        self.num_sent -= len(batch)
        self._free_at = 0.0
        lane.batches.remove(batch)
        if not lane.batches and lane in self._leaving:
            self._leaving.remove(lane)

    def learn(self, lane: Lane, size: int, now: float) -> None:
        """Learn from the oldest batch of a worker, which had this size and was answered now."""
        are_several = len(self.open) > 1
        is_first = are_several and not lane.costs.curve(is_idle=False).is_known
        lane.learn(size, now)
        self._num_learned += 1
        if are_several and (
            is_first
            or self._num_learned <= _COMPARED_AFTER * len(self.open)
            or not self._num_learned % _COMPARED_AFTER
        ):
            self._compare()

    def free_in(self, now: float) -> float:
        """Estimate how soon the leading workers can begin with what waits, in seconds.

        It is 0 if one of them is idle, since that one begins at once, and else their average.
        """
        if not self._free_at and self.leading:
            self._free_at = now
            if all(lane.batches for lane in self.leading):
                begins_at = [lane.begins_at(now) for lane in self.leading]
                self._free_at = sum(begins_at) / len(begins_at)
        return max(0.0, self._free_at - now)

    def answered_by(self, num: int, most: int, now: float) -> float:
        """Estimate when the leading workers will have answered `num` more instances.

        It is infinite if none of them is on time.
        """
        size = max(1, min(num, most))
        beginnings = sorted(
            (lane.begins_at(now), lane.costs.time_s(size, is_idle=False) / size)
            for lane in self.leading
            if now < lane.late_at
        )
        at, left, per_s = now, float(num), 0.0
        for begin, item_s in beginnings:
            done = per_s * (begin - at)
            if done >= left:
                break
            at, left = begin, left - done
            per_s += 1 / max(item_s, 1e-9)
        return at + left / per_s if per_s else inf

    def _compare(self) -> None:
        """Divide the workers into leading and lagging ones."""
        self._free_at = 0.0
        times_s = {id(lane): lane.costs.time_s(_COMPARED_AT, is_idle=False) for lane in self.open}
        known_s = [time_s for time_s in times_s.values() if time_s]
        fastest_s = max(_LEAST_S / _LAGS_FROM, min(known_s, default=0.0))
        for lane in self.open:
            bound = _LAGS_UNTIL if lane.is_lagging else _LAGS_FROM
            lane.is_lagging = times_s[id(lane)] > bound * fastest_s
        self.leading = [lane for lane in self.open if not lane.is_lagging]
        self.lagging = [lane for lane in self.open if lane.is_lagging]
        self.lagging.sort(key=lambda lane: times_s[id(lane)])

    def held(self) -> Iterator[Instance]:
        """Yield all instances that workers hold."""
        for lane in (*self.open, *self._leaving):
            for batch in lane.batches:
                yield from batch


class TurnTaker(Protocol):
    """Takes turns at devices with other models."""

    def ask(self) -> None:
        """Call `BatchScheduler.send_next` whenever it is this model's turn."""

    def begin(self, lane: Lane, batch: list[Instance], now: float) -> None:
        """Note that a worker was sent a batch."""

    def end(self, lane: Lane, batch: list[Instance], done: BatchDone | None, now: float) -> float:
        """Note that a worker has answered a batch, or is lost with it (None).

        Returns:
            The seconds for which the worker was idle before, waiting for its turn.
        """


class BatchScheduler:
    """Gives the workers of one model their batches."""

    def __init__(
        self,
        queue: Batcher[Instance],
        background: Batcher[Instance],
        lanes: Lanes,
        limit: SizeLimit,
        batch_wait_s: float,
        send: Callable[[Lane, int, float], None],
        send_last: Callable[[Lane, int, float], bool],
    ) -> None:
        """Start with nothing due.

        Args:
            queue: The waiting instances.
            background: Those that wait until nothing else does.
            lanes: The workers.
            limit: How large batches may be.
            batch_wait_s: How long an idle worker waits for a batch to fill.
            send: Sends a worker a batch from the front of the queue; takes the lane, the most
                instances and the time.
            send_last: Sends a worker a batch from the end of the queue, of instances that have the
                time for it; returns whether there were any.
        """
        self.prepare_s = 0.0
        """The time that it took to prepare the last batch."""
        self.lanes = lanes
        self.turns: TurnTaker | None = None
        """Says when batches may be sent, while other models contend for a device."""
        self._queue = queue
        self._background = background
        self._limit = limit
        self._batch_wait_s = batch_wait_s
        self._send = send
        self._send_last = send_last
        self._loop = asyncio.get_running_loop()
        self.is_due = False
        """It runs in the next turn of the loop."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0

    def soon(self) -> None:
        """Send what can be sent, after all that arrives in this turn of the loop is queued."""
        if not self.is_due and self.num_waiting:
            self.is_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self.is_due = False
        lanes = self.lanes
        if self.turns is not None:
            if self.num_waiting:
                self.turns.ask()
            return
        while self.num_waiting and self.send_next(lanes.leading, lanes.lagging):
            pass

    @property
    def num_waiting(self) -> int:
        """Instances that wait, those in the background too."""
        return self._queue.num_waiting + self._background.num_waiting

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
            return self._give_background(idle or [lane for lane in lagging if not lane.batches])
        if idle:
            if self._waits_for_more(now):
                return False
            self._give_idle(idle[:most], now)
            return True
        if lagging and self._give_rest(lagging, now):
            return True
        lane = self._next_busy(leading, now)
        if lane is None:
            return False
        self._send(lane, self._limit.now, now)
        return True

    def _give_background(self, idle: Sequence[Lane]) -> bool:
        """Give an idle worker a batch of the background.

        A worker holds one of these at most, so that nobody else waits longer than it takes.
        """
        if idle:
            self._send(idle[0], self._limit.now, time.monotonic())
        return bool(idle)

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
        """Give a lagging worker what it can answer no later than the leading ones would.

        If none of the leading workers is on time, it gets what it can answer in as long as they
        have been overdue: little if they were only held up, and more and more if they do not come
        back.

        Returns:
            Whether it was given anything.
        """
        lanes, most = self.lanes, self._limit.now
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

    def _waits_for_more(self, now: float) -> bool:
        """Return whether `batch_wait_ms` still holds the next batch back, and set a timer if so."""
        if not self._batch_wait_s or self._queue.num_waiting >= self._limit.now:
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
        if self._queue.num_waiting >= self._limit.now:
            return lane
        if len(lane.batches) > 1 or lane.ends_at - lane.busy_since < _OVERLAP_PAYS_S:
            return None
        left_s = lane.ends_at - now - self.prepare_s - EARLY_S
        if left_s <= 0:
            return lane
        self.wake_in(left_s)
        return None

    def wake_in(self, delay_s: float) -> None:
        """Look again after this long, or sooner."""
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
