"""Bodies of type application/json, in Vertex AI's form.

{"instances": [...], "parameters": {...}}. An instance {"b64": "..."} is an encoded image, or bytes.
Any other goes to the model as JSON text: here it is only checked to be JSON; a worker decodes its
numbers, and base64 inside of it. If a key is given twice, the last counts.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

import msgspec
from msgspec import Raw

from inferpool.models.attached import attached
from inferpool.models.json_errors import BYTE_ORDER_MARK, JsonErrors, json_message
from inferpool.models.spec import USUAL_INTERFACE, Interface
from inferpool.service.api.codecs import parameters
from inferpool.service.api.codecs.body import BodyContext, Decoded, Payload
from inferpool.service.errors import (
    BadRequestError,
    InvalidInputError,
    ServiceError,
    TooLargeError,
)

_LARGE_BYTES = 64 * 1024
"""Beyond this size, decoding stops at the first instance too many.

A body of 16 MiB may hold eight million: as a list of Python objects they take 450 MB, measured.
"""

_NOTHING = Raw()


class _Body(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    instances: list[Raw]
    parameters: Raw = _NOTHING


class _Base64Instance(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    b64: bytes
    """msgspec decodes base64 while it parses, three times as fast as `binascii`."""


_body = msgspec.json.Decoder(_Body)
_encoded = msgspec.json.Decoder(_Base64Instance)
_any = msgspec.json.Decoder(Raw)
SPACE = b" \t\r\n"
"""Characters that JSON may have between its values."""


def decode_json(chunks: Sequence[bytes], head: BodyContext) -> Decoded:
    """Read a JSON body.

    Raises:
        BadRequestError: It is not JSON.
        InvalidInputError: It is JSON of another form.
        TooLargeError: It is too long, or has too many instances or too long parameters.
    """
    text = b"".join(chunks).removeprefix(BYTE_ORDER_MARK)
    if len(text) > head.limits.max_json_bytes:
        raise TooLargeError(
            f"the body is larger than {head.limits.max_json_bytes} bytes, the limit for JSON (the "
            "setting max_json_bytes); send tensors as safetensors or npy, and images as they are "
            "or in a form: these may have as many bytes as max_body_bytes says"
        )
    if not text:
        raise BadRequestError("the body is empty, and JSON is expected")
    if parameters.is_too_deep(text):
        raise InvalidInputError(f"the body is nested more than {parameters.MAX_DEPTH} deep")
    if not head.interface.envelope:
        return attached("document")(text, head)  # type: ignore[no-any-return]  # it has no type
    max_instances = head.limits.max_instances
    try:
        if not text.isascii():
            text.decode()  # msgspec skips over strings without looking for errors in their UTF-8
        is_large = len(text) > _LARGE_BYTES
        body = _decode_large(text, max_instances) if is_large else _body.decode(text)
    except msgspec.ValidationError as error:
        raise _misshapen(str(error), max_instances) from None
    except JsonErrors as error:
        raise BadRequestError(f"the body: {json_message(error, text)}") from None
    if not body.instances:
        raise InvalidInputError("instances: is empty; one instance at least is needed")
    if len(body.instances) > max_instances:
        raise _too_many(max_instances)
    given = parameters.from_query(head.query)
    return Decoded(
        payloads=_payloads(body.instances, head.interface),
        is_batch=True,
        parameters=parameters.merge(given, bytes(body.parameters)),
    )


def decode_instance(text: bytes, interface: Interface = USUAL_INTERFACE) -> Payload:
    """Read a text that is one instance, as it would be in the list of a body.

    Raises:
        BadRequestError: It is not JSON.
        InvalidInputError: It is nested too deep, or is not base64 where it must be.
    """
    text = text.strip(SPACE)
    if parameters.is_too_deep(text):
        raise InvalidInputError(f"nested more than {parameters.MAX_DEPTH} deep")
    try:
        if not text.isascii():
            text.decode()  # msgspec skips over strings, as in `decode_json`
        _any.decode(text)
    except JsonErrors as error:
        raise BadRequestError(json_message(error, text)) from None
    return reader_of(interface)(memoryview(text))


def reader_of(interface: Interface) -> Callable[[memoryview], Payload]:
    """Return the function that reads an instance that is known to be JSON, without space around."""
    if interface.envelope and not interface.accepts and interface.form == "instances":
        return payload_of
    return partial(attached("payload by interface"), interface=interface)


def image_or_bytes(content: bytes) -> Payload:
    """Return a payload of bytes without a type: an image if they begin like one."""
    return Payload("image" if is_image(content) else "bytes", (content,))


def is_image(content: bytes) -> bool:
    """Return whether bytes begin like an image in a common format."""
    if content.startswith(
        (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"II*\0", b"MM\0*")
    ):
        return True
    return (content[:4] == b"RIFF" and content[8:12] == b"WEBP") or (
        content[4:8] == b"ftyp" and content[8:12] in (b"avif", b"avis", b"heic", b"heix", b"mif1")
    )


def _payloads(instances: Iterable[Raw], interface: Interface) -> list[Payload]:
    payloads, read = [], reader_of(interface)
    for index, raw in enumerate(instances):
        try:
            payloads.append(read(memoryview(raw)))
        except ServiceError as error:
            place = error.message.removeprefix("instance")
            dot = "" if place[:1] == ":" else "."
            raise type(error)(f"instances[{index}]{dot}{place}") from None
    return payloads


def payload_of(text: memoryview) -> Payload:
    """Return the payload of an instance that is known to be JSON, without space around it."""
    payload = _decode_b64(text) if text[0] == 0x7B and text[-1] == 0x7D else None
    return payload or Payload("json", (text,))


def _decode_b64(text: memoryview) -> Payload | None:
    """Decode an instance of the form {"b64": "..."}; return None if it has another form."""
    try:
        return image_or_bytes(_encoded.decode(text).b64)
    except msgspec.ValidationError as error:
        message = str(error)
    except JsonErrors as error:
        raise BadRequestError(f"b64: {json_message(error, text)}") from None
    if not message.endswith("`$.b64`"):
        return None
    raise InvalidInputError(
        "b64: not base64 in a string (the standard alphabet with its padding, no line breaks, no "
        "data: prefix)"
    )


def _misshapen(message: str, max_instances: int) -> InvalidInputError | TooLargeError:
    """Return what is wrong with a body of another form, from msgspec's message."""
    if "at most length" in message:
        return _too_many(max_instances)
    form = 'the body must be {"instances": [...], "parameters": {...}}'
    return InvalidInputError(f"{form}: {message.replace('`$.', '`')}")


def _too_many(max_instances: int) -> TooLargeError:
    return TooLargeError(f"instances: more than {max_instances}, the limit for one request")


def _decode_large(text: bytes, max_instances: int) -> _Body:
    body = _bounded(max_instances).decode(text)
    fields = msgspec.structs.astuple(body.instances)
    return _Body([raw for raw in fields if raw is not _NOTHING], body.parameters)


@lru_cache
def _bounded(max_instances: int) -> "msgspec.json.Decoder[Any]":
    """Return a decoder for at most this number of instances: an array of optional fields."""
    fields = [(f"i{index}", Raw, _NOTHING) for index in range(max_instances)]
    array = msgspec.defstruct("Instances", fields, array_like=True, forbid_unknown_fields=True)
    body = msgspec.defstruct(
        "Bounded",
        [("instances", array), ("parameters", Raw, _NOTHING)],
        forbid_unknown_fields=True,
    )
    return msgspec.json.Decoder(body)
