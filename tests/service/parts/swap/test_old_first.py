"""Versions that are judged by what the former one had answered before it left, in virtual time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from inferpool.service.errors import VersionRefusedError
from inferpool.service.parts.swap.changes import Changes
from inferpool.service.parts.swap.room import Room
from inferpool.workers.host.device_memory import HOST
from inferpool.workers.shared.arena import Arena
from tests.service.parts.swap.test_decision import Acts, Stage, lines_of, when

pytestmark = pytest.mark.usefixtures("virtual_time")


@asynccontextmanager
async def tight(arena: Arena, new: Acts) -> AsyncIterator[Stage]:
    """Serve a model on a host with memory for one worker, with clients."""
    it = Stage(arena, new=new)
    engine = it.kept.engine
    room = Room(
        lambda model, placement: {HOST: 1},
        lambda: {HOST: 1 - sum(not worker.is_gone for worker in engine.started)},
        lambda worker: {HOST: 1},
    )
    it.changes = Changes(it.catalog, it.kept.metrics, None, room, grace_s=5)
    await when(lambda: it.catalog.serving["m"].is_ready)
    with it.clients():
        yield it
    await it.changes.stop()


async def quiet(it: Stage) -> None:
    await when(lambda: not it.changes.model_info("m").change)


async def test_a_good_version_takes_over_with_all_figures(arena):
    async with tight(arena, Acts(noise=0.01)) as it:
        found = await it.swap(old_first=True)
        figures = found["figures"]
        assert (found["serves"], figures.num_live, figures.agreement) == (2, 100, 1.0)
        assert figures.deviation == pytest.approx(0.01, abs=0.001)
        await quiet(it)
        before = it.answered[2]
        await asyncio.sleep(5)
        assert it.answered[2] > before + 100
    assert set(it.failed) <= {"overloaded"}, "calls that wait leave room for the comparison"


@pytest.mark.parametrize(
    ("acts", "reason"),
    [
        (Acts(shift=1), "its answer agrees for 0"),
        (Acts(noise=0.3), "off by up to 0.3"),
        (Acts(fails=lambda number: number % 10 == 0), "it fails on 1"),
    ],
    ids=["labels", "outputs", "faults"],
)
async def test_a_worse_version_is_refused_and_the_former_one_comes_back(arena, acts, reason):
    async with tight(arena, acts) as it:
        with pytest.raises(VersionRefusedError, match=reason):
            await it.swap(old_first=True)
        await quiet(it)
        await asyncio.sleep(5)
        assert it.info()["serves"] == 1
        before = it.answered[1]
        await asyncio.sleep(5)
        assert it.answered[1] > before + 100
    assert it.answered[2] == 0
    assert set(it.failed) <= {"overloaded", "unavailable"}


async def test_labelled_inputs_are_answered_before_the_former_version_leaves(arena, tmp_path: Path):
    validation = lines_of(tmp_path / "right.jsonl", {n: str(n % 5) for n in range(20)})
    async with tight(arena, Acts(fails=lambda number: number == 7)) as it:
        with pytest.raises(VersionRefusedError, match=r"95\.00% of the 20 inputs") as refused:
            await it.swap(old_first=True, validation=validation, wait_s=0)
        await quiet(it)
    assert refused.value.figures["accuracy_before"] == 1.0


async def test_errors_after_the_switch_load_the_former_version_again(arena):
    async with tight(arena, Acts()) as it:
        await it.swap(old_first=True)
        await quiet(it)
        it.acts[1] = Acts(fails=lambda number: True)
        it.acts.append(Acts())
        await when(lambda: it.info()["serves"] == 3)
        await quiet(it)
        states = {each.number: each.state for each in it.changes.model_info("m").versions}
        assert states == {1: "gone", 2: "rolled_back", 3: "serving"}
