import io
import json
import time
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from inferpool.service.api.codecs.answers import AnswerFormat, Outcome, choose_format, encode
from inferpool.service.api.exchange import lines_of, pairs_of
from inferpool.service.client.safetensors import read_safetensors
from inferpool.service.client.tensors import by_output, to_numpy
from inferpool.service.errors import (
    InvalidInputError,
    NotAcceptableError,
)
from inferpool.service.queue.instance import Result
from inferpool.workers.shared.messages import TensorBlob
from tests.service.api.fakes import result

A = np.arange(6, dtype=np.float32).reshape(2, 3)
FLAGS = np.array([True, False, True])


def tensors(**arrays: np.ndarray[Any, Any]) -> Result:
    blobs = [
        TensorBlob(name, array.dtype.name, array.shape, array.tobytes())
        for name, array in arrays.items()
    ]
    return result(blobs)


def answer(
    chosen: AnswerFormat,
    *outcomes: Outcome,
    is_batch: bool = True,
    output: str | None = None,
) -> tuple[int, dict[str, str], bytes]:
    status, headers, body = encode(
        chosen, outcomes, is_batch=is_batch, output=output, request_id="id", path="/predict"
    )
    found = {name.decode(): value.decode() for name, value in headers}
    assert found["content-length"] == str(len(body))
    return status, found, body


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, "json"),
        (b"*/*", "json"),
        (b"application/json", "json"),
        (b"application/*", "json"),
        (b"text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", "json"),
        (b"application/x-npy", "npy"),
        (b"Application/X-NPY", "npy"),
        (b"application/x-npz, application/x-npy;q=0.5", "npz"),
        (b"application/safetensors, */*;q=0.1", "safetensors"),
        (b"application/json;q=0.5, application/octet-stream;q=0.9", "raw"),
        (b"application/json;q=0.5, application/x-npy;q=0.5", "json"),
        (b"*/*, application/json;q=0", "npy"),
        (b"application/json ; q=bad, application/npy", "npy"),
    ],
)
def test_accept_chooses_the_form(accept: bytes | None, expected: AnswerFormat) -> None:
    assert choose_format(accept) == expected


@pytest.mark.parametrize(
    "accept", [b"text/html", b"image/*", b"application/json;q=0", b"", b"\xff"]
)
def test_other_forms_are_not_acceptable(accept: bytes) -> None:
    with pytest.raises(NotAcceptableError, match="allows none of application/json"):
        choose_format(accept)


@pytest.mark.parametrize("chosen", ["npy", "npz", "safetensors", "raw"])
def test_tensors_have_no_place_for_an_error(chosen: AnswerFormat) -> None:
    status, _, body = answer(chosen, tensors(y=A), InvalidInputError("no"))
    problem = json.loads(body)
    assert (status, problem["code"]) == (422, "invalid_input")
    assert [each["index"] for each in problem["errors"]] == [1]


def test_npy_holds_the_output_of_one_instance_or_stacks_those_of_a_batch() -> None:
    _, headers, body = answer("npy", tensors(y=A), is_batch=False)
    assert headers["content-type"] == "application/x-npy"
    assert np.array_equal(np.load(io.BytesIO(body)), A)
    assert np.array_equal(np.load(io.BytesIO(answer("npy", tensors(y=A))[2])), A[None])
    both = answer("npy", tensors(y=A), tensors(y=A + 1))[2]
    assert np.array_equal(np.load(io.BytesIO(both)), np.stack([A, A + 1]))
    chosen = answer("npy", tensors(y=A, z=FLAGS), output="z", is_batch=False)[2]
    assert np.array_equal(np.load(io.BytesIO(chosen)), FLAGS)


@pytest.mark.parametrize("shape", [(), (1,), (3, 0), (1,) * 12])
def test_npy_of_any_shape_can_be_loaded(shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, np.int64)
    body = answer("npy", tensors(y=array), is_batch=False)[2]
    assert (len(body) - array.nbytes) % 64 == 0
    found = np.load(io.BytesIO(body))
    assert found.shape == shape
    assert found.dtype == array.dtype


