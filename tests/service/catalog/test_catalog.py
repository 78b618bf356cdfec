"""Versions that come and go over fake workers, and calls that find theirs."""

import asyncio
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from inferpool.service.api.exchange import Predict
from inferpool.service.api.web import App
from inferpool.service.catalog.catalog import Catalog, ModelVersion
from inferpool.service.parts.swap.room import Room
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.settings import Settings
from inferpool.service.settings.state import StateFile
from inferpool.service.telemetry.metrics import Metrics
from inferpool.workers.host.device_memory import HOST
from inferpool.workers.host.devices import find_host
from inferpool.workers.shared.arena import Arena
from tests.fakes import FakeEngine, FakeWorker, ref_to
from tests.service.api.fakes import as_app
from tests.service.pools import SilentAnnouncer, until

ROOM = Room(lambda model, placement: {HOST: 1}, lambda: {HOST: 1 << 40}, lambda worker: {HOST: 0})
ECHO = ModelSettings(source="echo", replicas=1)


class Kept:
    """A catalog over fake workers, and what it has told."""

    def __init__(
        self, arena: Arena, state: StateFile | None = None, engine: FakeEngine | None = None
    ) -> None:
        self.state = state = state or StateFile(None, {"m": ECHO})
        self.metrics = Metrics([*state.models], {})
        self.engine = engine or FakeEngine()
        self.num_changes = 0
        self.are_fronts_slow = False
        self.told = asyncio.Event()
        self.catalog = Catalog(
            Settings(models=state.models.copy(), default_model="m"),
            find_host(""),
            self.metrics,
            SilentAnnouncer(),
            cache_dir="/nowhere",
            on_change=self._note,
            until_known=self._until_known,
            state=state,
        )
        self.catalog.start(self.engine, arena)

    async def ready(self, name: str = "m", **settings: object) -> ModelVersion:
        """Load another version, and return it once its worker is ready."""
        version = self.catalog.load(name, ECHO.model_copy(update=settings))
        await until(lambda: version.pool.is_ready)
        return version

    def worker_of(self, version: ModelVersion) -> FakeWorker:
        (slot,) = version.pool.slots
        assert isinstance(slot.handle, FakeWorker)
        return slot.handle

    def _note(self) -> None:
        self.num_changes += 1

    async def _until_known(self) -> None:
        if self.are_fronts_slow:
            await self.told.wait()


@pytest.fixture
def keep(arena: Arena) -> Callable[[], Kept]:
    return lambda: Kept(arena)


async def asked(
    predict: Predict, path: str, content: bytes | AsyncIterator[bytes] = b"x", **headers: str
) -> httpx.Response:
    transport = httpx.ASGITransport(app=as_app(predict))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
        headers["content-type"] = "application/octet-stream"
        return await client.post(path, content=content, headers=headers)


def answering(kept: Kept) -> None:
    """Let every worker answer all that it gets from now on with its version."""

    def answer() -> None:
        for worker in kept.engine.started:
            while worker.batches:
                worker.answer([b"%d" % worker.id.version] * worker.sizes[0])
        loop.call_later(0.001, answer)

    loop = asyncio.get_running_loop()
    loop.call_soon(answer)


async def two_versions(kept: Kept) -> tuple[Catalog, Predict, ModelVersion, ModelVersion]:
    """Return the one that serves and another one, whose workers answer, and the way to them."""
    catalog = kept.catalog
    await until(lambda: catalog.serving["m"].is_ready)
    answering(kept)
    second = await kept.ready()
    return catalog, Predict(catalog.entries, default="m"), catalog.version("m"), second


async def test_calls_get_to_the_version_that_they_name_or_that_serves(keep):
    kept = keep()
    catalog = kept.catalog
    predict = Predict(catalog.entries, default="m")
    await until(lambda: catalog.serving["m"].is_ready)
    answering(kept)
    second = await kept.ready(max_batch_size=3)
    assert (await asked(predict, "/predict/m/versions/2")).status_code == 404
    catalog.serve(second)
    for path, headers, version in (
        ("/predict", {}, 2),
        ("/predict/m", {}, 2),
        ("/predict/m/versions/1", {}, 1),
        ("/predict/m", {"X-Model-Version": "1"}, 1),
        ("/predict", {"X-Model-Version": "2"}, 2),
        ("/predict/m/versions/1", {"X-Model-Version": "1"}, 1),
    ):
        answer = await asked(predict, path, **headers)
        assert answer.json() == {"predictions": [version]}
        assert answer.headers["x-model-version"] == str(version)
    for path, headers, text in (
        ("/predict/m/versions/3", {}, "m has no version '3' loaded; there are: 1, 2"),
        ("/predict/m/versions/", {}, "no model is called 'm/versions'; there are: m"),
        ("/predict/m", {"X-Model-Version": "no"}, "m has no version 'no' loaded; there are: 1, 2"),
        ("/predict/m/versions/1", {"X-Model-Version": "2"}, "and X-Model-Version for another one"),
        ("/predict/n", {"X-Model-Version": "1"}, "no model is called 'n'; there are: m"),
    ):
        answer = await asked(predict, path, **headers)
        assert answer.status_code == 404
        assert text in answer.json()["detail"]
    assert catalog.settings.models["m"].max_batch_size == 3


async def test_only_a_version_that_will_be_compared_measures_speed_before_it_is_ready(keep):
    kept = keep()
    await until(lambda: kept.catalog.serving["m"].is_ready)
    kept.metrics.add("n")
    versions = (kept.catalog.version("m"), await kept.ready("n"), await kept.ready("m"))
    measures = [version.pool.slots[0].config.measures_speed for version in versions]
    assert measures == [False, False, True]


