"""Dispatchers and pools whose workers are fakes."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from inferpool.models.spec import Placement
from inferpool.models.speed_names import SpeedReport
from inferpool.service.queue.admission import Admission
from inferpool.service.queue.dispatcher import Dispatcher
from inferpool.service.queue.pool import Pool
from inferpool.service.queue.quarantine import Quarantine
from inferpool.service.telemetry.metrics import ModelMetrics
from inferpool.workers.host.engine import WorkerId
from inferpool.workers.host.restart_policy import RestartPolicy
from inferpool.workers.host.shared_check import SharedCheck
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.config import ModelConfig, WorkerConfig
from tests.fakes import FakeEngine, FakeWorker, ref_to

CONFIG = WorkerConfig(
    model=ModelConfig(name="m", source="echo"), placement=Placement(devices=("cpu",))
)


def make_dispatcher(
    arena: Arena,
    metrics: ModelMetrics | None = None,
    *,
    max_queue_length: int = 100,
    max_batch_size: int = 4,
    quarantine_s: float = 60.0,
    batch_wait_ms: float = 0.0,
    key_share: float = 1.0,
    job_share: float = 0.0,
) -> Dispatcher:
    metrics = metrics or ModelMetrics("m")
    admission = Admission(
        max_queue_length=max_queue_length,
        max_batch_size=max_batch_size,
        rejected=metrics.rejected,
        key_share=key_share,
    )
    return Dispatcher(
        name=metrics.name,
        arena=arena,
        admission=admission,
        quarantine=Quarantine(name="m", duration_s=quarantine_s),
        metrics=metrics,
        max_batch_size=max_batch_size,
        batch_wait_ms=batch_wait_ms,
        job_share=job_share,
    )


class SilentAnnouncer:
    def planned(self, plan: Sequence[tuple[str, str]]) -> None: ...
    def left(self, workers: Sequence[str]) -> None: ...
    def progress(self, worker: str, stage: str) -> None: ...
    def ready(self, worker: str, seconds: float) -> None: ...
    def failed(self, worker: str, reason: str) -> None: ...


def make_pool(
    engine: FakeEngine,
    arena: Arena,
    announcer: SilentAnnouncer | None = None,
    configs: Sequence[WorkerConfig] = (CONFIG,),
    name: str = "m",
) -> Pool:
    metrics = ModelMetrics(name)
    return Pool(
        source="echo",
        configs=configs,
        check=SharedCheck(engine.start),
        dispatcher=make_dispatcher(arena, metrics, max_queue_length=10, max_batch_size=1),
        policy=RestartPolicy(),
        announcer=announcer or SilentAnnouncer(),  # type: ignore[arg-type]
        on_change=lambda: None,
    )


async def ready_pool(engine: FakeEngine, arena: Arena, num_workers: int = 1, **config: str) -> Pool:
    """Start a pool, and return it once all its workers are ready."""
    pool = make_pool(engine, arena, configs=[replace(CONFIG, **config)] * num_workers)
    pool.start()
    await until(lambda: all(slot.handle for slot in pool.slots))
    return pool


def submit(pool: Pool) -> "asyncio.Future[object]":
    return pool.submit(ref_to(b"x"), [b"x"])  # type: ignore[return-value]


async def until(is_true: Callable[[], object]) -> None:
    while not is_true():  # noqa: ASYNC110  # the supervisor reports only to the pool
        await asyncio.sleep(0)


class MeasuringEngine(FakeEngine):
    """Its workers measure presets for a while, which is not part of their load time."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, SpeedReport | None] = {}
        """The preset that each incarnation need not choose."""

    async def start(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> FakeWorker:
        worker = await super().start(id, config, on_progress)
        self.told[str(id)] = config.chosen
        speed = SpeedReport(preset="folded", gain=1.5, note="bf16 refused", measured_s=0.2)
        worker.ready = msgspec.structs.replace(worker.ready, speed=speed)
        await asyncio.sleep(0.2)
        return worker
