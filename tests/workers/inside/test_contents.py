"""Outcomes of models that return content, in one process."""

from collections.abc import Iterator, Sequence

import pytest
import torch

from inferpool.models.base import Model
from inferpool.models.item import Features
from inferpool.workers.inside.compute import Computer
from inferpool.workers.shared.messages import ContentBlob, ItemError, ItemRef, Outcome, Stored
from tests.content_model import PIXEL, Drawing, DrawingOrNumber


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def outcomes(model: Model, numbers: Sequence[int], *, wanted: Sequence[bool] = ()) -> list[Outcome]:
    computer = Computer(model, num_threads=1)
    refs = [
        ItemRef("json", 0, 1, float("inf"), wants_content=bool(wanted) and wanted[row])
        for row in range(len(numbers))
    ]
    payloads = [memoryview(b"%d" % each) for each in numbers]
    return computer.compute(computer.prepare(1, refs, payloads))


def test_a_content_is_an_outcome_of_its_own_and_one_at_fault_fails_alone() -> None:
    picture, page, refused, raised = outcomes(Drawing(), [0, 1, 2, 3])
    assert picture == ContentBlob("image/png", PIXEL, {"X-Number": "0"})
    assert page == ContentBlob("text/html; charset=utf-8", b"<b>1</b>", {})
    assert isinstance(refused, ItemError)
    assert isinstance(raised, ItemError)
    assert (refused.code, raised.code) == ("model_error", "invalid_input")
    assert "'Set-Cookie' of a Content is not a model's to set" in refused.message


def test_a_model_with_both_forms_draws_only_for_calls_that_prefer_it() -> None:
    found = outcomes(DrawingOrNumber(), [0, 4, 5], wanted=[True, False, True])
    assert found == [
        ContentBlob("image/png", PIXEL, {"X-Number": "0"}),
        b"4",
        ContentBlob("image/png", PIXEL * 5, {"X-Number": "5"}),
    ]


def test_a_content_is_stored_once_beside_tensors_that_cannot_be_sent() -> None:
    class ManyOutputs(Drawing):
        def forward(self, batch: Features) -> Features:
            return {**batch, **{f"y{number}": batch["x"] for number in range(1024)}}

    stored: list[bytes] = []

    def keep(data: memoryview) -> bytes:
        stored.append(bytes(data))
        return stored[-1]

    computer = Computer(ManyOutputs(), num_threads=1, keep=keep)
    refs = [ItemRef("json", 0, 1, float("inf"), wants_tensors=wants) for wants in (False, True)]
    payloads = [memoryview(b"0"), memoryview(b"4")]
    drawn, refused = computer.compute(computer.prepare(1, refs, payloads))
    assert isinstance(drawn, ContentBlob)
    assert isinstance(refused, ItemError)
    assert stored == [PIXEL]  # nobody would free it a second time


def test_the_bytes_are_kept_as_other_outputs_are() -> None:
    stored = Stored(7, len(PIXEL))
    computer = Computer(Drawing(), num_threads=1, keep=lambda data: stored)
    refs = [ItemRef("json", 0, 1, float("inf"))]
    (found,) = computer.compute(computer.prepare(1, refs, [memoryview(b"0")]))
    assert isinstance(found, ContentBlob)
    assert found.data == stored
