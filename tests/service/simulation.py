"""Poisson arrivals at a real dispatcher, whose workers cost what a curve says, in virtual time.

A minute of load costs some hundred milliseconds, and the same seed gives the same figures.
"""

import asyncio
import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from inferpool.service.errors import DeadlineExceededError, OverloadedError
from inferpool.service.parts.objective import Objective
from inferpool.service.queue.admission import Admission
from inferpool.service.queue.batch_sizing import AUTO_SIZE
from inferpool.service.queue.dispatcher import Dispatcher
from inferpool.service.queue.instance import Instance
from inferpool.service.queue.quarantine import Quarantine
from inferpool.service.telemetry.metrics import ModelMetrics
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.messages import ItemRef
from tests.fakes import FakeWorker, ref_to
from tests.virtual_time import run_in_virtual_time

CostCurve = Callable[[int], float]
"""Seconds of a batch, by its size."""


class SimulatedWorker(FakeWorker):
    """Computes one batch after another, each for about as long as the curve says."""

    def __init__(self, cost: CostCurve, slot: int, noise: float) -> None:
        super().__init__(credit=2)
        self.id = type(self.id)(model="m", slot=slot)
        self._cost = cost
        self._noise = noise
        self._chance = random.Random(slot)
        self.computed: list[int] = []
        """Sizes of its batches."""

    def run(self, items: Sequence[ItemRef]):
        future = super().run(items)
        if len(self.batches) == 1:
            self._begin()
        return future

    def _begin(self) -> None:
        size = len(self.batches[0][0])
        took_s = self._cost(size) * self._chance.uniform(1 - self._noise, 1 + self._noise)
        asyncio.get_running_loop().call_later(took_s, self._end)
        self.computed.append(size)

    def _end(self) -> None:
        if self.is_gone:
            return
        self.answer()
        if self.batches:
            self._begin()


class SimulatedPipeline(SimulatedWorker):
    """Has two stages that take half of the time each and work on two batches at once."""

    def __init__(self, cost: CostCurve, slot: int, noise: float) -> None:
        super().__init__(cost, slot, noise)
        self.credit = 3
        self._free_at = [0.0, 0.0]
        """Moment when each stage has done what it was given."""
        self._out_at = [0.0, 0.0]
        """Moments when the last two batches are out."""

    def run(self, items: Sequence[ItemRef]):
        future = FakeWorker.run(self, items)
        loop = asyncio.get_running_loop()
        at = max(loop.time(), self._out_at[0])
        for stage, free_at in enumerate(self._free_at):
            took_s = self._cost(len(items)) / 2 * self._chance.uniform(1 - self._noise, 1)
            self._free_at[stage] = at = max(at, free_at) + took_s
        self._out_at = [self._out_at[1], at]
        self.computed.append(len(items))
        loop.call_at(at, self.answer)
        return future


@dataclass
class Stream:
    """Calls of one kind, and the figures of those that came after the warm-up."""

    rate: float
    """Calls per second, at random moments."""
    timeout_s: float = 30.0
    priority: int = 5
    burst: int = 1
    """Calls that arrive at once."""
    caller: int = 0
    """Number of the key that they come with."""
    from_s: float = 0.0
    until_s: float = float("inf")
    draw_timeout_s: Callable[[random.Random], float] | None = None
    """Draws a timeout for each call, instead of `timeout_s`."""
    num_asked: int = 0
    num_refused: int = 0
    num_missed: int = 0
    """Calls whose deadline passed."""
    latencies_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    """Length of the load after the warm-up."""
    workers: Sequence[SimulatedWorker] = ()
    """Workers that have served it."""

    @property
    def num_answered(self) -> int:
        return len(self.latencies_s)

    @property
    def num_admitted(self) -> int:
        return self.num_answered + self.num_missed

    @property
    def good_per_s(self) -> float:
        return self.num_answered / self.seconds

    @property
    def p99_ms(self) -> float:
        return 1000 * sorted(self.latencies_s)[int(0.99 * len(self.latencies_s))]

    @property
    def sizes(self) -> list[int]:
        return [size for worker in self.workers for size in worker.computed]

    def note(self, instance: Instance, *, counts: bool) -> None:
        if isinstance(instance.exception(), DeadlineExceededError):
            self.num_missed += counts
        elif counts:
            self.latencies_s.append(instance.dispatcher.loop.time() - instance.arrived)


