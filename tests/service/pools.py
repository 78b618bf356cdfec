"""A pool of workers that are played, for its tests."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from inferpool.models.spec import Placement
from inferpool.models.speed.names import SpeedReport
from inferpool.service.queue.admission import Admission
from inferpool.service.queue.dispatcher import Dispatcher
from inferpool.service.queue.pool import Announcer, Pool
from inferpool.service.queue.quarantine import Quarantine
from inferpool.service.telemetry.metrics import ModelMetrics
from inferpool.workers.arena import Arena
from inferpool.workers.config import ModelConfig, WorkerConfig
from inferpool.workers.host.engine import WorkerId
from inferpool.workers.host.supervisor import RestartPolicy
from tests.fakes import FakeEngine, FakeWorker, ref_to

CONFIG = WorkerConfig(
    model=ModelConfig(name="m", source="echo"), placement=Placement(devices=("cpu",))
)


class Silent:
    def progress(self, worker: str, stage: str) -> None: ...
    def ready(self, worker: str, seconds: float) -> None: ...
    def failed(self, worker: str, reason: str) -> None: ...


def pool_over(
    engine: FakeEngine,
    arena: Arena,
    announcer: Announcer | None = None,
    configs: Sequence[WorkerConfig] = (CONFIG,),
    **policy: int,
) -> Pool:
    metrics = ModelMetrics("m")
    dispatcher = Dispatcher(
        name="m",
        arena=arena,
        admission=Admission(max_queue_length=10, max_batch_size=1, rejected=metrics.rejected),
        quarantine=Quarantine(name="m", duration_s=60),
        metrics=metrics,
        max_batch_size=1,
    )
    return Pool(
        name="m",
        configs=configs,
        engine=engine,
        dispatcher=dispatcher,
        policy=RestartPolicy(**policy),
        metrics=metrics,
        announcer=announcer or Silent(),
        on_change=lambda: None,
    )


def submit(pool: Pool) -> "asyncio.Future[object]":
    return pool.submit(ref_to(b"x"), [b"x"])  # type: ignore[return-value]


def run(go: Callable[[Arena], Awaitable[None]]) -> None:
    arena = Arena(1 << 16)
    try:
        asyncio.run(asyncio.wait_for(go(arena), 10))
    finally:
        arena.close()


async def until(claim: Callable[[], object]) -> None:
    while not claim():  # noqa: ASYNC110  # the supervisor tells nobody but the pool
        await asyncio.sleep(0)


class Measuring(FakeEngine):
    """Its workers take a while for their presets, which is no part of what a restart would take."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, SpeedReport | None] = {}
        """By incarnation: the preset that it need not choose."""

    async def start(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> FakeWorker:
        worker = await super().start(id, config, on_progress)
        self.told[str(id)] = config.chosen
        speed = SpeedReport(preset="folded", gain=1.5, note="bf16 refused", measured_s=0.2)
        worker.ready = msgspec.structs.replace(worker.ready, speed=speed)
        await asyncio.sleep(0.2)
        return worker
