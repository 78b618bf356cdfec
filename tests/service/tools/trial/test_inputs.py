import io
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

from inferpool.models.spec import TensorSpec
from inferpool.service.tools.trial.connection import TrialError
from inferpool.service.tools.trial.health import ModelState
from inferpool.service.tools.trial.inputs import made_up, read_inputs

_IMAGE = TensorSpec(name="image", dtype="uint8", shape=(-1, 3, -1, -1))
_VECTOR = TensorSpec(name="x", dtype="float32", shape=(-1, 3))


def model(
    specs: list[TensorSpec], example: object = None, *, reads_own_form: bool = False
) -> ModelState:
    return ModelState(name="m", inputs=specs, example=example, reads_own_form=reads_own_form)


def test_made_up_photographs_are_decodable_and_all_different():
    inputs = made_up(model([_IMAGE]), 1, 8)
    assert {each.content_type for each in inputs} == {"image/jpeg"}
    assert len({each.body for each in inputs}) == 8
    for each in inputs:
        assert Image.open(io.BytesIO(each.body)).size == (256, 256)
    assert made_up(model([_IMAGE]), 1, 2) == inputs[:2]
    assert made_up(model([_IMAGE]), 2, 2) != inputs[:2], "the seed decides"


def test_made_up_tensors_have_the_dtypes_and_shapes_that_were_declared():
    specs = [
        TensorSpec(name="x", dtype="float32", shape=(-1, 3, 4)),
        TensorSpec(name="ids", dtype="int64", shape=(-1, -1)),
        TensorSpec(name="mask", dtype="bool", shape=(-1,)),
    ]
    (one,) = made_up(model(specs), 1, 1)
    tensors = safetensors.numpy.load(one.body)
    assert (tensors["x"].dtype, tensors["x"].shape) == (np.dtype("float32"), (3, 4))
    assert tensors["ids"].dtype == np.dtype("int64")
    assert tensors["ids"].ndim == 1
    assert tensors["ids"].max() < 10
    assert (tensors["mask"].dtype, tensors["mask"].shape) == (np.dtype("bool"), ())
    (half,) = made_up(model([TensorSpec(name="x", dtype="bfloat16", shape=(-1, 5))]), 1, 1)
    assert b'"BF16"' in half.body
    assert len(half.body) % 8 == 2, "two bytes a number"


@pytest.mark.parametrize(("specs", "reads_own_form"), [([], False), ([_VECTOR], True)])
def test_nothing_is_made_up_for_a_model_whose_inputs_nobody_can_know(
    specs: list[TensorSpec], reads_own_form: bool
):
    with pytest.raises(TrialError, match=r"an `example`, or give some inputs.*--inputs PATH"):
        made_up(model(specs, reads_own_form=reads_own_form), 1, 1)


@pytest.mark.parametrize("specs", [[], [_VECTOR]])
def test_model_with_a_form_of_its_own_gets_its_example(specs: list[TensorSpec]):
    (one,) = made_up(model(specs, {"words": ["a"]}, reads_own_form=True), 1, 8)
    assert json.loads(one.body) == {"instances": [{"words": ["a"]}]}
    assert one.content_type == "application/json"


def test_model_that_shows_that_it_takes_texts_gets_texts_of_many_lengths():
    inputs = made_up(model([], "How do I get there?"), 1, 32)
    texts = [json.loads(each.body)["instances"][0] for each in inputs]
    assert len(set(texts)) == 32
    assert len({len(text.split()) for text in texts}) > 8
    assert made_up(model([], "a"), 1, 2) == inputs[:2]


def test_files_of_a_folder_are_requests_by_their_suffix(tmp_path: Path):
    (tmp_path / "b.json").write_text('{"instances": [1]}')
    (tmp_path / "a.JPG").write_bytes(b"jpeg")
    (tmp_path / "readme.txt").write_text("not for you")
    assert [(each.name, each.content_type) for each in read_inputs(tmp_path)] == [
        ("a.JPG", "image/jpeg"),
        ("b.json", "application/json"),
    ]


def test_empty_or_missing_folder_is_an_error(tmp_path: Path):
    with pytest.raises(TrialError, match="no file of a known kind"):
        read_inputs(tmp_path)
    with pytest.raises(TrialError, match="No such file"):
        read_inputs(tmp_path / "nowhere")
