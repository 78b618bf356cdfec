"""Contenders for a device: real dispatchers, and workers that take what a test says."""

import asyncio
import random
from collections.abc import Sequence

from inferpool.models.spec import Placement
from inferpool.service.parts.turns.gate import DeviceGate, GateMember
from inferpool.service.queue.instance import Instance
from inferpool.workers.shared.arena import Arena
from tests.fakes import ref_to
from tests.service.pools import make_dispatcher
from tests.service.simulation import SimulatedWorker

CORE = Placement(devices=("cpu",))
GPU = Placement(devices=("cuda:0",), visible=("GPU-a",))
OTHER_GPU = Placement(devices=("cuda:0",), visible=("GPU-b",))
BOTH_GPUS = Placement(devices=("cuda:0", "cuda:1"), visible=("GPU-a", "GPU-b"), split="tensor")


class Contender:
    """A model whose workers take `item_s` for each instance of a batch."""

    def __init__(
        self,
        gate: DeviceGate,
        arena: Arena,
        item_s: float = 0.01,
        *,
        model: str = "m",
        share: float = 1.0,
        placements: Sequence[Placement] = (CORE, CORE),
        credit: int = 2,
        priority: int = 5,
        job_share: float = 0.0,
    ) -> None:
        self.dispatcher = make_dispatcher(arena, max_queue_length=10_000, job_share=job_share)
        self.priority = priority
        self.item_s = item_s
        self.latencies_s: list[float] = []
        self.num_failed = 0
        self.is_over = False
        self.workers = [self.attach(slot, credit) for slot in range(len(placements))]
        self.member: GateMember = gate.join(
            self.dispatcher.scheduler, model=model, share=share, placements=placements
        )

    def attach(self, slot: int, credit: int = 2) -> SimulatedWorker:
        worker = SimulatedWorker(lambda size: size * self.item_s, slot, 0.1)
        worker.credit = credit
        self.dispatcher.attach(worker)
        return worker

    @property
    def is_gated(self) -> bool:
        return bool(self.dispatcher.scheduler.policies)

    @property
    def busy_s(self) -> float:
        """The time that its workers were computing what has been answered."""
        return len(self.latencies_s) * self.item_s

    @property
    def p99_s(self) -> float:
        return sorted(self.latencies_s)[int(0.99 * len(self.latencies_s))]

    def check_batches(self) -> None:
        assert all(0 not in worker.computed for worker in self.workers), "a batch was empty"

    def submit(self, timeout_s: float = 1000.0) -> Instance:
        instance = self.dispatcher.submit(ref_to(b"x", timeout_s, self.priority), [b"x"])
        instance.add_done_callback(self._note)
        return instance

    def _note(self, instance: Instance) -> None:
        if instance.cancelled() or instance.exception():
            self.num_failed += 1
        else:
            self.latencies_s.append(asyncio.get_running_loop().time() - instance.arrived)

    def flood(self, num: int = 64) -> None:
        """Keep so many waiting until `is_over`."""

        def again(_: object) -> None:
            if not self.is_over:
                self.submit().add_done_callback(again)

        for _ in range(num):
            again(None)

    async def ask_at_random(self, rate: float, seconds: float) -> None:
        chance, loop = random.Random(1), asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end:
            await asyncio.sleep(chance.expovariate(rate))
            self.submit()


async def compete(*contenders: Contender, seconds: float = 10.0) -> None:
    """Let all be flooded for some time, and answer what is left."""
    for each in contenders:
        each.flood()
    await asyncio.sleep(seconds)
    await end(*contenders)


async def end(*contenders: Contender) -> None:
    for each in contenders:
        each.is_over = True
    figures = [list(each.latencies_s) for each in contenders]
    for each in contenders:
        await each.dispatcher.drain(10.0)
    for each, latencies_s in zip(contenders, figures, strict=True):
        each.latencies_s = latencies_s  # what came after the end does not count
        each.check_batches()
