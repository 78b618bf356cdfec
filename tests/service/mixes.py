"""Several kinds of calls at once, at a real dispatcher in virtual time; what becomes of each."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from inferpool.service.errors import OverloadedError
from inferpool.service.queue.dispatcher import Dispatcher
from inferpool.service.queue.instance import Instance
from inferpool.workers.arena import Arena
from tests.fakes import ref_to
from tests.service.pools import make_dispatcher
from tests.service.simulation import SimulatedWorker
from tests.virtual_time import run_in_virtual_time


@dataclass
class Stream:
    """Calls of one kind, and what became of those that came after the warm-up."""

    rate: float
    timeout_s: float
    priority: int = 5
    burst: int = 1
    """How many arrive at once."""
    from_s: float = 0.0
    until_s: float = float("inf")
    num_asked: int = 0
    num_missed: int = 0
    latencies_s: list[float] = field(default_factory=list)

    @property
    def num_answered(self) -> int:
        return len(self.latencies_s)

    @property
    def num_admitted(self) -> int:
        return self.num_answered + self.num_missed


def simulate_mix(
    streams: Sequence[Stream],
    cost: Callable[[int], float],
    seconds: float,
    *,
    num_workers: int = 2,
    noise: float = 0.0,
    warm_s: float = 2.0,
    seed: int = 0,
    max_queue_length: int = 1024,
    lost_at: float | None = None,
    back_after_s: float = 3.0,
) -> None:
    """Serve the streams for so long.

    Args:
        lost_at: When one of the workers dies, to come back a while later.
    """

    async def send(stream: Stream, dispatcher: Dispatcher, began: float, number: int) -> None:
        loop = asyncio.get_running_loop()
        chance = random.Random(f"{seed} {number}")
        due = began + stream.from_s
        while (due := due + chance.expovariate(stream.rate / stream.burst)) < began + min(
            stream.until_s, warm_s + seconds
        ):
            await asyncio.sleep(due - loop.time())
            for _ in range(stream.burst):
                counts = due >= began + warm_s
                stream.num_asked += counts
                ref = ref_to(b"x", stream.timeout_s, stream.priority)
                try:
                    instance = dispatcher.submit(ref, [b"x"])
                except OverloadedError:
                    continue
                instance.add_done_callback(lambda done, counts=counts: note(stream, done, counts))

    def note(stream: Stream, instance: Instance, counts: bool) -> None:
        if instance.exception():
            stream.num_missed += counts
        elif counts:
            stream.latencies_s.append(instance.dispatcher.loop.time() - instance.arrived)

    async def lose(dispatcher: Dispatcher, worker: SimulatedWorker, at: float) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(at - loop.time())
        dispatcher.detach(worker)
        worker.die(started=False)
        await asyncio.sleep(back_after_s)
        dispatcher.attach(SimulatedWorker(cost, worker.id.slot, noise))

    async def go() -> None:
        arena = Arena(8 * 2**20)
        dispatcher = make_dispatcher(arena, max_queue_length=max_queue_length, max_batch_size=8)
        workers = [SimulatedWorker(cost, slot, noise) for slot in range(num_workers)]
        for worker in workers:
            dispatcher.attach(worker)
        loop = asyncio.get_running_loop()
        began = loop.time()
        tasks = [
            asyncio.create_task(send(stream, dispatcher, began, number))
            for number, stream in enumerate(streams)
        ]
        if lost_at is not None:
            tasks.append(asyncio.create_task(lose(dispatcher, workers[0], began + lost_at)))
        await asyncio.gather(*tasks)
        await dispatcher.drain(1000.0)
        await asyncio.sleep(0)
        arena.close()

    run_in_virtual_time(go(), limit_s=1e9)
