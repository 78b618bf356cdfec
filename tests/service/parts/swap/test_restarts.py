"""Changes over fake workers, and what the next start of the service serves."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from inferpool.service.errors import NotSavedError, VersionRefusedError
from inferpool.service.parts.swap.changes import Changes
from inferpool.service.settings.state import StateFile
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.errors import WorkerStartError
from tests.service.catalog.test_catalog import ECHO, ROOM, Kept, answering
from tests.service.pools import until

FORCED = {"policy": "force", "rollback_s": 0}


class Life:
    """One life of a service that keeps its changes in a file."""

    def __init__(self, arena: Arena, path: Path) -> None:
        self.state = StateFile(path, {"m": ECHO})
        self.state.read()
        self.kept = kept = Kept(arena, self.state)
        self.catalog = kept.catalog
        self.changes = Changes(kept.catalog, kept.metrics, None, ROOM, grace_s=5)
        answering(kept)

    async def swap(self, **request: object) -> None:
        await until(lambda: self.catalog.serving["m"].is_ready)
        self.changes.begin_swap("m", FORCED | request)
        await self.decided("m")

    async def decided(self, name: str) -> None:
        """Wait until a change has taken effect, and is over."""
        await self.changes.until_decided(name)
        await self.over(name)

    async def over(self, name: str) -> None:
        await until(lambda: name not in {each.name for each in self.changing()})

    def changing(self):
        return [model for model in self.changes.shown.list_models() if model.change]


@pytest.fixture
def start(arena: Arena, tmp_path: Path) -> Callable[[], Life]:
    return lambda: Life(arena, tmp_path / "state.json")


async def test_the_next_start_serves_what_was_added_and_swapped_with_its_number(start):
    first = start()
    await first.swap(max_batch_size=2)
    await first.swap(max_batch_size=3)
    first.changes.begin_add({"name": "n", "source": "echo", "credit": 3})
    await first.decided("n")
    for name in ("m", "n"):
        assert first.changes.model_info(name).saved
    second = start()
    assert second.catalog.serving["m"].version == 3
    assert second.catalog.version("m").settings.max_batch_size == 3
    assert second.catalog.version("n").settings.credit == 3
    assert second.changes.model_info("m").saved
    assert second.catalog.planned == [("m/3/0", "cpu"), ("n/0", "cpu")]
    await second.swap(max_batch_size=4)
    assert second.catalog.serving["m"].version == 4
    second.changes.begin_remove("m")
    await second.decided("m")
    assert list(start().catalog.serving) == ["n"]


async def test_ephemeral_changes_are_forgotten(start):
    first = start()
    await first.swap(max_batch_size=2, ephemeral=True)
    assert not first.changes.model_info("m").saved
    first.changes.begin_add({"name": "n", "source": "echo", "ephemeral": True})
    await first.decided("n")
    assert not first.changes.model_info("n").saved
    first.changes.begin_remove("m", ephemeral=True)
    await first.decided("m")
    second = start()
    assert list(second.catalog.serving) == ["m"]
    assert second.catalog.version("m").settings == ECHO


async def test_numbers_of_refused_versions_are_given_once_for_all(start):
    first = start()
    await until(lambda: first.catalog.serving["m"].is_ready)
    for _ in range(2):
        first.kept.engine.failures = [WorkerStartError("no file", permanent=True)]
        first.changes.begin_swap("m", FORCED | {"max_batch_size": 2})
        with pytest.raises(VersionRefusedError):
            await first.decided("m")
    second = start()
    assert second.catalog.serving["m"].version == 1
    assert second.catalog.version("m").settings == ECHO
    assert second.state.warnings == []
    await second.swap(max_batch_size=2)
    assert second.catalog.serving["m"].version == 4
    second.kept.engine.failures = [WorkerStartError("no file", permanent=True)]
    second.changes.begin_swap("m", FORCED | {"ephemeral": True})
    with pytest.raises(VersionRefusedError):
        await second.decided("m")
    third = start()
    assert third.catalog.serving["m"].version == 4
    await third.swap()
    assert third.catalog.serving["m"].version == 5


async def test_a_refused_version_of_a_model_that_was_removed_has_its_number_too(start):
    first = start()
    first.changes.begin_remove("m")
    await first.decided("m")
    first.kept.engine.failures = [WorkerStartError("no file", permanent=True)]
    for name in ("m", "n"):
        first.changes.begin_add({"name": name, "source": "echo"})
        with pytest.raises(VersionRefusedError):
            await first.decided(name)
        first.kept.engine.failures = [WorkerStartError("no file", permanent=True)]
    second = start()
    assert list(second.catalog.serving) == []
    second.changes.begin_add({"name": "m", "source": "echo"})
    await second.decided("m")
    assert second.catalog.serving["m"].version == 3


async def test_a_change_is_written_before_it_takes_effect(start, monkeypatch):
    life = start()
    served = []
    save = StateFile.save

    async def saving(self, name, model, **numbers):
        served.append(life.catalog.serving["m"].version)
        await save(self, name, model, **numbers)
        served.append(life.catalog.serving["m"].version)

    monkeypatch.setattr(StateFile, "save", saving)
    await life.swap(max_batch_size=2)
    assert set(served) == {1}
    assert life.catalog.serving["m"].version == 2


@pytest.mark.parametrize("kind", ["swap", "add", "remove"])
async def test_a_change_that_cannot_be_written_fails_and_changes_nothing(start, tmp_path, kind):
    life = start()
    (tmp_path / "state.json.draft").mkdir()
    match = "nothing was changed, since .*state.json could not be written: Is a directory"
    await until(lambda: life.catalog.serving["m"].is_ready)
    if kind == "swap":
        life.changes.begin_swap("m", FORCED)
    elif kind == "add":
        life.changes.begin_add({"name": "n", "source": "echo"})
    else:
        life.changes.begin_remove("m")
    name = "n" if kind == "add" else "m"
    with pytest.raises(NotSavedError, match=match):
        await life.changes.until_decided(name)
    await life.over(name)
    assert list(life.catalog.serving) == ["m"]
    assert [each.number for each in life.catalog.versions("m")] == [1]
    assert life.catalog.versions("n") == []
    assert life.catalog.serving["m"].is_ready
    assert life.changes.model_info("m").saved


async def test_a_rollback_takes_effect_even_if_it_cannot_be_written(start, tmp_path, caplog):
    life = start()
    await life.swap(max_batch_size=2, rollback_s=60)
    (tmp_path / "state.json.draft").mkdir()
    life.changes.begin_rollback("m")
    await life.decided("m")
    assert life.catalog.serving["m"].version == 1
    assert "the next start will serve version 2 again: " in caplog.text
    assert not life.changes.model_info("m").saved
    await asyncio.sleep(0)


async def test_a_rollback_is_kept(start):
    life = start()
    await life.swap(max_batch_size=2, rollback_s=60)
    life.changes.begin_rollback("m")
    await life.decided("m")
    second = start()
    assert second.catalog.serving["m"].version == 1
    await second.swap(max_batch_size=4)
    assert second.catalog.serving["m"].version == 3


@pytest.mark.parametrize("rollback_s", [60, 0], ids=["kept", "loaded anew"])
async def test_a_rollback_of_what_the_next_start_forgets_is_forgotten_too(
    start, tmp_path, rollback_s
):
    life = start()
    life.changes.begin_add({"name": "n", "source": "echo", "ephemeral": True})
    await life.decided("n")
    request = {"max_batch_size": 2, "ephemeral": True, "rollback_s": rollback_s}
    life.changes.begin_swap("n", FORCED | request)
    await life.decided("n")
    life.changes.begin_rollback("n")
    await life.decided("n")
    assert life.catalog.version("n").settings.max_batch_size == "auto"
    assert not life.changes.model_info("n").saved
    assert list(start().catalog.serving) == ["m"]
