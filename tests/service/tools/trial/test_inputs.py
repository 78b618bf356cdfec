import io
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

from inferpool.models.spec import TensorSpec
from inferpool.service.client.health import ModelState
from inferpool.service.tools.trial.connection import TrialError
from inferpool.service.tools.trial.inputs import made_up, read_inputs


def model(*specs: TensorSpec, example: object = None, reads_own_form: bool = False) -> ModelState:
    return ModelState(name="m", inputs=specs, example=example, reads_own_form=reads_own_form)


VECTOR = TensorSpec(name="x", dtype="float32", shape=(-1, 3))


def test_made_up_photographs_are_decodable_and_all_different():
    images = model(TensorSpec(name="image", dtype="uint8", shape=(-1, 3, -1, -1)))
    inputs = made_up(images, 1, 8)
    assert {each.content_type for each in inputs} == {"image/jpeg"}
    assert len({each.body for each in inputs}) == 8
    assert {Image.open(io.BytesIO(each.body)).size for each in inputs} == {(256, 256)}
    assert made_up(images, 1, 2) == inputs[:2]
    assert made_up(images, 2, 2) != inputs[:2], "the seed decides"


def test_made_up_tensors_have_the_dtypes_and_shapes_that_were_declared():
    ids = TensorSpec(name="ids", dtype="int64", shape=(-1, -1))
    mask = TensorSpec(name="mask", dtype="bool", shape=(-1,))
    (one,) = made_up(model(VECTOR, ids, mask), 1, 1)
    tensors = safetensors.numpy.load(one.body)
    found = {name: (each.dtype, each.ndim) for name, each in tensors.items()}
    assert found == {
        "x": (np.dtype("float32"), 1), "ids": (np.dtype("int64"), 1), "mask": (np.dtype("bool"), 0)
    }  # fmt: skip
    assert tensors["x"].shape == (3,)
    assert tensors["ids"].max() < 10
    (half,) = made_up(model(TensorSpec(name="x", dtype="bfloat16", shape=(-1, 5))), 1, 1)
    assert b'"BF16"' in half.body
    assert len(half.body) % 8 == 2, "two bytes a number"


def test_model_with_a_form_of_its_own_gets_its_example_or_nothing():
    for specs in ((), (VECTOR,)):
        (one,) = made_up(model(*specs, example={"words": ["a"]}, reads_own_form=True), 1, 8)
        assert json.loads(one.body) == {"instances": [{"words": ["a"]}]}
        assert one.content_type == "application/json"
    for unknown in (model(), model(VECTOR, reads_own_form=True)):
        with pytest.raises(TrialError, match=r"an `example`, or give some inputs.*--inputs PATH"):
            made_up(unknown, 1, 1)


def test_model_that_shows_that_it_takes_texts_gets_texts_of_many_lengths():
    inputs = made_up(model(example="How do I get there?"), 1, 32)
    texts = [json.loads(each.body)["instances"][0] for each in inputs]
    assert len(set(texts)) == 32
    assert len({len(text.split()) for text in texts}) > 8


def test_files_of_a_folder_are_requests_by_their_suffix(tmp_path: Path):
    with pytest.raises(TrialError, match="No such file"):
        read_inputs(tmp_path / "nowhere")
    (tmp_path / "readme.txt").write_text("not for you")
    with pytest.raises(TrialError, match="no file of a known kind"):
        read_inputs(tmp_path)
    (tmp_path / "b.json").write_text('{"instances": [1]}')
    (tmp_path / "a.JPG").write_bytes(b"jpeg")
    found = [(each.name, each.content_type) for each in read_inputs(tmp_path)]
    assert found == [("a.JPG", "image/jpeg"), ("b.json", "application/json")]
