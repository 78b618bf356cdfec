"""Bodies that are one instance as they stand: texts, documents, bare base64, forms as one.

Imported with the first text, or where a model's interface asks for it (`models.spec.Interface`).
"""

from collections.abc import Sequence

import msgspec
from msgspec import Raw
from multipart import (  # type: ignore[import-untyped]  # has no annotations
    MultipartSegment,
    parse_options_header,
)

from inferpool.models.json_errors import BYTE_ORDER_MARK, JsonErrors, json_message
from inferpool.models.spec import Interface
from inferpool.models.upload import Upload, pack_form
from inferpool.service.api.codecs import parameters
from inferpool.service.api.codecs.body import BodyContext, Decoded, Payload
from inferpool.service.api.codecs.forms import read_parts
from inferpool.service.api.codecs.json import SPACE, payload_of
from inferpool.service.errors import (
    BadRequestError,
    InvalidInputError,
    ServiceError,
    TooLargeError,
    UnsupportedTypeError,
)

MAX_PARTS = 256
"""The most fields and files of a form that is one instance."""
_any = msgspec.json.Decoder(Raw)
_base64 = msgspec.json.Decoder(bytes)
_HOW = "send each value as -F NAME=VALUE, and each file as -F NAME=@FILE"


def decode_text(content_type: bytes, chunks: Sequence[bytes], head: BodyContext) -> Decoded:
    """Read a text; it goes to the model as the JSON string that it would be in `instances`.

    Raises:
        BadRequestError: It is not UTF-8.
        InvalidInputError: It is empty.
        TooLargeError: It is too long.
        UnsupportedTypeError: It has another charset.
    """
    _, options = parse_options_header(content_type.decode("latin-1"))
    charset = options.get("charset", "utf-8").lower()
    if charset not in ("utf-8", "us-ascii"):
        raise UnsupportedTypeError(
            f"text/plain: charset {charset[:40]!r} is not supported; use utf-8"
        )
    body = b"".join(chunks)
    if len(body) > head.limits.max_json_bytes:
        raise TooLargeError(
            f"the body is larger than {head.limits.max_json_bytes} bytes, the limit for texts (the "
            "setting max_json_bytes); send shorter ones, in several requests"
        )
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise BadRequestError(f"the body: byte {error.start} is not UTF-8") from None
    if not text:
        raise InvalidInputError("the body is empty; it must be a text")
    given = parameters.merge(parameters.from_query(head.query))
    return Decoded([Payload("json", (msgspec.json.encode(text),))], False, given)


def decode_document(text: bytes, head: BodyContext) -> Decoded:
    """Read a JSON body that is one instance as it stands.

    Raises:
        BadRequestError: It is not JSON.
        InvalidInputError: It is to be base64, and is not.
        TooLargeError: The parameters in the query are too long.
    """
    text = text.strip(SPACE)
    _check_json(text, "the body")
    given = parameters.merge(parameters.from_query(head.query))
    return Decoded([payload_by(memoryview(text), head.interface)], False, given)


def payload_by(text: memoryview, interface: Interface) -> Payload:
    """Return the payload of an instance for a model with such an interface.

    Args:
        text: JSON, without space around it.
        interface: It says whether a string is base64, and whether anything else in it is.

    Raises:
        InvalidInputError: A string is to be base64, and is not.
    """
    if interface.accepts and text[0] == 0x22:
        try:
            return Payload(interface.accepts, (_base64.decode(text),))
        except msgspec.ValidationError:
            what = "an encoded picture" if interface.accepts == "image" else "bytes"
            raise InvalidInputError(
                f"instance: a string must be {what} in base64 (the standard alphabet with its "
                "padding, no line breaks, no data: prefix)"
            ) from None
    if not interface.envelope:
        return Payload("document", (text,))
    payload = payload_of(text)
    if interface.form == "instance" and payload.kind == "json":
        return Payload("fields", (text,))
    return payload


def decode_form_as_one(content_type: bytes, chunks: Sequence[bytes], head: BodyContext) -> Decoded:
    """Read a form (RFC 7578) as one instance: an object of its fields and files by name.

    A field is JSON if its type says so, or if it has none and begins with a bracket; else it is a
    text. Parameters come in the query.

    Raises:
        ServiceError: It cannot be read, or holds too much.
    """
    left = head.limits.max_json_bytes
    fields: list[tuple[str, bytes | Upload]] = []
    for segment, content in read_parts(content_type, [b"".join(chunks)], MAX_PARTS):
        assert content is not None  # nothing is too long
        try:
            value = _value_of(segment, content)
        except ServiceError as error:
            raise type(error)(f"field {segment.name[:80]!r}: {error.message}") from None
        if isinstance(value, bytes) and (left := left - len(value)) < 0:
            raise TooLargeError(
                f"the fields are larger than {head.limits.max_json_bytes} bytes, the limit for "
                "texts and JSON (the setting max_json_bytes); send large ones as files"
            )
        fields.append((segment.name, value))
    if not fields:
        raise InvalidInputError(f"the form is empty, and as a whole it is one instance: {_HOW}")
    pieces, headers = pack_form(fields)
    given = parameters.merge(parameters.from_query(head.query))
    pieces = [piece for piece in pieces if piece]
    return Decoded([Payload("form", pieces, headers)], False, given)


def _value_of(segment: MultipartSegment, content: bytes) -> bytes | Upload:
    """Return the JSON of a field, or a file."""
    media_type = (segment.content_type or "").partition(";")[0].strip().lower()
    is_json = media_type == "application/json"
    if segment.filename is not None or not (is_json or media_type[:5] in ("", "text/")):
        name = segment.filename or ""
        return Upload(data=content, media_type=media_type, filename=name)
    content = content.removeprefix(BYTE_ORDER_MARK)
    if is_json or (not media_type and content.lstrip(SPACE)[:1] in (b"[", b"{")):
        content = content.strip(SPACE)
        if parameters.is_too_deep(content):
            raise InvalidInputError(f"nested more than {parameters.MAX_DEPTH} deep")
        try:
            _check_json(content, "it is read as JSON")
        except BadRequestError as error:
            hint = "for a text that begins so, add ;type=text/plain to it"
            raise BadRequestError(f"{error.message}; {hint}") from None
        return content
    try:
        return msgspec.json.encode(content.decode())
    except UnicodeDecodeError as error:
        raise BadRequestError(
            f"byte {error.start} is not UTF-8; send what is no text as a file: -F NAME=@FILE"
        ) from None


def _check_json(text: bytes, place: str) -> None:
    try:
        if not text.isascii():
            text.decode()  # msgspec skips over strings without looking for errors in their UTF-8
        _any.decode(text)
    except JsonErrors as error:
        raise BadRequestError(f"{place}: {json_message(error, text)}") from None
