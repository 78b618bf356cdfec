import base64
import re
from typing import Any

import numpy as np
import pytest
import torch

from inferpool.models.base import Model
from inferpool.models.errors import InputError
from inferpool.models.inputs import features_of, place_of_non_finite
from inferpool.models.item import Item
from inferpool.models.spec import TensorHeader, TensorSpec
from tests.models.items import bytes_item, image_item, json_item, tensor_item


def spec(dtype="float32", *shape, name="x"):
    return TensorSpec(name=name, dtype=dtype, shape=(-1, *shape))


TWO = [spec("float32", 2, name="a"), spec("int64", name="b")]


def refused(item, inputs):
    with pytest.raises(InputError) as info:
        features_of(item, inputs)
    return str(info.value)


# Tensors


def test_tensors_are_taken_by_name_and_left_in_place():
    item = tensor_item({"b": torch.tensor(7), "a": torch.tensor([1.0, 2.0])})
    features = features_of(item, TWO)
    assert features["a"].tolist() == [1.0, 2.0]
    assert features["b"].item() == 7
    item.payload[0] = 9
    assert features["b"].item() == 9


def test_a_single_tensor_needs_no_name():
    tensor = torch.arange(6.0).reshape(2, 3)
    features = features_of(tensor_item({"": tensor}), [spec("float32", -1, 3)])
    assert torch.equal(features["x"], tensor)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": torch.zeros(2)}, "'b' missing: expected 'a' and 'b'"),
        (
            {"a": torch.zeros(2), "b": torch.tensor(1), "c": torch.zeros(1)},
            "input 'c' is unknown: expected 'a' and 'b'",
        ),
        ({"": torch.zeros(2)}, "input '' is unknown: expected 'a' and 'b'"),
        (
            {"a": torch.zeros(2, dtype=torch.float64), "b": torch.tensor(1)},
            "tensor 'a': expected float32, found float64",
        ),
        (
            {"a": torch.zeros(3), "b": torch.tensor(1)},
            "tensor 'a': expected shape [2], found [3]",
        ),
        (
            {"a": torch.zeros(1, 2), "b": torch.tensor(1)},
            "tensor 'a': expected shape [2], found [1, 2]",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tensors, message):
    assert refused(tensor_item(tensors), TWO) == message


def test_a_free_dimension_takes_any_length_and_an_empty_shape_any_rank():
    anything = [TensorSpec(name="x", dtype="float32", shape=())]
    for shape in [(), (4,), (2, 3, 4)]:
        assert features_of(tensor_item({"x": torch.zeros(shape)}), anything)["x"].shape == shape
    assert features_of(json_item([[1, 2]]), anything)["x"].tolist() == [[1.0, 2.0]]
    message = refused(tensor_item({"x": torch.zeros(4, 2)}), [spec("float32", -1, 3)])
    assert message == "tensor 'x': expected shape [any, 3], found [4, 2]"


def test_names_that_occur_twice_and_tensors_that_end_after_the_payload_are_refused():
    headers = [TensorHeader("x", "uint8", (1,), 0), TensorHeader("x", "uint8", (1,), 1)]
    item = Item(kind="tensors", payload=memoryview(bytearray(2)), headers=headers)
    assert refused(item, [spec("uint8", 1)]) == "input 'x' occurs 2 times"
    header = TensorHeader("x", "float32", (2,), 0)
    item = Item(kind="tensors", payload=memoryview(bytearray(4)), headers=[header])
    assert "end after the payload" in refused(item, [spec("float32", 2)])


# JSON


