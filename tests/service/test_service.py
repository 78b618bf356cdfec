"""The service as a whole, over fake workers."""

import pytest

from inferpool.service.app import assemble
from inferpool.service.service import Part
from inferpool.service.settings.draft import read_keys
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.settings import Settings
from inferpool.service.telemetry.console import Console
from inferpool.workers.host.devices import find_host
from inferpool.workers.shared.errors import WorkerStartError
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
        admin_keys=read_keys("a-key-of-an-admin"),
    )
    engine = PartlyBrokenEngine()
    assembly = assemble(settings, find_host(""), Console(None), make_engine=lambda _: engine)
    service, changes = assembly.service, assembly.changes
    assert changes is not None
    service.start()
    await until(lambda: service.pools["m"].is_ready and service.pools["broken"].is_lost)
    assert service.report().ready
    changes.begin_remove("m")
    await changes.until_decided("m")
    assert not service.report().ready
    changes.begin_remove("broken")
    await changes.until_decided("broken")
    assert service.report().status == "unavailable"
    assert not service._lost.is_set()
    service.metrics.render()
    await assembly.live.next()
    await service.stop()


@pytest.mark.parametrize("has_jobs", [True, False])
def test_metrics_tell_of_the_service_and_of_jobs_where_these_are_kept(tmp_path, has_jobs: bool):
    settings = Settings(
        models={"m": ModelSettings(source="echo", replicas=1)},
        default_model="m",
        job_store=str(tmp_path / "jobs") if has_jobs else "none",
        cache_dir=str(tmp_path),
        state_file=str(tmp_path / "state.json"),
    )
    service = assemble(settings, find_host(""), Console(None)).service
    text = service.metrics.render()[0].decode()
    assert "\ninferpool_ready 0.0\n" in text
    assert ("\ninferpool_job_store_open 0.0\n" in text) is has_jobs
    assert ("\ninferpool_job_duration_seconds_count 0.0\n" in text) is has_jobs


async def test_a_part_that_fails_to_stop_does_not_keep_the_others_from_it(caplog):
    def fail() -> None:
        raise OSError("it is gone")

    echo = ModelSettings(source="echo", replicas=1)
    settings = Settings(models={"m": echo}, default_model="m", job_store="none")
    service = assemble(settings, find_host(""), Console(None)).service
    done = []
    first = Part(
        name="first",
        start=lambda: done.append("start"),
        begin_stop=lambda: done.append("begin_stop"),
        stop=lambda: done.append("stop"),
    )
    service.attach([first, Part(name="second", stop=fail)])
    service.start()
    await service.stop()
    assert done == ["start", "begin_stop", "stop"]
    assert "second: this did not stop in order" in caplog.text
    service.arena.close()
