"""A comparison finds differences in the answers of two versions, and copes without answers."""

import asyncio
import re
import struct

import pytest

from inferpool.service.api.routes.health import SwapFigures
from inferpool.service.errors import VersionRefusedError
from inferpool.service.parts.swap.comparison import (
    Comparison,
    deviation_of,
    label_of,
    median_bounds,
    parts_said,
    why_not,
)
from inferpool.service.parts.swap.requests import SwapOptions
from inferpool.workers.shared.errors import WorkerStartError
from inferpool.workers.shared.messages import TensorBlob
from tests.service.parts.swap.test_decision import Acts, ready, when

pytestmark = pytest.mark.usefixtures("virtual_time")


def floats(*numbers: float) -> list[TensorBlob]:
    return [TensorBlob("y", "float32", (len(numbers),), struct.pack(f"<{len(numbers)}f", *numbers))]


def wholes(*numbers: int) -> list[TensorBlob]:
    return [TensorBlob("y", "int64", (len(numbers),), struct.pack(f"<{len(numbers)}q", *numbers))]


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        (b"[0.1, 0.7, 0.2]", 1),
        (b"[0, 1, 0.5]", 1),
        (b"[3, 7, 1]", [3, 7, 1]),
        (b"[true, false]", [True, False]),
        (b"[]", []),
        (b'[{"label": "cat", "index": 3}, {"label": "dog"}]', "cat"),
        (b'"a text"', "a text"),
        (b"0.25", None),
        (b"7", 7),
    ],
)
def test_a_label_is_the_best_of_scores_and_all_of_whole_numbers(answer, label):
    assert label_of(answer) == label


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (b"[0.25, 0.5]", b"[0.75, 0.5]", True),
        (b"[0.25, 0.5]", b"[0.25]", False),
        (b'["a", "text"]', b'["a", "test"]', False),
        (b'[{"label": "cat"}, {"label": "dog"}]', b'[{"label": "cat"}, {"label": "owl"}]', False),
        (b"[[0.1, 0.9], [0.8, 0.2]]", b"[[0.2, 0.7], [0.6, 0.1]]", True),
    ],
)
def test_streams_say_the_same_if_all_their_parts_do(one, other, is_same):
    assert (parts_said(one) == parts_said(other)) == is_same


@pytest.mark.parametrize(
    ("one", "other", "deviation"),
    [
        (floats(1, -4), floats(1, -5), 0.25),
        (floats(0, 0), floats(0, 0), 0.0),
        (floats(0, 0), floats(0, 1e-9), 1.0),
        (wholes(3), wholes(900), None),
        (floats(float("nan"), 2), floats(float("nan"), 3), 0.5),
        (floats(float("nan"), 2), floats(1, 2), 0.0),
        (floats(float("inf")), floats(float("inf")), None),
        (floats(), floats(), None),
        ([*wholes(1), TensorBlob("z", "float16", (1,), b"\0\x3c")],
         [TensorBlob("z", "float16", (1,), b"\0\x40"), *wholes(2)], 1.0),
    ],
)  # fmt: skip
def test_a_deviation_is_of_fractions_and_a_part_of_the_largest(one, other, deviation):
    found, fault = deviation_of(one, other)
    assert not fault
    assert found == (deviation if deviation is None else pytest.approx(deviation))


@pytest.mark.parametrize(
    ("other", "fault"),
    [
        (floats(1, float("nan")), "not finite"),
        (floats(1), r"is float32 \[1\], it was float32 \[2\]"),
        (wholes(1, 2), "is int64"),
        ([], "is missing"),
    ],
)
def test_outputs_of_another_form_are_a_fault(other, fault):
    found, text = deviation_of(floats(1, 2), other)
    assert found is None
    assert re.search(fault, text)