async def test_a_version_that_is_unloaded_answers_what_it_has_and_gets_nothing_more(keep):
    kept = keep()
    catalog = kept.catalog
    first = catalog.version("m")
    await until(lambda: first.pool.is_ready)
    held = first.pool.submit(ref_to(b"x"), [b"x"])
    await until(lambda: kept.worker_of(first).batches)
    worker = kept.worker_of(first)
    catalog.serve(await kept.ready())
    kept.are_fronts_slow = True
    leaving = asyncio.create_task(catalog.unload(first, 10))
    await asyncio.sleep(0)
    assert "m/versions/1" not in catalog.entries
    late = first.pool.submit(ref_to(b"y"), [b"y"])  # from a front that does not know yet
    kept.told.set()
    await until(lambda: first.pool.is_draining)
    while worker.batches:
        worker.answer()
        await asyncio.sleep(0.001)
    await leaving
    for instance in (held, late):
        assert instance.result().value == b"%d" % instance.ref.offset
    assert worker.is_gone
    assert [version.number for version in catalog.versions("m")] == [2]
    assert kept.metrics.total("m").succeeded == 2


async def test_of_a_version_that_has_left_only_its_counts_are_kept(keep, monkeypatch):
    kept = keep()
    left: list[str] = []
    monkeypatch.setattr(SilentAnnouncer, "left", lambda self, workers: left.extend(workers))
    first = kept.catalog.version("m")
    await until(lambda: first.pool.is_ready)
    first.metrics.succeeded = 7
    kept.catalog.serve(await kept.ready())
    await kept.catalog.unload(first, 1)
    assert left == ["m/0"]
    assert kept.metrics.total("m").succeeded == 7
    assert first.metrics not in kept.metrics._parts["m"]


async def test_a_model_that_is_removed_answers_what_it_has_and_may_come_again(keep):
    kept = keep()
    catalog = kept.catalog
    await until(lambda: catalog.serving["m"].is_ready)
    held = catalog.serving["m"].submit(ref_to(b"x"), [b"x"])
    worker = kept.worker_of(catalog.version("m"))
    await until(lambda: worker.batches)
    leaving = asyncio.create_task(catalog.remove("m", 10))
    await asyncio.sleep(0)
    predict = Predict(catalog.entries, default="m")
    assert (await asked(predict, "/predict/m")).status_code == 404
    worker.answer([b"1"])
    await leaving
    assert held.result().value == b"1"
    assert (catalog.entries, catalog.loaded, catalog.settings.models) == ({}, {}, {})
    kept.metrics.add("m")
    again = await kept.ready()
    assert again.number == 2


async def test_a_call_for_the_default_model_that_was_removed_is_told_to_name_one(keep):
    kept = keep()
    kept.metrics.add("n")
    await until(lambda: kept.catalog.serving["m"].is_ready)
    kept.catalog.serve(await kept.ready("n"))
    await kept.catalog.remove("m", 1)
    predict = Predict(kept.catalog.entries, default="m")
    for path, said in (
        ("/predict", "the default model 'm' is not served now; name one in the path: n"),
        ("/predict/m", "no model is called 'm'; there are: n"),
    ):
        assert said in (await asked(predict, path)).json()["detail"]
    app = App(version="1", routers=[], guard=None)
    app.predict = predict
    assert "/predict" not in app.openapi()["paths"]
    app.predict = Predict(kept.catalog.entries, default="n")
    assert "/predict" in app.openapi()["paths"]


async def test_a_call_whose_version_goes_while_its_body_comes_is_for_the_one_that_serves(keep):
    catalog, predict, first, second = await two_versions(keep())

    async def body():
        yield b"x"
        catalog.serve(second)
        await catalog.unload(first, 10)

    answer = await asked(predict, "/predict", body())
    assert answer.json() == {"predictions": [2]}


async def test_a_canary_gets_its_share_of_the_calls_and_the_same_ids_each_time(keep):
    catalog, predict, first, second = await two_versions(keep())
    catalog.begin_canary(second, 0.25)

    async def versions(path: str = "/predict", num: int = 20) -> list[str]:
        ids = [f"call-{number}" for number in range(num)]
        answers = [await asked(predict, path, **{"X-Request-Id": id}) for id in ids]
        return [answer.headers["x-model-version"] for answer in answers]

    found = await versions(num=200)
    assert 35 <= found.count("2") <= 65
    assert await versions() == found[:20]
    assert set(found[:20]) == {"1", "2"}
    assert set(await versions("/predict/m/versions/1")) == {"1"}
    catalog.end_canary(second)
    assert set(await versions()) == {"1"}
    assert first.is_serving
    catalog.begin_canary(second, 0.0)
    assert set(await versions()) == {"1"}
    catalog.begin_canary(second, 1.0)
    assert set(await versions()) == {"2"}
    catalog.serve(second)
    assert first.canary is None
    assert set(await versions()) == {"2"}
    assert set(await versions("/predict/m/versions/1")) == {"1"}


async def test_all_instances_of_a_call_are_computed_by_one_version_of_a_canary(keep):
    kept = keep()
    catalog = kept.catalog
    predict = Predict(catalog.entries, default="m")
    await until(lambda: catalog.serving["m"].is_ready)
    answering(kept)
    catalog.begin_canary(await kept.ready(), 0.5)
    transport = httpx.ASGITransport(app=as_app(predict))  # type: ignore[arg-type]
    found = set()
    async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
        for number in range(30):
            headers = {"X-Request-Id": f"call-{number}"}
            body = {"instances": [1, 2, 3]}
            answer = await client.post("/predict", json=body, headers=headers)
            (version,) = set(answer.json()["predictions"])
            assert answer.headers["x-model-version"] == str(version)
            found.add(version)
    assert found == {1, 2}
