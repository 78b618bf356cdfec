"""Reads the instances of a request body, by its content type. Runs in the event loop."""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from inferpool.models.attached import attached
from inferpool.models.json_errors import BYTE_ORDER_MARK
from inferpool.service.api.codecs import parameters
from inferpool.service.api.codecs.body import BodyContext, Decoded, Payload
from inferpool.service.api.codecs.json import decode_json, is_image
from inferpool.service.errors import (
    InvalidInputError,
    UnsupportedTypeError,
)

Decoder = Callable[[Sequence[bytes], BodyContext], Decoded]

TYPES = (
    "image/*",
    "multipart/form-data",
    "application/json",
    "application/octet-stream",
    "application/x-npy",
    "application/safetensors",
    "text/plain",
)
"""The content types that are read, for messages and for the documentation."""

_NPY_MAGIC = b"\x93NUMPY"
_START_BYTES = 64
"""Bytes that tell what a body is; each chunk has one at least."""

_JSON_STARTS = frozenset(bytes((code,)) for code in b'{["-0123456789tfn')


def _decoder(name: str) -> Decoder:
    """Return a decoder that is imported with the first body that it reads."""
    return lambda chunks, head: attached(name)(chunks, head)


_decode_raw, _decode_npy = _decoder("body of raw bytes"), _decoder("body of npy")
_decode_safetensors = _decoder("body of safetensors")
_DECODERS: dict[bytes, Decoder] = {
    b"application/json": decode_json,
    b"application/octet-stream": _decode_raw,
    b"binary/octet-stream": _decode_raw,  # what S3 says of files without a type
    b"application/x-npy": _decode_npy,
    b"application/npy": _decode_npy,
    b"application/safetensors": _decode_safetensors,
    b"application/x-safetensors": _decode_safetensors,
    b"application/vnd.safetensors": _decode_safetensors,
}


def decode(
    content_type: bytes,
    chunks: Sequence[bytes],
    head: BodyContext,
    types: Sequence[str] = TYPES,
    *,
    may_guess: bool = True,
) -> Decoded:
    """Read a body.

    Args:
        content_type: Its content type; empty if there is none.
        chunks: The body, in pieces as they came.
        head: Everything else about it.
        types: The content types to name if this one is unknown.
        may_guess: A body without a content type is what its first bytes say, if they do.

    Raises:
        BadRequestError: The body cannot be read.
        InvalidInputError: It does not fit the model, or the form of its type.
        TooLargeError: It holds too much.
        UnsupportedTypeError: Nothing here reads its type or encoding.
    """
    decoder = _DECODERS.get(content_type)
    if decoder is None and may_guess and not content_type.strip():
        decoder = _guess(chunks, head)
    if decoder is None:
        decoder = (
            _decode_image if content_type.startswith(b"image/") else _find(content_type, types)
        )
    check_encoding(head.headers)
    return decoder(chunks, head)


def check_encoding(headers: Mapping[bytes, bytes]) -> None:
    """Refuse a body that is compressed, or has another `Content-Encoding`.

    Raises:
        UnsupportedTypeError: It has one.
    """
    encoding = headers.get(b"content-encoding")
    if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
        error = UnsupportedTypeError(
            f"Content-Encoding: {encoding[:40].decode('latin-1')} is not supported; send the body "
            "without an encoding"
        )
        error.is_encoding = True
        raise error


def _guess(chunks: Sequence[bytes], head: BodyContext) -> Decoder | None:
    """Return the decoder of a body without a content type; None if its start does not tell."""
    start = _start_of(chunks)
    if b"x-tensor-dtype" in head.headers or b"x-tensor-shape" in head.headers:
        return _decode_raw
    if is_image(start):
        # The next body under this head may be something else, so this one has been looked at.
        return lambda chunks, head: msgspec.structs.replace(
            _decode_image(chunks, head), is_whole=False
        )
    if start.startswith(_NPY_MAGIC):
        return _decode_npy
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < sum(map(len, chunks)):
        return _decode_safetensors
    return decode_json if _is_json_body(start, head) else None


def _start_of(chunks: Sequence[bytes]) -> bytes:
    return b"".join(chunk[:_START_BYTES] for chunk in chunks[:_START_BYTES])[:_START_BYTES]


def _is_json_body(start: bytes, head: BodyContext) -> bool:
    """Return whether a body may be JSON: an object, or any value where it stands for itself."""
    first = start.removeprefix(BYTE_ORDER_MARK).lstrip()[:1]
    return first == b"{" or (not head.interface.envelope and first in _JSON_STARTS)


def _find(content_type: bytes, types: Sequence[str]) -> Decoder:
    """Return the decoder of a content type with parameters, or in another case."""
    bare = content_type.partition(b";")[0].strip().lower()
    if bare in _DECODERS:
        return _DECODERS[bare]
    if bare.startswith(b"image/"):
        return _decode_image
    if bare == b"text/plain":
        return lambda chunks, head: attached("text")(content_type, chunks, head)
    if bare == b"multipart/form-data":
        return lambda chunks, head: attached(f"form as {head.interface.form}")(
            content_type, chunks, head
        )
    if bare == b"application/x-www-form-urlencoded":
        return _decode_untyped
    known = ", ".join(types)
    if not bare:
        raise UnsupportedTypeError(f"Content-Type is missing; use one of {known}")
    raise UnsupportedTypeError(
        f"Content-Type {bare[:80].decode('latin-1')!r} is not supported; use one of {known}"
    )


def _decode_untyped(chunks: Sequence[bytes], head: BodyContext) -> Decoded:
    """Read what curl sends with -d alone: JSON under a type that no user has chosen."""
    if _is_json_body(_start_of(chunks), head):
        return decode_json(chunks, head)
    raise UnsupportedTypeError(
        "application/x-www-form-urlencoded is what curl sends with -d; only JSON may have it. "
        "Send a form with -F NAME=VALUE, or add -H 'Content-Type: image/jpeg', or another of "
        + ", ".join(TYPES)
    )


def _decode_image(chunks: Sequence[bytes], head: BodyContext) -> Decoded:
    if not any(chunks):
        raise InvalidInputError("the body is empty; it must be an encoded image")
    rest = b""
    if head.query:
        rest = parameters.merge(parameters.from_query(head.query))
    return Decoded([Payload("image", chunks)], False, rest, is_whole=True)
