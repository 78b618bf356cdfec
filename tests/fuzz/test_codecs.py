"""Nearly right bodies make a value or a typed error in every codec, on both sides of the arena."""

import msgspec
import pytest

from inferpool.models.errors import InputError
from inferpool.models.inputs import features_of
from inferpool.models.item import Item
from inferpool.models.spec import TensorSpec
from inferpool.service.api.codecs.body import Decoded
from inferpool.service.api.codecs.requests import decode
from inferpool.service.errors import ServiceError
from inferpool.workers.messages import ItemRef
from tests.fuzz.inputs import make_input
from tests.service.api.fakes import body_of, head, spec

INPUTS = (
    (),
    (spec(-1, 3),),
    (spec(-1, 2, 3, 4, name="image"),),
    (spec(-1, 3), spec(-1, -1, name="ids", dtype="int64")),
)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # as in a worker
@pytest.mark.parametrize("first", range(0, 1500, 500))
def test_nearly_right_bodies_make_a_value_or_a_typed_error(first: int):
    for number in range(first, first + 500):
        made = make_input(4, number)
        lines, _, body = made.data.partition(b"\r\n\r\n")
        if not made.is_framed or b"\r\ntransfer-encoding: chunked" in lines:
            continue
        content_type = lines.split(b"content-type: ", 1)[1].split(b"\r\n", 1)[0]
        read(content_type, body, INPUTS[number % len(INPUTS)], cut=number % 40)


def read(content_type: bytes, body: bytes, inputs: tuple[TensorSpec, ...], cut: int) -> None:
    """Decode a body as the front end does, and make features of it as a worker does."""
    try:
        decoded = decode(
            content_type, [body[:cut], body[cut:]], head(inputs=inputs, max_instances=8)
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
