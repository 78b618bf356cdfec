"""Labelled inputs that decide between two versions, in virtual time."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from inferpool.models.files.run_folder import RunFolder
from inferpool.service.api.routes.health import SwapFigures
from inferpool.service.errors import InvalidInputError, OverloadedError, VersionRefusedError
from inferpool.service.parts.swap.comparison import Comparison
from inferpool.service.parts.swap.validation import read_cases, validate
from inferpool.workers.shared.errors import WorkerStartError
from inferpool.workers.shared.messages import ItemRef, Outcome
from tests.run_folders import TINY, write_colours, write_run
from tests.service.parts.swap.test_decision import Acts, Stage, lines_of, ready
from tests.virtual_time import run_in_virtual_time

pytestmark = pytest.mark.usefixtures("virtual_time")


class Says(Acts):
    """Says for each number what it was told to."""

    def __init__(self, *answers: object) -> None:
        super().__init__()
        self.answers = answers

    def outcome(self, item: ItemRef, number: int) -> Outcome:
        return json.dumps(self.answers[number]).encode()


async def validated(stage: Stage, path: str) -> SwapFigures:
    """Return what a validation of the second version against the first finds."""
    new = stage.catalog.versions("m")[-1]
    cases = read_cases(path)
    figures = SwapFigures()
    comparison = Comparison(stage.catalog.version("m").pool, new.pool)
    return await validate(comparison, new.pool, cases, figures, lambda _: None)


NAMED = [{"label": "10", "index": 2}, {"label": "2", "index": 4}, {"label": "1", "index": 1}]


@pytest.mark.parametrize(
    ("labels", "answers", "accuracy"),
    [
        ({0: "10", 1: "2", 2: "1"}, NAMED, 1.0),
        ({0: "2", 1: "4", 2: "1"}, NAMED, 1.0),
        ({0: "10", 1: "4", 2: "7"}, NAMED, 0.33333),
        ({0: "cat"}, [[{"label": "cat"}, {"label": "dog"}]], 1.0),
        ({0: "cat", 1: "dog"}, [{"only": {"label": "cat"}}] * 2, 0.5),
        ({0: "1", 1: "0"}, [[0.1, 0.9], [0.1, 0.9]], 0.5),
        ({0: "None", 1: "x"}, [0.5, 0.5], 0.0),
        ({0: "yes", 1: "no"}, ["yes", "yes"], 0.5),
        ({0: "3", 1: "4"}, [3, 3], 0.5),
    ],
)  # fmt: skip
async def test_all_labels_are_names_or_all_are_numbers(stage, tmp_path, labels, answers, accuracy):
    it = await ready(stage(old=Says(*answers), new=Says(*answers)))
    await it.kept.ready()
    figures = await validated(it, lines_of(tmp_path / "x.jsonl", labels))
    assert (figures.accuracy, figures.accuracy_before) == (accuracy, accuracy)
    assert figures.num_validated == len(labels)


def test_what_the_version_of_now_had_no_time_for_counts_for_neither(stage, tmp_path):
    async def validated_beside_no_worker() -> None:
        it = await ready(stage(old=Says(0), new=Says(0)))
        await it.kept.ready()
        it.kept.engine.failures = [WorkerStartError("it is busy", permanent=False)] * 99
        it.kept.engine.started[0].die()
        with pytest.raises(OverloadedError, match="no room"):
            await validated(it, lines_of(tmp_path / "x.jsonl", {0: "0"}))

    run_in_virtual_time(validated_beside_no_worker(), 100)


async def test_a_shadow_of_a_validated_version_lasts_and_keeps_its_accuracy(stage, tmp_path):
    validation = lines_of(tmp_path / "x.jsonl", {n: str((n + 1) % 5) for n in range(20)})
    it = await ready(stage(new=Acts(shift=1)))
    request = {"policy": "shadow", "validation": validation, "num_inputs": 5, "wait_s": 1}
    with it.clients():
        began = asyncio.get_running_loop().time()
        found = await it.swap(**request, traffic_share=0.5, duration_s=20, rollback_s=0)
    assert asyncio.get_running_loop().time() - began > 20
    figures = found["figures"]
    assert (figures.num_validated, figures.accuracy, figures.accuracy_before) == (20, 1.0, 0.0)
    assert figures.num_inputs > 50


def found_in(validation: Path) -> list[tuple[str, Path | None]]:
    return [(case.label, case.path) for case in read_cases(str(validation))]


def test_a_run_is_judged_by_what_it_held_out_and_could_read(tmp_path):
    held_out = write_colours(tmp_path / "images", num=2)
    run = write_run(tmp_path / "run", model=TINY, validation=held_out)
    assert found_in(run) == [(label, path) for path, label in held_out]
    RunFolder(run).skipped.write_text(f"path,reason\n{held_out[1][0]},it is broken\n")
    assert found_in(run) == [(label, path) for path, label in held_out if path != held_out[1][0]]
    RunFolder(run).validation.write_text("path,label\nitem 3,red\n")
    with pytest.raises(InvalidInputError, match="run held out items of a dataset, not files"):
        read_cases(str(run))
    RunFolder(run).validation.unlink()
    with pytest.raises(InvalidInputError, match="run keeps no table of held-out images"):
        read_cases(str(run))
    RunFolder(run).card.unlink()
    with pytest.raises(InvalidInputError, match="run has not ended"):
        read_cases(str(run))


def test_a_table_has_paths_from_its_own_folder(tmp_path):
    table = tmp_path / "some.csv"
    table.write_text("label,path\ncat, a.png\n dog,/b.bin\n")
    assert found_in(table) == [("cat", tmp_path / "a.png"), ("dog", Path("/b.bin"))]
    table.write_text("label,file\ncat,a.png\n")
    with pytest.raises(InvalidInputError, match=r"must name the columns path and label; it lacks"):
        read_cases(str(table))
    table.write_text("path,label\na.png\n")
    with pytest.raises(InvalidInputError, match="line 2: it lacks a column"):
        read_cases(str(table))


async def test_a_pipe_among_the_images_is_named_and_not_waited_for(stage, tmp_path):
    (tmp_path / "images/cat").mkdir(parents=True)
    os.mkfifo(tmp_path / "images/cat/a.png")
    with pytest.raises(InvalidInputError, match=r"cat/a\.png cannot be read: it is no regular"):
        await validated(await ready(stage()), str(tmp_path / "images"))


async def test_a_validation_with_labels_that_nothing_answers_says_nothing_and_is_refused(
    stage, tmp_path
):
    validation = lines_of(tmp_path / "x.jsonl", dict.fromkeys(range(20), "cat"))
    it = await ready(stage())
    with pytest.raises(VersionRefusedError, match="any of the 20 inputs") as refused:
        await it.swap(validation=validation, wait_s=0)
    assert (refused.value.figures["accuracy"], refused.value.figures["accuracy_before"]) == (0, 0)


async def test_an_input_of_a_validation_that_no_version_can_read_is_named(stage, tmp_path):
    validation = lines_of(tmp_path / "x.jsonl", {n: str(n % 5) for n in range(20)})
    acts = Acts(fails=lambda number: number == 7, error="invalid_input")
    it = await ready(stage(old=acts, new=acts))
    with pytest.raises(InvalidInputError, match="line 8: there is no such number"):
        await it.swap(validation=validation, wait_s=0)
    assert (it.info()["serves"], it.info()["state"]) == (1, "refused")
