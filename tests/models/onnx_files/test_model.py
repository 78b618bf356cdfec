"""Files of ONNX as models."""

import logging
import re

import numpy as np
import pytest
import torch
from onnx import helper, numpy_helper

from inferpool.models.errors import InputError, ModelError, SourceError
from inferpool.models.onnx_files.model import OnnxModel
from inferpool.models.sources.registry import build
from inferpool.models.spec import Placement, TensorSpec
from tests.models.items import answers, json_item, loaded, run, tensor_item
from tests.models.onnx_files.files import (
    FLOAT,
    INT64,
    STRING,
    TwoLayers,
    info,
    write,
    write_classifier,
    write_two,
    write_words,
)

pytest.importorskip("onnxruntime")


@pytest.mark.parametrize("batch", ["n", 1, 8], ids=str)
def test_batches_of_any_size_are_computed_whatever_size_the_file_has(tmp_path, batch):
    model = loaded(OnnxModel(write_two(tmp_path / "net.onnx", batch)))
    network = TwoLayers()
    for num_rows in (1, 2, 8, 11):
        x, y = torch.randn(2, num_rows, 4)
        items = [tensor_item({"x_1": a, "y_0": b}) for a, b in zip(x, y, strict=True)]
        outputs = run(model, items)
        with torch.inference_mode():
            logits, total = network(x, y)
        assert torch.allclose(outputs["logits"], logits, atol=1e-6)
        assert torch.allclose(outputs["sum"], total)


