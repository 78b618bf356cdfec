import io
import json
import re
from collections.abc import Callable, Sequence
from math import prod
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from inferpool.models.spec import TensorSpec
from inferpool.service.api.codecs.body import BodyContext, Decoded, Payload
from inferpool.service.api.codecs.tensors import cut, decode_npy, decode_raw, decode_safetensors
from inferpool.service.errors import BadRequestError, InvalidInputError, ServiceError, TooLargeError
from inferpool.workers.shared.messages import Batch, ItemRef
from tests.service.api.fakes import body_of, head, kinds, spec

Decoder = Callable[[Sequence[bytes], BodyContext], Decoded]
X = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
INSTANCE, BATCH = spec(-1, 4, 2, 3), spec(-1, 2, 3)
"""Models that take `X` as one instance, and as a batch of four."""


def npy(array: np.ndarray[Any, Any], **options: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array, **options)
    return out.getvalue()


def arrays_of(payload: Payload) -> dict[str, np.ndarray[Any, Any]]:
    """Read a payload like a worker: by offset, from memory that is aligned at its start."""
    content = body_of(payload)
    arrays = {}
    for header in payload.headers:
        dtype = np.dtype(header.dtype)
        assert header.offset % dtype.itemsize == 0
        count = header.num_bytes // dtype.itemsize
        array = np.frombuffer(content, dtype, count, header.offset)
        arrays[header.name] = array.reshape(header.shape)
    return arrays


def pieces(content: bytes, size: int) -> list[bytes]:
    return [content[start : start + size] for start in range(0, len(content), size)]


def assert_refused(
    decode: Decoder, content: bytes, asked: BodyContext, error: type[ServiceError], message: str
) -> None:
    """Check that a body is refused alike as a whole and in pieces, wherever these are cut."""
    for size in (len(content) or 1, 1, 4, 7):
        with pytest.raises(error, match=re.escape(message)):
            decode(pieces(content, size), asked)


@pytest.mark.parametrize("size", [1, 7, 13, 1000])
def test_cut_gives_consecutive_views_whatever_the_pieces(size: int) -> None:
    content = bytes(range(200))
    found = cut(pieces(content, size), [10, 0, 90, 100])
    joined = [b"".join(bytes(view) for view in piece) for piece in found]
    assert joined == [content[:10], b"", content[10:100], content[100:]]


def test_raw_bytes_with_dtype_and_shape_are_a_tensor() -> None:
    chunks = pieces(X.tobytes(), 10)
    decoded = decode_raw(chunks, head(b"dtype=float32&shape=4,2,3&name=x&top_k=3"))
    (payload,) = decoded.payloads
    assert payload.chunks == chunks, "they are passed on as they came"
    assert np.array_equal(arrays_of(payload)["x"], X)
    assert json.loads(decoded.parameters) == {"top_k": 3}
    assert not decoded.is_batch
    headers = {b"x-tensor-dtype": b"float32", b"x-tensor-shape": b"24"}
    decoded = decode_raw([X.tobytes()], head(headers=headers))
    assert np.array_equal(arrays_of(decoded.payloads[0])[""], X.ravel())
    scalar = decode_raw([b"\0" * 8], head(b"dtype=int64&shape="))
    assert scalar.payloads[0].headers[0].shape == ()


@pytest.mark.parametrize(
    ("query", "error", "message"),
    [
        (b"dtype=float32", BadRequestError, "shape: is missing"),
        (b"shape=3", BadRequestError, "dtype: is missing"),
        (b"dtype=float33&shape=3", BadRequestError, "dtype: 'float33' is not one of bool, uint8"),
        (b"dtype=float32&shape=3,x", BadRequestError, "shape: '3,x' is no shape such as"),
        (b"dtype=float32&shape=-1", BadRequestError, "shape: '-1'"),
        (b"dtype=float32&shape=3,,3", BadRequestError, "shape: '3,,3'"),
        (b"dtype=float32&shape=" + b"1," * 20, InvalidInputError, "more than 16 dimensions"),
        (b"dtype=float32&shape=3", InvalidInputError, "float32 [3] takes 12 bytes, found 96"),
        (b"dtype=bool&shape=96", InvalidInputError, "a byte other than 0 and 1"),
        (b"dtype=float32&shape=0,2000000", InvalidInputError, "has no elements"),
        (b"dtype=float32&shape=4,2,3&name=a%0d%0ab", InvalidInputError, "cannot be printed"),
    ],
)
def test_a_bad_raw_tensor_is_refused(query: bytes, error: type[ServiceError], message: str) -> None:
    assert_refused(decode_raw, X.tobytes(), head(query), error, message)