@pytest.mark.parametrize(
    ("dtype", "shape", "value"),
    [
        ("float32", (2, 2), [[1, 2.5], [-3, 4e3]]),
        ("float32", (), 1.5),
        ("float16", (2,), [1.0, 0.5]),
        ("bfloat16", (2,), [1.0, 0.5]),
        ("int64", (-1,), [1, -(2**63), 2**63 - 1]),
        ("uint8", (3,), [0, 128, 255]),
        ("uint64", (1,), [2**64 - 1]),
        ("bool", (2,), [True, False]),
        ("float32", (0,), []),
    ],
)
def test_nested_numbers_become_a_tensor_of_the_dtype(dtype, shape, value):
    tensor = features_of(json_item(value), [spec(dtype, *shape)])["x"]
    assert tensor.dtype == getattr(torch, dtype)
    assert tensor.tolist() == value


def test_an_only_input_may_be_named_and_several_must_be():
    assert features_of(json_item({"x": [1, 2]}), [spec("int32", 2)])["x"].tolist() == [1, 2]
    assert features_of(json_item(b' \n {"b": 3, "a": [1, 2]}'), TWO)["b"].item() == 3
    assert refused(json_item([1, 2]), TWO) == "instance: expected an object with 'a' and 'b'"
    assert refused(json_item({"a": [1, 2]}), TWO) == "'b' missing: expected 'a' and 'b'"
    assert "'y' is unknown" in refused(json_item({"y": 1}), [spec()])


@pytest.mark.parametrize(
    ("dtype", "shape", "value", "message"),
    [
        ("float32", (-1, 3), [[1, 2, 3], [4, 5]], "instance[1]: expected 3 numbers, found 2"),
        ("float32", (-1, -1), [[1, 2, 3], [4, 5]], "instance[1]: expected 3 numbers, found 2"),
        ("float32", (-1, 3), [[1, 2], [3, 4]], "instance[0]: expected 3 numbers, found 2"),
        ("float32", (2, 1), [[1]], "instance: expected 2 lists, found 1"),
        ("float32", (2,), [[1, 2]], "instance: expected 2 numbers, found 1"),
        ("float32", (1,), [[1, 2]], "instance[0]: expected a number, found a list"),
        ("float32", (2, 2), [1, 2], "instance[0]: expected 2 numbers, found the number 1"),
        ("float32", (-1, -1), 5, "instance: expected a list, found the number 5"),
        ("float32", (2,), "ab", "instance: expected 2 numbers, found a string"),
        ("float32", (2,), [1, None], "instance[1]: expected a number, found null"),
        ("float32", (2,), [1, True], "instance[1]: expected a number, found true"),
        ("float32", (2,), [1, {}], "instance[1]: expected a number, found an object"),
        ("float32", (2,), [1, 1e39], "instance[1]: the number is out of range for float32"),
        ("bfloat16", (1,), [1e39], "instance[0]: the number is out of range for bfloat16"),
        ("float16", (1, 1), [[7e4]], "instance[0][0]: the number is out of range for float16"),
        ("int64", (2,), [1, 1.5], "instance[1]: expected a whole number, found the number 1.5"),
        ("int64", (2,), [1, 2.0], "instance[1]: expected a whole number, found the number 2.0"),
        ("int64", (2,), [1, False], "instance[1]: expected a whole number, found false"),
        ("uint8", (2,), [1, 256], "instance[1]: 256 is out of range for uint8 (0 to 255)"),
        ("uint8", (1,), [-1], "instance[0]: -1 is out of range for uint8 (0 to 255)"),
        ("bool", (2,), [True, 1], "instance[1]: expected true or false, found the number 1"),
    ],
)
def test_json_that_does_not_fit_is_refused_where_it_does_not(dtype, shape, value, message):
    assert refused(json_item(value), [spec(dtype, *shape)]) == message


def test_the_place_names_the_input_where_there_are_several():
    message = refused(json_item({"a": [1, "x"], "b": 1}), TWO)
    assert message == "instance.a[1]: expected a number, found a string"


@pytest.mark.parametrize(
    "text",
    [b"", b"[1, 2", b"[NaN]", b"[1e999]", b"\xff", b'{"x": [1}', b"[" * 5000, b'{"x":' * 5000],
)
def test_malformed_json_is_refused(text):
    assert refused(json_item(text), [spec("float32", 1)])


