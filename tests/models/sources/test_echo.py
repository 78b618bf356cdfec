import time

import pytest
import torch

from inferpool.models.errors import InputError
from inferpool.models.sources.echo import Echo
from tests.models.items import (
    answers,
    bytes_item,
    image_item,
    json_item,
    loaded,
    run,
    tensor_item,
)


@pytest.fixture
def model():
    return loaded(Echo())


def test_bytes_are_counted_and_their_head_comes_back(model):
    items = [bytes_item(b""), bytes_item(b"abc"), image_item(bytes(range(200)))]
    assert answers(model, items) == [
        {"num_bytes": 0, "head": ""},
        {"num_bytes": 3, "head": "616263"},
        {"num_bytes": 200, "head": "0001020304050607"},
    ]


def test_json_comes_back_as_it_was(model):
    values = [{"a": [1, 2.5, None]}, "text", [], "ü" * 3000, 7]
    assert answers(model, [json_item(value) for value in values]) == values


def test_malformed_json_fails_alone(model):
    with pytest.raises(InputError):
        model.preprocess(json_item(b"[1,"))


def test_tensors_come_back_as_they_were(model):
    tensors = {"x": torch.randn(2, 3), "y": torch.tensor(3, dtype=torch.int16)}
    outputs = run(model, [tensor_item(tensors), tensor_item(tensors)])
    assert torch.equal(outputs["x"][1], tensors["x"])
    assert outputs["y"].dtype == torch.int16
    first, _ = answers(model, [tensor_item(tensors), tensor_item(tensors)])
    assert first == {"x": tensors["x"].tolist(), "y": 3}


def test_one_instance_renders_as_in_its_batch(model):
    for item in (bytes_item(b"abcdefghij"), json_item([1]), tensor_item({"x": torch.ones(2)})):
        outputs = run(model, [item])
        row = {name: tensor[0] for name, tensor in outputs.items()}
        assert model.render(row, {}) == model.render_batch(outputs, [{}])[0]


def test_a_delay_is_waited_for_once_per_batch(monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    run(Echo(delay_s=0.05), [bytes_item(b"a")] * 4)
    assert slept == [0.05]


def test_a_delay_must_be_a_sensible_length():
    with pytest.raises(ValueError, match="delay_s must be from 0 to 3600"):
        Echo(delay_s=-1)