def test_a_file_says_what_it_takes_and_gives(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        model = loaded(build(str(write_two(tmp_path / "net.onnx")), None, {}))
    assert model.inputs == [
        TensorSpec(name="x_1", dtype="float32", shape=(-1, 4)),
        TensorSpec(name="y_0", dtype="float32", shape=(-1, 4)),
    ]
    assert [spec.shape for spec in model.outputs] == [(-1, 3), (-1, 4)]
    assert "'x_1' (float32 [4])" in caplog.text
    assert "'x.1' is served as 'x_1'; 'y:0' is served as 'y_0'" in caplog.text
    with pytest.raises(InputError, match=r"instance\.x_1: expected 4 numbers, found 1"):
        model.preprocess(json_item({"x_1": [1], "y_0": [0, 0, 0, 0]}))


def test_sizes_that_the_file_leaves_out_are_found_by_a_trial(tmp_path):
    path = write(
        tmp_path / "net.onnx",
        [helper.make_node("ReduceSum", ["x", "axes"], ["y"])],
        [info("x", INT64, ["n", "length", 2])],
        [info("y", INT64, None)],
        [numpy_helper.from_array(np.array([1]), "axes")],
    )
    model = loaded(OnnxModel(path))
    assert (model.inputs[0].shape, model.outputs[0].shape) == ((-1, -1, 2), (-1, 1, 2))
    assert answers(model, [json_item([[1, 2], [3, 4]])]) == [[[4, 6]]]


def test_numbers_of_instances_are_not_taken_for_a_row(tmp_path):
    path = write(
        tmp_path / "net.onnx",
        [helper.make_node("Mul", ["x", "scale"], ["y"])],
        [info("x", FLOAT, ["n", 2]), info("scale", FLOAT, [])],
        [info("y", FLOAT, ["n", 2])],
    )
    items = [json_item({"x": [1, 1], "scale": scale}) for scale in (3, 5)]
    assert answers(loaded(OnnxModel(path)), items) == [[3, 3], [5, 5]]
    path = write(
        tmp_path / "fixed.onnx",
        [helper.make_node("Mul", ["x", "scale"], ["y"])],
        [info("x", FLOAT, [4, 2]), info("scale", FLOAT, [])],
        [info("y", FLOAT, [4, 2])],
    )
    with pytest.raises(ModelError, match=r"input 'scale' of .* has no dimension for the batch"):
        loaded(OnnxModel(path))


def test_an_output_that_is_a_batch_by_chance_is_an_error(tmp_path):
    path = write(
        tmp_path / "net.onnx",
        [
            helper.make_node("NonZero", ["x"], ["places"]),
            helper.make_node("Transpose", ["places"], ["found"]),
            helper.make_node("Greater", ["x", "one"], ["is_large"]),
            helper.make_node("Cast", ["is_large"], ["ones"], to=FLOAT),
            helper.make_node("Concat", ["ones", "row"], ["rows"], axis=1),
            helper.make_node("NonZero", ["rows"], ["large"]),
            helper.make_node("Transpose", ["large"], ["few"]),
        ],
        [info("x", FLOAT, [1, 3])],
        [info("found", INT64, ["num", 2]), info("few", INT64, ["few", 2])],
        [
            numpy_helper.from_array(np.array([1], dtype=np.float32), "one"),
            numpy_helper.from_array(np.array([[1]], dtype=np.float32), "row"),
        ],
    )
    model = loaded(OnnxModel(path))
    assert run(model, [json_item([0, 1, 0])])["few"].tolist() == [[0, 3]]
    with pytest.raises(ModelError, match=r"for a batch of 1 the output 'few' has shape \[2, 2\]"):
        run(model, [json_item([0, 2, 0])])


def test_a_file_that_only_says_that_its_batch_is_free_is_computed_one_by_one(tmp_path, caplog):
    path = write(
        tmp_path / "net.onnx",
        [helper.make_node("Reshape", ["x", "shape"], ["y"])],
        [info("x", FLOAT, ["n", 2, 2])],
        [info("y", FLOAT, ["n", 4])],
        [numpy_helper.from_array(np.array([1, 4]), "shape")],
    )
    model = loaded(OnnxModel(path))
    items = [json_item([[i, 1], [2, 3]]) for i in range(3)]
    assert answers(model, items) == [[i, 1, 2, 3] for i in range(3)]
    assert "computes one instance at a time only" in caplog.text


def test_scores_as_maps_and_labels_as_texts_are_answered_as_such(tmp_path):
    model = loaded(OnnxModel(write_classifier(tmp_path / "iris.onnx")))
    first, second = answers(model, [json_item([9, 0, 0]), json_item([0, 0, 9])])
    assert (first["label"], second["label"]) == ("a", "c")
    assert [*first["probability"]] == ["a", "b", "c"]
    assert sum(second["probability"].values()) == pytest.approx(1)
    assert second["probability"]["c"] > 0.99


def test_columns_of_texts_and_numbers_are_values_of_an_object(tmp_path):
    model = loaded(OnnxModel(write_words(tmp_path / "words.onnx")))
    items = [json_item({"word": "cat", "age": 3}), json_item({"word": "élan", "age": [3]})]
    assert answers(model, items) == [[4.0], [2.0]]
    assert answers(model, [json_item(model.example)]) == [[-1.0]]
    for bad in ({"word": 1, "age": 3}, {"word": ["a", "b"], "age": 3}):
        with pytest.raises(InputError, match=r"instance\.word: expected a string"):
            model.preprocess(json_item(bad))
    with pytest.raises(InputError, match=r"age"):
        model.preprocess(json_item({"word": "cat", "age": "old"}))


def test_external_data_is_read_from_beside_the_file_and_missed_by_name(tmp_path):
    path = write_two(
        tmp_path / "net.onnx", save_as_external_data=True, location="net.bin", size_threshold=0
    )
    network = TwoLayers()
    outputs = run(
        loaded(OnnxModel(path)), [tensor_item({"x_1": torch.ones(4), "y_0": torch.ones(4)})]
    )
    assert torch.allclose(outputs["logits"][0], network(torch.ones(4), torch.ones(4))[0])
    (tmp_path / "net.bin").unlink()
    with pytest.raises(SourceError, match=r"net\.onnx cannot be read by onnxruntime.*net\.bin"):
        loaded(OnnxModel(path))


def test_a_reference_is_compared_and_the_figure_is_logged(tmp_path, caplog):
    path, weights = write_two(tmp_path / "net.onnx", 2), tmp_path / "w.pth"
    reference = "tests.models.onnx_files.files:TwoLayers"
    with caplog.at_level(logging.INFO):
        loaded(OnnxModel(path, reference=reference))
    assert re.search(r"net\.onnx agrees with .*TwoLayers on 8 .*off by \d", caplog.text)
    torch.save({"linear.weight": torch.zeros(3, 4), "linear.bias": torch.zeros(3)}, weights)
    with pytest.raises(ModelError, match=r"net\.onnx does not compute what .*TwoLayers does"):
        loaded(OnnxModel(path, reference=reference, reference_weights=str(weights)))


def _write_odd(tmp_path, **changed):
    given = {
        "nodes": [helper.make_node("Identity", ["x"], ["y"])],
        "inputs": [info("x", FLOAT, ["n", 2])],
        "outputs": [info("y", FLOAT, ["n", 2])],
    } | changed
    return write(tmp_path / "net.onnx", **given)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {
                "inputs": [info("x", FLOAT, ["n", 2]), info("z", FLOAT, [3])],
                "nodes": [
                    helper.make_node("Identity", ["x"], ["y"]),
                    helper.make_node("Identity", ["z"], ["unused"]),
                ],
            },
            "dimension 0 of all inputs must be the batch, but .* 'x' any, 'z' 3",
        ),
        (
            {"nodes": [helper.make_node("ReduceMean", ["x"], ["y"], keepdims=0)]},
            r"for a batch of 2 the output 'y' has shape \[\].* inputs .* no batch either, export",
        ),
        (
            {"nodes": [helper.make_node("Whatever", ["x"], ["y"])]},
            r"cannot be read by onnxruntime .*Whatever",
        ),
    ],
)
def test_a_file_without_batches_of_tensors_is_refused(tmp_path, changed, message):
    with pytest.raises(ModelError, match=message):
        loaded(OnnxModel(_write_odd(tmp_path, **changed)))