@pytest.mark.parametrize(
    ("chosen", "output", "status", "message"),
    [
        ("npy", None, 400, "'y', 'z': choose by ?output=NAME"),
        ("raw", None, 400, "'y', 'z': choose by ?output=NAME"),
        ("npy", "w", 400, "output: the model has no 'w'; it has 'y', 'z'"),
        ("safetensors", "w", 400, "output: the model has no 'w'"),
    ],
)
def test_an_output_that_is_not_chosen_well_is_a_bad_request(
    chosen: AnswerFormat, output: str | None, status: int, message: str
) -> None:
    found, _, body = answer(chosen, tensors(y=A, z=FLAGS), output=output)
    assert found == status
    assert message in json.loads(body)["detail"]


def test_safetensors_hold_all_outputs_or_the_one_chosen() -> None:
    _, headers, body = answer("safetensors", tensors(z=FLAGS, y=A), tensors(z=~FLAGS, y=A + 1))
    assert headers["content-type"] == "application/safetensors"
    found = load(body)
    assert np.array_equal(found["y"], np.stack([A, A + 1]))
    assert np.array_equal(found["z"], np.stack([FLAGS, ~FLAGS]))
    found = load(answer("safetensors", tensors(z=FLAGS, y=A), is_batch=False, output="y")[2])
    assert found.keys() == {"y"}
    assert np.array_equal(found["y"], A)


def of_list(array: np.ndarray[Any, Any], name: str = "boxes") -> TensorBlob:
    return TensorBlob(name, array.dtype.name, array.shape, array.tobytes(), is_ragged=True)


def ragged(*arrays: np.ndarray[Any, Any]) -> list[Result]:
    """Return results of instances that have one output, a list of these arrays."""
    return [result([of_list(each)]) for each in arrays]


def loaded_npz(body: bytes) -> dict[str, np.ndarray[Any, Any]]:
    with np.load(io.BytesIO(body), allow_pickle=False) as file:
        return dict(file)


def test_npz_holds_all_outputs_or_the_one_chosen() -> None:
    _, headers, body = answer("npz", tensors(z=FLAGS, y=A), tensors(z=~FLAGS, y=A + 1))
    assert headers["content-type"] == "application/x-npz"
    found = loaded_npz(body)
    assert list(found) == ["z", "y"]
    assert np.array_equal(found["y"], np.stack([A, A + 1]))
    found = loaded_npz(answer("npz", tensors(z=FLAGS, y=A), is_batch=False, output="y")[2])
    assert list(found) == ["y"]
    assert np.array_equal(found["y"], A)


@pytest.mark.parametrize("is_batch", [False, True])
def test_list_has_an_entry_for_each_instance_even_for_one(is_batch: bool) -> None:
    for chosen, read in (("npz", loaded_npz), ("safetensors", load)):
        found = read(answer(chosen, *ragged(A), is_batch=is_batch)[2])  # type: ignore[operator]
        assert {name: each.shape for name, each in found.items()} == {"boxes.0": (2, 3)}


def test_list_of_several_instances_fits_into_no_form_of_one_tensor() -> None:
    for chosen in ("npy", "raw"):
        status, _, body = answer(chosen, *ragged(A, A))
        assert status == 406
        assert "'boxes' is a list with a tensor for each instance" in json.loads(body)["detail"]
        status, headers, body = answer(chosen, *ragged(A))
        assert (status, headers.get("x-tensor-name", "boxes")) == (200, "boxes")
        assert body.endswith(A.tobytes())


ARRAYS = st.builds(
    lambda dtype, shape, seed: np.random.default_rng(seed).integers(0, 2, shape).astype(dtype),
    st.sampled_from(["bool", "uint8", "int64", "float16", "float32", "float64"]),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.integers(0, 99),
)