def test_a_large_list_is_refused_at_the_one_value_that_is_wrong():
    values: Any = np.zeros((64, 64, 3)).tolist()
    values[63][5][2] = "7"
    message = refused(json_item(values), [spec("float32", -1, -1, 3)])
    assert message == "instance[63][5][2]: expected a number, found a string"


# Other kinds


@pytest.mark.parametrize("item", [image_item(b"\xff\xd8"), bytes_item(b"abc")])
def test_other_kinds_are_told_what_this_model_takes(item):
    message = refused(item, TWO)
    assert re.search(r"'a' \(float32 \[2\]\) and 'b' \(int64 \[\]\)", message)


def test_a_model_without_inputs_must_define_preprocess():
    with pytest.raises(NotImplementedError, match="inputs"):
        Model().preprocess(json_item([1]))


def test_json_of_an_item_that_is_not_json_is_an_input_error():
    with pytest.raises(InputError, match="malformed"):
        json_item(b"{]").json()


# What is in base64


def b64(data: bytes) -> dict[str, str]:
    return {"b64": base64.b64encode(data).decode()}


def test_bytes_in_base64_are_decoded_wherever_they_are():
    value = {"a": b64(b"one"), "list": [1, [b64(b"\xff")], {"b64": 1}], "b64": "no", "e": b64(b"")}
    assert json_item(value).json() == {
        "a": b"one",
        "list": [1, [b"\xff"], {"b64": 1}],
        "b64": "no",
        "e": b"",
    }


@pytest.mark.parametrize("text", ["!", "YQ", "Y Q="])
def test_malformed_base64_is_refused_with_its_place(text: str):
    with pytest.raises(InputError, match=r"instance\.a\[0\]\.b64: not base64"):
        json_item({"a": [{"b64": text}]}).json()


def test_url_safe_base64_is_left_to_the_model():
    value = {"a": [{"b64": "-_8="}, {"b64": "YQ-_"}]}
    assert json_item(value).json() == value


def test_a_tensor_may_come_as_its_bytes_in_base64():
    inputs = [spec("float32", -1, 2, name="x"), spec("bool", 2, name="ok")]
    x = np.arange(4, dtype="<f4").reshape(2, 2)
    found = features_of(json_item({"x": b64(x.tobytes()), "ok": b64(b"\x00\x02")}), inputs)
    assert torch.equal(found["x"], torch.tensor(x))
    assert found["ok"].tolist() == [False, True]


@pytest.mark.parametrize(
    ("inputs", "value", "message"),
    [
        ([spec("float32", 2)], {"x": b64(b"1234")}, "the bytes of float32 [2], found 4 bytes"),
        ([spec("float32", -1)], {"x": b64(b"123")}, "the bytes of float32 [any], found 3 bytes"),
        ([spec("int8", -1, -1)], {"x": b64(b"12")}, "whose shape they do not tell"),
        ([spec("int8", -1)], {"x": {"b64": "!"}}, "instance.x.b64: not base64 in a string"),
        ([spec("int8", -1)], {"x": {"b65": ""}}, "expected a list, found an object"),
    ],
)
def test_bytes_that_are_no_such_tensor_are_refused(inputs, value, message):
    assert message in refused(json_item(value), inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("numbers", "place"),
    [
        ([1.0, -2.0], None),
        ([torch.inf, -torch.inf], "tensor 'x': inf at [0]"),
        ([0.0, -torch.inf, torch.nan], "tensor 'x': -inf at [1]"),
    ],
)
def test_the_first_number_that_is_not_finite_is_found(numbers, place, dtype):
    assert place_of_non_finite("x", torch.tensor(numbers, dtype=dtype)) == place


def test_large_numbers_are_finite_even_if_their_sum_is_not():
    assert place_of_non_finite("x", torch.full((9,), 3e38)) is None
