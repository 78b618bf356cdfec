"""Outputs that are lists, in one process: checks, halving, and what is sent of them."""

import json
import logging
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from inferpool.models.border import checked
from inferpool.models.item import Features, Outputs
from inferpool.workers.inside import outcomes
from inferpool.workers.inside.compute import Computer
from inferpool.workers.shared.messages import ItemError, ItemRef, Outcome, TensorBlob
from tests.ragged_model import RaggedBoxes


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def computed(
    values: Sequence[object], model: RaggedBoxes | None = None, *, wants_tensors: bool = False
) -> list[Outcome]:
    computer = Computer(checked(model or RaggedBoxes()), num_threads=1)
    bodies = [json.dumps(value).encode() for value in values]
    refs = [ItemRef("json", 0, len(body), math.inf, wants_tensors) for body in bodies]
    return computer.compute(computer.prepare(1, refs, [memoryview(body) for body in bodies]))


def num_boxes(outcome: Outcome) -> object:
    """Return the number of boxes of an answer, or the code of an error."""
    if isinstance(outcome, ItemError):
        return outcome.code
    if isinstance(outcome, list):
        return next(blob.shape[0] for blob in outcome if blob.name == "boxes")
    answer = json.loads(outcome)
    assert len(answer["boxes"]) == len(answer["labels"])
    return len(answer["boxes"])


@pytest.mark.parametrize("wants_tensors", [False, True])
def test_instance_with_a_wrong_output_fails_alone(wants_tensors: bool):
    values = [[1, 0], [2, 1], [0, 0], [3, 2], [2, 3], [4, 0], [5, 4]]
    found = computed(values, wants_tensors=wants_tensors)
    wrong = "model_error"
    expected = [1, wrong, 0, wrong, "non_finite_output", 4, wrong]
    assert [num_boxes(each) for each in found] == expected


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (1, "returned 'boxes' of shape [2, 3] for an instance, where it declares [-1, 4]"),
        (2, "the model returned 'labels' as float32 for an instance, where it declares int64"),
        (4, "the model returned a list of 0 as 'boxes' for a batch of 1"),
    ],
)
def test_log_tells_the_output_and_what_is_wrong(
    what: int, told: str, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.ERROR)
    computed([[2, what]])
    assert told in caplog.text


def test_blobs_of_each_instance_have_its_own_shape():
    two, none = computed([[2, 0], [0, 0]], wants_tensors=True)
    assert isinstance(two, list)
    assert isinstance(none, list)
    assert [(blob.name, blob.dtype, blob.shape) for blob in two] == [
        ("boxes", "float32", (2, 4)),
        ("labels", "int64", (2,)),
    ]
    assert all(blob.is_ragged for blob in (*two, *none))
    assert np.frombuffer(two[0].buffer, np.float32).tolist() == [i + 2.0 for i in range(8)]
    assert [blob.shape for blob in none] == [(0, 4), (0,)]


class WithCounts(RaggedBoxes):
    """Has an output beside its lists that is a tensor; each `postprocess` gets lists."""

    def postprocess(self, outputs: Outputs) -> Outputs:
        boxes: list[torch.Tensor] = outputs["boxes"]
        assert isinstance(boxes, list)
        num = torch.tensor([len(each) for each in boxes])
        return {"boxes": [each * 2 for each in boxes], "labels": outputs["labels"], "num": num}


def test_postprocess_gets_and_returns_lists_beside_tensors():
    (answer,) = computed([[1, 0]], WithCounts())
    assert json.loads(answer) == {"boxes": [[2.0, 4.0, 6.0, 8.0]], "labels": [0], "num": 1}  # type: ignore[arg-type]
    (blobs,) = computed([[3, 0]], WithCounts(), wants_tensors=True)
    assert isinstance(blobs, list)
    assert [(blob.name, blob.is_ragged) for blob in blobs] == [
        ("boxes", True),
        ("labels", True),
        ("num", False),
    ]
    assert isinstance(blobs[2], TensorBlob)
    assert blobs[2].shape == ()


def test_instance_that_is_too_large_to_be_sent_fails_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outcomes, "MAX_ANSWER_BYTES", 100)
    found = computed([[1, 0], [30, 0], [2, 0]], wants_tensors=True)
    assert [num_boxes(each) for each in found] == [1, "model_error", 2]


def test_name_with_a_dot_is_refused():
    class Dotted(RaggedBoxes):
        outputs = ()

        def forward(self, batch: Features) -> object:
            return {"boxes.all": [torch.zeros(1) for _ in batch["x"]]}

    class DottedTensor(Dotted):
        def forward(self, batch: Features) -> object:
            return {"boxes.all": batch["x"]}

    for model in (Dotted(), DottedTensor()):
        (error,) = computed([[1, 0]], model)
        assert isinstance(error, ItemError)
        assert error.code == "model_error"