@given(st.lists(st.tuples(ARRAYS, ARRAYS), min_size=1, max_size=12))
def test_lists_of_any_shapes_are_read_as_they_were(rows: list[tuple[Any, Any]]) -> None:
    results = [result([of_list(one), of_list(two, "z")]) for one, two in rows]
    npz = loaded_npz(answer("npz", *results)[2])
    body = answer("safetensors", *results)[2]
    lists = by_output(read_safetensors(body), to_numpy)
    assert lists.keys() == {"boxes", "z"}
    for number, row in enumerate(rows):
        for name, wanted in zip(("boxes", "z"), row, strict=True):
            for found in (npz[f"{name}.{number}"], lists[name][number]):
                assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
                assert np.array_equal(found, wanted)


def test_raw_bytes_have_their_shape_in_headers() -> None:
    _, headers, body = answer("raw", tensors(y=A))
    assert body == A.tobytes()
    assert headers["x-tensor-name"] == "y"
    assert headers["x-tensor-dtype"] == "float32"
    assert headers["x-tensor-shape"] == "1,2,3"


@given(st.lists(st.text(max_size=8), min_size=1, max_size=3, unique=True), st.text(max_size=8))
def test_no_name_adds_a_header_or_ends_one(names: list[str], output: str) -> None:
    blobs = [TensorBlob(name, "bool", (3,), FLAGS.tobytes()) for name in names]
    for chosen in ("npy", "safetensors", "raw", *(["npz"] if "\0" not in "".join(names) else [])):
        status, headers, _ = encode(
            chosen, [result(blobs)], is_batch=False, output=output if output in names else names[0],
            request_id="id", path="/predict",
        )  # fmt: skip
        assert status == 200
        assert len(pairs_of(lines_of(headers))) == len(headers)
        found = dict(headers).get(b"x-tensor-name", b"").decode()
        assert unquote(found) == (output if output in names else names[0]) * (chosen == "raw")


@pytest.mark.parametrize("value", [b"a\r\nb: c", b"a\nb", b"a\rb", b"\0", b"\x7f", b"\xfc", b"\t"])
def test_a_header_that_would_end_its_line_is_not_written(value: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        lines_of([(b"x", b"fine"), (b"x", value)])
    with pytest.raises(ValueError, match="cannot be sent"):
        lines_of([(value, b"fine")])


def test_safetensors_of_very_many_outputs_take_time_for_each_alone() -> None:
    blobs = [TensorBlob(f"y{number}", "uint8", (1,), b"1") for number in range(20_000)]
    began = time.process_time()
    answer("safetensors", result(blobs), result(blobs))
    assert time.process_time() - began < 5  # some 0.1 s; 20 s, were each looked for


def test_a_dtype_that_a_form_cannot_hold_is_not_acceptable() -> None:
    blob = TensorBlob("y", "bfloat16", (1,), b"12")
    status, _, body = answer("npy", result([blob]))
    assert status == 406
    assert "bfloat16, which output 'y' is; accept" in json.loads(body)["detail"]
    z = np.array([1j], np.complex64)
    status, _, body = answer("safetensors", tensors(y=A, z=z))
    assert (status, json.loads(body)["detail"][:43]) == (
        406, "safetensors has no complex64, which output ",
    )  # fmt: skip
    assert answer("safetensors", tensors(y=A, z=z), output="y")[0] == 200
    assert answer("raw", tensors(z=z))[2] == z.tobytes()


def test_outputs_of_different_shapes_do_not_stack() -> None:
    status, _, body = answer("npy", tensors(y=A), tensors(y=A[:1]))
    assert status == 406
    assert "differs in shape" in json.loads(body)["detail"]
    status, _, body = answer("safetensors", tensors(y=A), tensors(z=A))
    assert (status, json.loads(body)["detail"][:10]) == (406, "output 'y'")
