"""Elements of BYTES inputs as instances: texts, pictures, bytes, and JSON."""

from collections.abc import Sequence
from math import prod

import msgspec

from inferpool.models.spec import Interface
from inferpool.service.api.codecs.body import Limits, Payload
from inferpool.service.api.codecs.json import SPACE, decode_instance, is_image
from inferpool.service.errors import (
    BadRequestError,
    InvalidInputError,
    ServiceError,
    TooLargeError,
)
from inferpool.service.parts.open_inference.values import InferInput
from inferpool.service.queue.instance import Buffer

_CONTENT_TYPE = "content_type"
_START_BYTES = 32
"""Pictures have a zero byte among their first 32, and texts have none at all."""


def payloads_of(given: InferInput, interface: Interface, limits: Limits) -> list[Payload]:
    """Return one instance for each element of a BYTES input [n] or [n, 1].

    The input's parameter `content_type` says what they are. Without it, they are what the model
    accepts in the place of a text: pictures or bytes; or else pictures if they begin like one,
    texts if they are UTF-8, and bytes.

    Raises:
        BadRequestError: They are not of their type, or its name is unknown.
        InvalidInputError: The shape is another one, or there are none.
        TooLargeError: There are too many, or too long texts.
    """
    place, shape, num = f"input {given.name[:80]!r}", given.shape, len(given.chunks)
    if len(shape) > 2 or (len(shape) == 2 and shape[1] != 1):
        raise InvalidInputError(
            f"{place}: expected BYTES of shape [-1, 1], found {list(shape)}; each element is one "
            "instance"
        )
    if prod(shape) != num:
        raise InvalidInputError(f"{place}: {list(shape)} has {prod(shape)} elements, found {num}")
    if not num:
        raise InvalidInputError(f"{place}: the batch is empty: its first dimension is 0")
    if num > limits.max_instances:
        raise TooLargeError(
            f"{place}: a batch of {num}; the limit for one request is {limits.max_instances}"
        )
    content_type = given.parameters.get(_CONTENT_TYPE, "") if given.parameters else ""
    if not isinstance(content_type, str):
        raise BadRequestError(f"{place}: parameters.{_CONTENT_TYPE} must be a text")
    left, payloads = limits.max_json_bytes, []
    for index, element in enumerate(given.chunks):
        try:
            payload = _payload_of(element, content_type, interface)
        except ServiceError as error:
            raise type(error)(f"{place}, element {index}: {error.message}") from None
        if payload.kind not in ("image", "bytes"):
            left -= len(element)
        if left < 0:
            raise TooLargeError(
                f"{place}: more than {limits.max_json_bytes} bytes, the limit for texts and JSON "
                "(the setting max_json_bytes); send fewer at once"
            )
        payloads.append(payload)
    return payloads


def read_elements(chunks: Sequence[Buffer], place: str, most: int) -> list[Buffer]:
    """Cut the elements of a BYTES tensor: each comes after its length, as a little-endian uint32.

    There may be `most` of them.

    Raises:
        InvalidInputError: They are cut off.
        TooLargeError: There are too many.
    """
    data = memoryview(chunks[0] if len(chunks) == 1 else b"".join(chunks))
    elements: list[Buffer] = []
    position, end = 0, len(data)
    while position < end:
        start = position + 4
        position = start + int.from_bytes(data[position:start], "little")
        if position > end or start > end:
            raise InvalidInputError(
                f"{place}: element {len(elements)} is cut off; each is its length in 4 bytes, "
                "little-endian, and then itself"
            )
        if len(elements) == most:
            raise TooLargeError(f"{place}: more than {most} elements, the limit for one request")
        elements.append(data[start:position])
    return elements


def _payload_of(element: Buffer, content_type: str, interface: Interface) -> Payload:
    """Return an element as an instance; MLServer says "str" for a text."""
    match content_type.partition(";")[0].strip().lower():
        case "":
            return _guessed(element, interface)
        case "application/json":
            return decode_instance(bytes(element), interface)
        case "text/plain" | "str":
            return _text(element)
        case "application/octet-stream":
            return Payload("bytes", (element,))
        case other if other.startswith("image/"):
            return Payload("image", (element,))
        case other:
            raise BadRequestError(
                f"parameters.content_type: {other[:40]!r} is not one of application/json, "
                "text/plain, image/*, application/octet-stream"
            )


def _guessed(element: Buffer, interface: Interface) -> Payload:
    if interface.accepts:
        return Payload(interface.accepts, (element,))
    start = bytes(element[:_START_BYTES])
    takes_documents = not interface.envelope or interface.form == "instance"
    if takes_documents and start.lstrip(SPACE)[:1] in (b"{", b"["):
        return decode_instance(bytes(element), interface)
    if is_image(start) and b"\0" in start:
        return Payload("image", (element,))
    try:
        return _text(element)
    except BadRequestError:
        return Payload("image" if is_image(start) else "bytes", (element,))


def _text(element: Buffer) -> Payload:
    try:
        text = bytes(element).decode()
    except UnicodeDecodeError as error:
        raise BadRequestError(f"byte {error.start} is not UTF-8") from None
    return Payload("json", (msgspec.json.encode(text),))
