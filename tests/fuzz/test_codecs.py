"""Any body makes a value or a typed error in every codec, on both sides of the arena."""

import io

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from inferpool.models.errors import InputError
from inferpool.models.inputs import features_of
from inferpool.models.item import Item
from inferpool.models.spec import TensorSpec
from inferpool.service.api.codecs.body import Decoded
from inferpool.service.api.codecs.requests import TYPES, decode
from inferpool.service.api.codecs.tensors import NPY_DTYPES
from inferpool.service.errors import ServiceError
from inferpool.workers.shared.messages import ItemRef
from tests.fuzz.inputs import make_input
from tests.service.api.fakes import body_of, head, spec

pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable")
"""Workers ignore this warning, too."""

INPUTS = (
    (),
    (spec(-1, 3),),
    (spec(-1, 2, 3, 4, name="image"),),
    (spec(-1, 3), spec(-1, -1, name="ids", dtype="int64")),
)
CONTENT_TYPES = (
    *(each.replace("*", "png").encode() for each in TYPES),
    b"multipart/form-data; boundary=0123456789abcdef",
    b"text/plain",
    b"",
)


@settings(max_examples=400)
@given(
    content_type=st.sampled_from(CONTENT_TYPES),
    body=st.binary(max_size=400),
    inputs=st.sampled_from(INPUTS),
    query=st.sampled_from((b"", b"dtype=float32&shape=3", b"shape=2,2&dtype=bool", b"a=1&b=%ff")),
    cut=st.integers(0, 50),
)
def test_any_bytes_make_a_value_or_a_typed_error(
    content_type: bytes, body: bytes, inputs: tuple[TensorSpec, ...], query: bytes, cut: int
) -> None:
    read(content_type, body, inputs, cut, query)


@pytest.mark.parametrize("first", range(0, 1500, 500))
def test_nearly_right_bodies_make_a_value_or_a_typed_error(first: int):
    for number in range(first, first + 500):
        made = make_input(4, number)
        lines, _, body = made.data.partition(b"\r\n\r\n")
        if not made.is_framed or b"\r\ntransfer-encoding: chunked" in lines:
            continue
        content_type = lines.split(b"content-type: ", 1)[1].split(b"\r\n", 1)[0]
        read(content_type, body, INPUTS[number % len(INPUTS)], cut=number % 40)


@pytest.mark.parametrize("content_type", ["application/x-npy", "application/safetensors"])
@pytest.mark.parametrize("dtype", NPY_DTYPES)
@settings(max_examples=10)
@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    raw=st.binary(min_size=8 * 4**4, max_size=8 * 4**4),
    cut=st.integers(0, 300),
)
def test_tensors_of_every_dtype_come_through_as_they_are(
    content_type: str, dtype: str, shape: list[int], raw: bytes, cut: int
) -> None:
    if dtype == "bool":
        raw = bytes(byte > 127 for byte in raw)
    sent = np.frombuffer(raw, dtype)[: int(np.prod(shape))].reshape(shape)
    npy = io.BytesIO()
    np.save(npy, sent)
    body = npy.getvalue() if content_type.endswith("npy") else save({"x": sent})
    inputs = [TensorSpec(name="x", dtype=dtype, shape=(-1, *shape))]
    decoded = decode(
        content_type.encode(), [body[:cut], body[cut:]], head(b"name=x", inputs=inputs)
    )
    (payload,) = decoded.payloads
    item = Item(kind=payload.kind, payload=memoryview(body_of(payload)), headers=payload.headers)
    found = features_of(item, inputs)["x"]
    assert found.shape == sent.shape
    assert found.contiguous().numpy().tobytes() == sent.tobytes()


def read(
    content_type: bytes,
    body: bytes,
    inputs: tuple[TensorSpec, ...],
    cut: int,
    query: bytes = b"",
) -> None:
    """Decode a body as the front end does, and make features of it as a worker does."""
    try:
        decoded = decode(
            content_type, [body[:cut], body[cut:]], head(query, inputs=inputs, max_instances=8)
        )
    except ServiceError:
        return
    assert isinstance(decoded, Decoded)
    assert 0 < len(decoded.payloads) <= 8
    for payload in decoded.payloads:
        data = body_of(payload)
        ref = ItemRef(payload.kind, 0, len(data), 0.0, headers=payload.headers)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(ref), type=ItemRef) == ref
        item = Item(kind=payload.kind, payload=memoryview(data), headers=payload.headers)
        try:
            features = features_of(item, inputs) if inputs else {}
        except InputError:
            continue
        assert set(features) == ({each.name for each in inputs})
        for each in inputs:
            assert str(features[each.name].dtype) == f"torch.{each.dtype}"
            assert features[each.name].dim() == len(each.instance_shape)