def test_a_bool_is_checked_wherever_it_is() -> None:
    """In the last piece, at its end; in a tensor behind another one; in a batch."""
    wrong = b"\0" * 9 + b"\2"
    for size in (3, 10):
        for query, inputs in (
            (b"dtype=bool&shape=10", []),
            (b"dtype=bool&shape=5,2", [spec(-1, 2, dtype="bool")]),
        ):
            with pytest.raises(InvalidInputError, match="a byte other than 0 and 1"):
                decode_raw(pieces(wrong, size), head(query, inputs=inputs))
    both = {name: {"dtype": "BOOL", "shape": [5], "data_offsets": at}
            for name, at in (("a", [0, 5]), ("b", [5, 10]))}  # fmt: skip
    with pytest.raises(InvalidInputError, match="tensor 'b': a bool has a byte other than"):
        decode_safetensors(pieces(raw_safetensors(both, wrong), 4), head())


def test_raw_bytes_without_a_description_are_the_only_input_of_fixed_shape() -> None:
    one = decode_raw([X.tobytes()], head(inputs=[INSTANCE]))
    assert np.array_equal(arrays_of(one.payloads[0])[""], X)
    assert not one.is_batch
    four = decode_raw(pieces(X.tobytes(), 7), head(inputs=[BATCH]))
    assert four.is_batch
    assert [arrays_of(each)[""].tolist() for each in four.payloads] == X.tolist()


@pytest.mark.parametrize(
    "inputs",
    [[], [spec(-1, -1)], [spec()], [BATCH, spec(-1, name="y")], [BATCH]],
    ids=["unknown", "any length", "any shape", "two inputs", "another length"],
)
def test_raw_bytes_are_opaque_unless_they_fit_the_only_input(inputs: list[TensorSpec]) -> None:
    decoded = decode_raw([b"12", b"34"], head(b"top_k=3", inputs=inputs))
    assert kinds(decoded) == [("bytes", b"1234")]
    assert json.loads(decoded.parameters) == {"top_k": 3}


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "uint64", "float16", "float64"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 5)])
def test_npy_arrays_arrive_equal(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtype)
    for size in (5, 128, 10_000):
        (payload,) = decode_npy(pieces(npy(array), size), head(b"name=x")).payloads
        found = arrays_of(payload)["x"]
        assert found.dtype == array.dtype
        assert np.array_equal(found, array)
    for version in ((1, 0), (2, 0), (3, 0)):
        out = io.BytesIO()
        np.lib.format.write_array(out, array, version=version)
        (payload,) = decode_npy([out.getvalue()], head()).payloads
        assert np.array_equal(arrays_of(payload)[""], array)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"", BadRequestError, "not an npy file"),
        (b"\x93NUMPY\x09\0\0\0\0\0\0\0", BadRequestError, "not an npy file"),
        (npy(X)[:60], BadRequestError, "header is damaged"),
        (npy(X).replace(b"fortran_order", b"fortran_ordes"), BadRequestError, "damaged"),
        (b"\x93NUMPY\2\0\xff\xff\0\0" + b" " * 70_000, BadRequestError, "longer than 10000"),
        (npy(X)[:-1], InvalidInputError, "float32 [4, 2, 3] takes 96 bytes, found 95"),
        (npy(X) + b"x", InvalidInputError, "found 97"),
        (npy(np.asfortranarray(X)), InvalidInputError, "numpy.ascontiguousarray"),
        (npy(X.astype(">f4")), InvalidInputError, ">f4 is big-endian; send array.astype('<f4')"),
        (npy(X.astype("c8")), InvalidInputError, "<c8 is not one of bool"),
        (npy(np.array(["text"])), InvalidInputError, "<U4 is not one of"),
        (npy(np.array([{}]), allow_pickle=True), InvalidInputError, "|O is not one of"),
        (npy(np.zeros(2, [("a", "f4")])), InvalidInputError, "a structured dtype is not one of"),
    ],
)
def test_a_bad_npy_file_is_refused(content: bytes, error: type[ServiceError], message: str) -> None:
    assert_refused(decode_npy, content, head(), error, message)


