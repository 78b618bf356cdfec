"""The service as a whole, over fake workers."""

from inferpool.service.service import Service
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.settings import Settings
from inferpool.service.telemetry.console import Console
from inferpool.service.telemetry.metrics import Metrics
from inferpool.workers.errors import WorkerStartError
from inferpool.workers.host.devices import find_host
from tests.fakes import FakeEngine
from tests.service.pools import until


class PartlyBrokenEngine(FakeEngine):
    """It cannot start workers of the model "broken"."""

    async def start(self, id, config, on_progress):
        if id.model == "broken":
            raise WorkerStartError("there is no such file", permanent=True)
        return await super().start(id, config, on_progress)

    async def close(self) -> None: ...

    def forkserver_vitals(self) -> None: ...


async def test_a_service_whose_last_good_model_is_removed_stays_up(tmp_path):
    echo = ModelSettings(source="echo", replicas=1)
    settings = Settings(
        models={"m": echo, "broken": echo},
        default_model="m",
        speed_search=False,
        cache_dir=str(tmp_path),
        state_file=str(tmp_path / "state.json"),
    )
    engine = PartlyBrokenEngine()
    metrics = Metrics(settings.models, {})
    service = Service(settings, find_host(""), metrics, Console(None), make_engine=lambda _: engine)
    service.start()
    await until(lambda: service.pools["m"].is_ready and service.pools["broken"].is_lost)
    assert service.report().ready
    service.changes.begin_remove("m")
    await service.changes.until_decided("m")
    assert not service.report().ready
    service.changes.begin_remove("broken")
    await service.changes.until_decided("broken")
    assert service.report().status == "unavailable"
    assert not service._lost.is_set()
    metrics.render()
    await service.live.next()
    await service.stop()