@pytest.mark.parametrize(
    ("good", "bad", "reason"),
    [
        ({"num_faults": 5}, {"num_faults": 6}, "it fails on 6 of 100 inputs"),
        ({"agreement": 0.9}, {"agreement": 0.899}, r"agrees for 89\.90%"),
        ({"deviation": 0.1}, {"deviation": 0.101}, r"off by up to 0\.101"),
        ({"latency_ratio_least": 1.2}, {"latency_ratio_least": 1.21}, r"surely 1\.21 times"),
        ({"accuracy": 0.8}, {"accuracy": 0.799}, r"it labels 79\.90% .* version of now 80\.00%"),
        ({"accuracy": 0.01, "accuracy_before": 0.0}, {"accuracy": 0.0, "accuracy_before": 0.0},
         "neither it nor the version of now"),
    ],
)  # fmt: skip
def test_a_version_may_be_as_bad_as_a_bound_and_no_worse(good, bad, reason):
    options = SwapOptions(
        max_fault_share=0.05, min_agreement=0.9, max_deviation=0.1, max_latency_ratio=1.2
    )

    def refused(figures: dict[str, float]) -> str:
        before = {"accuracy_before": 0.8} if "accuracy" in figures else {}
        all_figures = {"num_inputs": 100, "latency_ratio": 1.5, **before, **figures}
        return why_not(SwapFigures(**all_figures), options)  # type: ignore[arg-type]

    assert refused(good) == ""
    assert re.match(f".*{reason}", refused(bad))


def test_a_validation_counts_instead_of_agreement_and_deviation():
    figures = SwapFigures(
        num_inputs=9, agreement=0.0, deviation=9.0, accuracy=0.5, accuracy_before=0.5
    )
    assert why_not(figures, SwapOptions()) == ""


@pytest.mark.parametrize(
    ("num", "deviations", "bounds"), [(100, 2, (41, 61)), (100, 3, (36, 66)), (4, 3, (1, 4))]
)
def test_a_median_surely_lies_within_its_bounds(num, deviations, bounds):
    assert median_bounds(range(num, 0, -1), deviations) == bounds


async def test_a_version_that_answers_nothing_has_no_agreement(stage):
    it = await ready(stage())
    pool = it.catalog.version("m").pool
    comparison = Comparison(pool, pool)
    comparison.note_fault("NaN in 'y'")
    figures = comparison.figures()
    assert (figures.num_inputs, figures.agreement, figures.num_faults) == (0, None, 1)


async def test_a_version_of_now_whose_worker_restarts_is_waited_for(stage):
    it = await ready(stage(new=Acts(shift=1)))
    it.kept.engine.failures = [WorkerStartError("it is busy", permanent=False)]
    it.kept.engine.started[0].die()
    await when(lambda: not it.catalog.serving["m"].is_ready)
    with it.clients(), pytest.raises(VersionRefusedError, match=r"agrees for 0\.00%"):
        await it.swap()
    assert it.info()["serves"] == 1


async def test_a_version_of_now_that_has_no_worker_left_is_not_waited_for(stage):
    it = await ready(stage())
    it.catalog.version("m").pool.slots[0].state = "failed"
    it.catalog.version("m").pool.dispatcher.detach(it.kept.engine.started[0])
    began = asyncio.get_running_loop().time()
    assert (await it.swap(rollback_s=0))["serves"] == 2
    assert asyncio.get_running_loop().time() - began < 5


async def test_a_version_whose_worker_is_lost_meanwhile_is_refused_soon(stage):
    it = await ready(stage())
    with it.clients():
        task = asyncio.create_task(it.swap(num_inputs=400))
        await when(lambda: "compared on 5" in it.changes.model_info("m").change)
        pool = it.catalog.versions("m")[1].pool
        pool.slots[0].state = "failed"
        pool.dispatcher.detach(it.kept.engine.started[1])
        began = asyncio.get_running_loop().time()
        with pytest.raises(VersionRefusedError, match="fails on"):
            await task
    assert asyncio.get_running_loop().time() - began < 10


async def test_a_version_that_fails_again_and_again_is_refused_before_all_inputs_have_come(stage):
    it = await ready(stage(new=Acts(fails=lambda number: True)))
    with it.clients(), pytest.raises(VersionRefusedError, match="fails on") as refused:
        await it.swap(num_inputs=500, wait_s=60)
    assert refused.value.figures["num_faults"] == 11