def simulate(
    cost: CostCurve | Sequence[CostCurve],
    rate: float,
    seconds: float = 20.0,
    *,
    timeouts_s: Callable[[random.Random], float] | None = None,
    burst: int = 1,
    warm_s: float = 3.0,
    noise: float = 0.1,
    **changes: Any,
) -> Stream:
    """Serve one stream, and return it; see `simulate_mix`."""
    stream = Stream(rate, burst=burst, draw_timeout_s=timeouts_s)
    simulate_mix([stream], cost, seconds, warm_s=warm_s, noise=noise, **changes)
    return stream


def simulate_mix(
    streams: Sequence[Stream],
    cost: CostCurve | Sequence[CostCurve],
    seconds: float,
    *,
    num_workers: int = 2,
    noise: float = 0.0,
    warm_s: float = 2.0,
    seed: int = 0,
    max_queue_length: int = 1024,
    max_batch_size: int | None = 8,
    key_share: float = 1.0,
    job_share: float = 0.0,
    objective_s: float = 0.0,
    worker_type: type[SimulatedWorker] = SimulatedWorker,
    is_accelerated: bool = False,
    lost_at: float | None = None,
    back_after_s: float = 3.0,
) -> None:
    """Serve streams for some seconds after a warm-up.

    Args:
        cost: Cost of a batch; of several, each is that of one worker.
        max_batch_size: The most instances of a batch; None: what pays.
        noise: How much the cost of a batch varies, up or down, as a share of it.
        lost_at: Moment when one of the workers dies, to come back `back_after_s` later.
    """
    costs = [cost] * num_workers if callable(cost) else cost

    async def send(stream: Stream, dispatcher: Dispatcher, began: float, number: int) -> None:
        loop = asyncio.get_running_loop()
        chance = random.Random(f"{seed} {number}" if len(streams) > 1 else seed)
        due = began + stream.from_s
        end = began + min(stream.until_s, warm_s + seconds)
        while (due := due + chance.expovariate(stream.rate / stream.burst)) < end:
            await asyncio.sleep(due - loop.time())
            counts = due >= began + warm_s
            for _ in range(stream.burst):
                draw = stream.draw_timeout_s
                timeout_s = draw(chance) if draw else stream.timeout_s
                stream.num_asked += counts
                try:
                    ref = ref_to(b"x", timeout_s, stream.priority, caller=stream.caller)
                    instance = dispatcher.submit(ref, [b"x"])
                except OverloadedError:
                    stream.num_refused += counts
                    continue
                instance.add_done_callback(functools.partial(stream.note, counts=counts))

    async def lose(dispatcher: Dispatcher, worker: SimulatedWorker, at: float) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(at - loop.time())
        dispatcher.detach(worker)
        worker.die(started=False)
        await asyncio.sleep(back_after_s)
        dispatcher.attach(worker_type(costs[0], worker.id.slot, noise))

    async def go() -> None:
        metrics = ModelMetrics("m")
        arena = Arena(8 * 2**20)
        dispatcher = Dispatcher(
            name="m",
            arena=arena,
            admission=Admission(
                max_queue_length=max_queue_length,
                max_batch_size=max_batch_size or AUTO_SIZE,
                rejected=metrics.rejected,
                key_share=key_share,
            ),
            quarantine=Quarantine(name="m", duration_s=60.0),
            metrics=metrics,
            max_batch_size=max_batch_size,
            job_share=job_share,
        )
        if objective_s:
            objective = Objective(dispatcher.scheduler, objective_s, model="m")
            dispatcher.scheduler.policies.append(objective)
        workers = [worker_type(each, slot, noise) for slot, each in enumerate(costs)]
        for worker in workers:
            worker.ready = msgspec.structs.replace(worker.ready, is_accelerated=is_accelerated)
            dispatcher.attach(worker)
        for stream in streams:
            stream.seconds, stream.workers = seconds, workers
        began = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            for number, stream in enumerate(streams):
                group.create_task(send(stream, dispatcher, began, number))
            if lost_at is not None:
                group.create_task(lose(dispatcher, workers[0], began + lost_at))
        await dispatcher.drain(1000.0)
        await asyncio.sleep(0)
        arena.close()

    run_in_virtual_time(go(), limit_s=1e9)