def test_an_array_of_the_rank_of_the_input_is_a_batch_and_is_cut_without_copies() -> None:
    batch = decode_npy(pieces(npy(X), 50), head(inputs=[BATCH]))
    assert batch.is_batch
    assert [arrays_of(each)[""].tolist() for each in batch.payloads] == X.tolist()
    content = npy(X)
    one = decode_npy([content], head(inputs=[INSTANCE]))
    assert not one.is_batch
    assert len(one.payloads) == 1
    decoded = decode_npy([content], head(inputs=[BATCH]))
    views = [view for payload in decoded.payloads for view in payload.chunks]
    assert all(isinstance(view, memoryview) and view.obj is content for view in views)


@pytest.mark.parametrize(
    ("array", "asked", "error", "message"),
    [
        (
            X,
            head(inputs=[spec(-1, 3)]),
            InvalidInputError,
            "tensor 'x': expected shape [3] for one instance or [any, 3] for a batch, "
            "found [4, 2, 3]",
        ),
        (
            X,
            head(b"name=y", inputs=[BATCH]),
            InvalidInputError,
            "tensor 'y': the model has no such input; it has 'x'",
        ),
        (X[:0], head(inputs=[BATCH]), InvalidInputError, "the batch is empty"),
        (
            X,
            head(inputs=[BATCH], max_instances=3),
            TooLargeError,
            "a batch of 4; the limit for one request is 3",
        ),
    ],
)
def test_a_tensor_that_fits_no_input_or_limit_is_refused(
    array: np.ndarray[Any, Any], asked: BodyContext, error: type[ServiceError], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        decode_npy([npy(array)], asked)


def test_safetensors_hold_the_named_inputs_of_one_instance() -> None:
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "a": np.array([1, 2, 3], np.uint8),
        "b": np.array([[0.5]], np.float64),
        "c": np.array([True, False]),
        "d": np.zeros((0, 2), np.float32),
    }
    for size in (3, 100_000):
        chunks = pieces(save(arrays, {"made": "here"}), size)
        (payload,) = decode_safetensors(chunks, head(b"k=1")).payloads
        found = arrays_of(payload)
        assert found.keys() == arrays.keys()
        assert all(np.array_equal(found[name], arrays[name]) for name in arrays)


def test_safetensors_of_a_batch_are_cut_along_it_if_all_agree_about_its_size() -> None:
    ids = np.array([[1], [2], [3], [4]], np.uint8)
    inputs = [spec(-1, 1, name="ids", dtype="uint8"), BATCH]
    decoded = decode_safetensors([save({"ids": ids, "x": X})], head(inputs=inputs))
    assert decoded.is_batch
    for index, payload in enumerate(decoded.payloads):
        found = arrays_of(payload)
        assert found["ids"].tolist() == [index + 1]
        assert np.array_equal(found["x"], X[index])
    with pytest.raises(InvalidInputError, match="disagree about the size of the batch"):
        decode_safetensors([save({"ids": ids[:3], "x": X})], head(inputs=inputs))


def test_bfloat16_is_read_from_safetensors() -> None:
    entry = {"x": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}
    (payload,) = decode_safetensors([raw_safetensors(entry, b"1234")], head()).payloads
    assert payload.headers[0].dtype == "bfloat16"
    assert body_of(payload) == b"1234"