def test_a_file_for_one_picture_may_find_any_number_of_things(tmp_path):
    path = write(
        tmp_path / "boxes.onnx",
        [
            helper.make_node("NonZero", ["x"], ["places"]),
            helper.make_node("Transpose", ["places"], ["found"]),
            helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
            helper.make_node("Identity", ["x"], ["same"]),
        ],
        [info("x", FLOAT, [1, 3])],
        [info("found", INT64, ["num", 2]), info("sum", FLOAT, []), info("same", FLOAT, [1, 3])],
    )
    model = loaded(OnnxModel(path))
    assert [spec.shape for spec in model.outputs] == [(-1, -1, 2), (-1,), (-1, 3)]
    outputs = run(model, [json_item([0, 1, 2]), json_item([0, 0, 0])])
    assert [each.tolist() for each in outputs["found"].cpu()] == [[[0, 1], [0, 2]], []]
    assert [each.item() for each in outputs["sum"]] == [3, 0]
    assert outputs["same"].tolist() == [[0, 1, 2], [0, 0, 0]]


def test_an_output_that_no_protocol_carries_is_named(tmp_path):
    tensors = helper.make_sequence_type_proto(helper.make_tensor_type_proto(FLOAT, None))
    path = _write_odd(
        tmp_path,
        nodes=[helper.make_node("SequenceConstruct", ["x"], ["y"])],
        outputs=[helper.make_value_info("y", tensors)],
    )
    with pytest.raises(SourceError, match=r"output 'y' is a seq\(tensor\(float\)\)"):
        loaded(OnnxModel(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is an empty file"),
        (b"PK\x03\x04", "is not an ONNX file, or is cut short"),
        (b"\x08\x09\x12\x07pytorch\x3a\xff\x7f", "cannot be read by onnxruntime .*[Pp]rotobuf"),
        (b"<html>", "is a page of HTML"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path, content, message):
    (tmp_path / "net.onnx").write_bytes(content)
    with pytest.raises(SourceError, match=rf"net\.onnx {message}"):
        loaded(OnnxModel(tmp_path / "net.onnx"))


def test_a_gpu_without_a_build_for_it_is_told_what_to_do(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime computes on GPUs")
    model = OnnxModel(write_two(tmp_path / "net.onnx"))
    with pytest.raises(ModelError, match=r'onnxruntime-gpu in its place, or set devices = "cpu"'):
        model.load(Placement(devices=("cuda:0",)))


def test_without_onnxruntime_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(ModelError, match=r"pip install 'inferpool\[onnx\]'"):
        loaded(OnnxModel(write_two(tmp_path / "net.onnx")))


def test_several_texts_of_an_instance_are_a_list(tmp_path):
    path = _write_odd(
        tmp_path, inputs=[info("x", STRING, ["n", 2])], outputs=[info("y", STRING, ["n", 2])]
    )
    model = loaded(OnnxModel(path))
    assert answers(model, [json_item(["a", "b"]), json_item(["long", ""])]) == [
        ["a", "b"],
        ["long", ""],
    ]
