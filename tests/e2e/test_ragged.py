"""A model whose outputs are lists, in real workers, in every form that clients may ask for."""

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

import inferpool.testing
from inferpool.service.client.sync_client import Client
from tests.e2e.running import Running, running
from tests.ragged_model import RaggedBoxes

BOXES = {"source": "tests.ragged_model:RaggedBoxes", "replicas": 2}
NUMS = (3, 0, 5_000, 1)
"""Numbers of boxes; those of the third instance are 80,000 bytes, which go by shared memory."""


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    with running(settings={"models": {"boxes": BOXES}}) as service:
        yield service


def ask(service: Running, accept: str) -> bytes:
    body = {"instances": [[num, 0] for num in NUMS]}
    answer = service.post(json=body, headers={"Accept": accept})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == accept
    return answer.content


def test_every_form_has_the_same_boxes(service: Running, tmp_path: Path):
    predictions = service.predict(*([num, 0] for num in NUMS))
    wanted = [np.array(each["boxes"], np.float32).reshape(-1, 4) for each in predictions]
    assert [len(each) for each in wanted] == list(NUMS)
    assert wanted[0].tolist() == (np.arange(12).reshape(3, 4) + 3).tolist()

    with np.load(io.BytesIO(ask(service, "application/x-npz"))) as file:
        found = {**file}
    tensors = load(ask(service, "application/safetensors"))
    with Client(service.address_of("")) as client:
        arrays = client.predict(np.array([[n, 0] for n in NUMS], np.float32), as_arrays=True).arrays
    for number, boxes in enumerate(wanted):
        same = (found[f"boxes.{number}"], tensors[f"boxes.{number}"], arrays["boxes"][number])
        assert all(np.array_equal(each, boxes) for each in same)
    assert [len(each) for each in arrays["labels"]] == list(NUMS)


def test_large_list_of_one_instance_is_still_a_list(service: Running):
    body = {"instances": [[5_000, 0]]}
    answer = service.post(json=body, headers={"Accept": "application/safetensors"})
    assert load(answer.content).keys() == {"boxes.0", "labels.0"}


def test_instance_at_fault_fails_alone(service: Running):
    one, wrong, two = service.predict([1, 0], [4, 1], [2, 0])
    assert (len(one["boxes"]), len(two["boxes"])) == (1, 2)
    assert wrong["error"]["code"] == "model_error"
    assert "returned 'boxes' of shape [4, 3] for an instance" in str(
        service.wait_for_log("postprocess failed on an input")
    )


def test_model_is_tested_without_a_service():
    assert inferpool.testing.predict(RaggedBoxes, [2.0, 0.0]).value["labels"] == [0, 1]
