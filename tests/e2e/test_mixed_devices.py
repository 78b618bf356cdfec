"""Two real workers of one model, of which one is four times slower: who gets what."""

import asyncio
from dataclasses import replace

from inferpool.service.queue.admission import Admission
from inferpool.service.queue.dispatcher import Dispatcher
from inferpool.service.queue.quarantine import Quarantine
from inferpool.service.telemetry.metrics import ModelMetrics
from inferpool.workers.arena import Arena
from inferpool.workers.config import ModelConfig
from inferpool.workers.host.engine import WorkerId
from inferpool.workers.host.local import LocalEngine, start_forkserver
from tests.fakes import ref_to
from tests.workers.contract import config_of

_NUM = 400
_BATCH = 4
_FAST_S, _SLOW_S = 0.020, 0.080


async def _serve(arena: Arena) -> list[int]:
    """How many batches the fast worker computed, and how many the slow one."""
    engine = LocalEngine(arena)
    metrics = ModelMetrics("m")
    dispatcher = Dispatcher(
        name="m",
        arena=arena,
        admission=Admission(
            max_queue_length=_NUM, max_batch_size=_BATCH, rejected=metrics.rejected
        ),
        quarantine=Quarantine(name="m", duration_s=60.0),
        metrics=metrics,
        max_batch_size=_BATCH,
    )
    configs = [
        replace(
            config_of(), model=ModelConfig(name="m", source="echo", options={"delay_s": delay_s})
        )
        for delay_s in (_FAST_S, _SLOW_S)
    ]
    workers = await asyncio.gather(
        *(
            engine.start(WorkerId(model="m", slot=slot), config, lambda stage: None)
            for slot, config in enumerate(configs)
        )
    )
    try:
        for worker in workers:
            dispatcher.attach(worker)
        await asyncio.gather(*(dispatcher.submit(ref_to(b"x", 60), [b"x"]) for _ in range(_NUM)))
        return [worker.vitals().num_batches for worker in workers]
    finally:
        await asyncio.gather(*(worker.stop(1.0) for worker in workers))


def test_a_worker_four_times_as_fast_answers_about_four_times_as_much():
    start_forkserver()
    arena = Arena(1 << 20)
    try:
        fast, slow = asyncio.run(asyncio.wait_for(_serve(arena), 60))
    finally:
        arena.close()
    assert fast + slow >= _NUM / _BATCH
    assert 1.5 < fast / slow < 2 * _SLOW_S / _FAST_S  # on a busy machine both are slower, alike
