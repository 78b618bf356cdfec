"""Poisson arrivals at a real dispatcher, whose workers cost what a curve says, in virtual time.

A minute of load costs some hundred milliseconds, and the same seed gives the same figures.
"""

import asyncio
import functools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from inferpool.service.errors import DeadlineExceededError, OverloadedError
from inferpool.service.queue.admission import Admission
from inferpool.service.queue.dispatcher import Dispatcher
from inferpool.service.queue.instance import Instance
from inferpool.service.queue.objective import Objective, ObjectiveAdmission
from inferpool.service.queue.quarantine import Quarantine
from inferpool.service.telemetry.metrics import ModelMetrics
from inferpool.workers.arena import Arena
from inferpool.workers.messages import ItemRef
from tests.fakes import FakeWorker, ref_to
from tests.virtual_time import VirtualLoop


class SimulatedWorker(FakeWorker):
    """Computes one batch after another, each for about as long as the curve says."""

    def __init__(self, cost: Callable[[int], float], slot: int, noise: float) -> None:
        super().__init__(credit=2)
        self.id = type(self.id)(model="m", slot=slot)
        self._cost = cost
        self._noise = noise
        self._chance = random.Random(slot)
        self.computed: list[int] = []
        """The sizes of its batches."""

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
    """Has two stages, each for half of the time, and as many batches in them at once."""

    def __init__(self, cost: Callable[[int], float], slot: int, noise: float) -> None:
        super().__init__(cost, slot, noise)
        self.credit = 3
        self._free_at = [0.0, 0.0]
        """When each stage has done what it was given."""
        self._out_at = [0.0, 0.0]
        """When the last two batches are out."""

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
class Outcome:
    """What became of the requests, without those of the first seconds."""

    latencies_s: list[float] = field(default_factory=list)
    num_missed: int = 0
    """Deadlines."""
    num_refused: int = 0
    seconds: float = 0.0
    sizes: list[int] = field(default_factory=list)
    shares: list[int] = field(default_factory=list)
    """Requests that each worker has computed."""

    @property
    def p99_ms(self) -> float:
        return 1000 * sorted(self.latencies_s)[int(0.99 * len(self.latencies_s))]

    @property
    def good_per_s(self) -> float:
        return len(self.latencies_s) / self.seconds


def simulate(
    cost: Callable[[int], float] | Sequence[Callable[[int], float]],
    rate: float,
    seconds: float = 20.0,
    *,
    monkeypatch: pytest.MonkeyPatch,
    timeouts_s: Callable[[random.Random], float] = lambda chance: 30.0,
    objective_s: float = 0.0,
    num_workers: int = 2,
    warm_s: float = 3.0,
    noise: float = 0.1,
    seed: int = 0,
    burst: int = 1,
    worker_type: type[SimulatedWorker] = SimulatedWorker,
    **settings: float,
) -> Outcome:
    """Serve requests that arrive at random, `rate` a second on average.

    Args:
        cost: What a batch of a size takes; of several, each is that of one worker.
        burst: How many arrive at once.
    """
    outcome = Outcome(seconds=seconds)
    costs = [cost] * num_workers if callable(cost) else cost

    async def go() -> None:
        metrics = ModelMetrics("m")
        arena = Arena(4 * 2**20)
        max_batch_size = int(settings.pop("max_batch_size", 8))
        objective = Objective(objective_s, model="m") if objective_s else None
        kind = functools.partial(ObjectiveAdmission, objective) if objective else Admission
        admission = kind(
            max_queue_length=1024, max_batch_size=max_batch_size, rejected=metrics.rejected
        )
        dispatcher = Dispatcher(
            name="m",
            arena=arena,
            admission=admission,
            quarantine=Quarantine(name="m", duration_s=60.0),
            metrics=metrics,
            max_batch_size=max_batch_size,
            objective=objective,
            **settings,
        )
        workers = [worker_type(each, slot, noise) for slot, each in enumerate(costs)]
        for worker in workers:
            dispatcher.attach(worker)
        loop = asyncio.get_running_loop()
        chance = random.Random(seed)
        began = due = loop.time()
        number = -1
        while due < began + warm_s + seconds:
            if (number := number + 1) % burst == 0:
                due += chance.expovariate(rate / burst)
                await asyncio.sleep(due - loop.time())
            timeout_s = timeouts_s(chance)
            counts = due >= began + warm_s
            try:
                instance = dispatcher.submit(ref_to(b"x", timeout_s), [b"x"])
            except OverloadedError:
                outcome.num_refused += counts
                continue
            if counts:
                instance.add_done_callback(note)
            else:
                instance.add_done_callback(lambda done: done.exception())
        await dispatcher.drain(60.0)
        await asyncio.sleep(0)
        outcome.sizes = [size for worker in workers for size in worker.computed]
        outcome.shares = [sum(worker.computed) for worker in workers]
        arena.close()

    def note(instance: Instance) -> None:
        if isinstance(instance.exception(), DeadlineExceededError):
            outcome.num_missed += 1
        else:
            outcome.latencies_s.append(instance.dispatcher.loop.time() - instance.arrived)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner, monkeypatch.context() as patch:
        loop = runner.get_loop()
        patch.setattr(time, "monotonic", loop.time)
        runner.run(go())
    return outcome