def raw_safetensors(entries: object, data: bytes) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def of_a(described: object) -> bytes:
    """One tensor of the name "a", over four bytes."""
    return raw_safetensors({"a": described}, b"1234")


def entry(begin: int, end: int, dtype: str = "U8", **more: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": [end - begin], "data_offsets": [begin, end], **more}


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"", BadRequestError, "not a safetensors file"),
        (b"\xff" * 100, BadRequestError, "not a safetensors file"),
        (raw_safetensors({}, b""), InvalidInputError, "0 tensors"),
        (raw_safetensors([1], b""), BadRequestError, "the safetensors header: Expected `object`"),
        (raw_safetensors({"a": {"dtype": "U8"}}, b""), BadRequestError, "missing required field"),
        (of_a(entry(1, 4)), BadRequestError, "leave a gap"),
        (of_a(entry(0, 5)), BadRequestError, "outside the body"),
        (of_a(entry(0, 3)), BadRequestError, "1 bytes too many"),
        (
            raw_safetensors({"a": entry(0, 3), "b": entry(2, 4)}, b"1234"),
            BadRequestError,
            "tensor 'b': its bytes 2 to 4",
        ),
        (of_a(entry(0, 4, "F9")), InvalidInputError, "F9 is not one of"),
        (of_a(entry(0, 4, "F32")), InvalidInputError, "'a': float32 [4] takes 16 bytes, found 4"),
        (of_a(entry(0, 4, shape=[-4])), InvalidInputError, "a dimension of -4"),
        (
            raw_safetensors({"a": entry(0, 0, shape=[10**30, 0])}, b"12"),
            InvalidInputError,
            "tensor 'a': a dimension is more than 1099511627776",
        ),
        (of_a(entry(0, 4, shape=[10**4000] * 3)), InvalidInputError, "a dimension is more than"),
        (
            raw_safetensors({"a": entry(0, 0, shape=[0, 2**21])}, b"12"),
            InvalidInputError,
            "'a': [0, 2097152] has no elements; the product of its other dimensions may be 1048576",
        ),
        (raw_safetensors({"a" * 257: entry(0, 2)}, b"12"), InvalidInputError, "257 characters"),
        (
            raw_safetensors({"a\r\nb": entry(0, 2)}, b"12"),
            InvalidInputError,
            r"tensor 'a\r\nb': its name has characters that cannot be printed",
        ),
        ((4000).to_bytes(8, "little") + b"[" * 4000, BadRequestError, "nested too deep"),
    ],
)
def test_bad_safetensors_are_refused(
    content: bytes, error: type[ServiceError], message: str
) -> None:
    assert_refused(decode_safetensors, content, head(), error, message)


lengths = st.integers(0, 3) | st.integers(0, 2**64) | st.sampled_from([2**40, 2**63, 10**30])


@given(st.lists(lengths, max_size=17), st.text(max_size=4))
def test_torch_can_make_every_decoded_tensor_in_a_worker(shape: list[int], name: str) -> None:
    num_bytes = prod(shape) if prod(shape) <= 4096 else 0
    data = bytes(num_bytes)
    dims = ",".join(map(str, shape))
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({dims},), }}".encode()
    described = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data
    query = f"dtype=uint8&shape={dims}&name={quote(name)}".encode()
    for decode, body in (
        (decode_raw, data),
        (decode_npy, described),
        (decode_safetensors, raw_safetensors({name: entry(0, num_bytes, shape=shape)}, data)),
    ):
        try:
            (payload,) = decode([body], head(query)).payloads
        except ServiceError:
            continue
        ref = ItemRef("tensors", 0, num_bytes, 0.0, headers=payload.headers)
        sent = msgspec.msgpack.encode(Batch(1, [ref]))
        assert msgspec.msgpack.decode(sent, type=Batch).items == [ref]
        assert torch.empty(payload.headers[0].shape).numel() == num_bytes
