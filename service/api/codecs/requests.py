"""Reads the instances of a request body, by its content type. Runs in the event loop."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec
from multipart import (  # type: ignore[import-untyped]  # ships without annotations
    MultipartError,
    MultipartSegment,
    ParserLimitReached,
    PushMultipartParser,
    parse_options_header,
)

from inferpool.service.api.codecs import parameters
from inferpool.service.api.codecs.body import BodyContext, Decoded, Payload
from inferpool.service.api.codecs.json import decode_json, image_or_bytes, is_image
from inferpool.service.api.codecs.tensors import (
    NPY_MAGIC,
    decode_npy,
    decode_raw,
    decode_safetensors,
    instances_of,
    read_npy,
)
from inferpool.service.errors import (
    BadRequestError,
    InvalidInputError,
    ServiceError,
    TooLargeError,
    UnsupportedTypeError,
)

Decoder = Callable[[Sequence[bytes], BodyContext], Decoded]

NPY_TYPES = ("application/x-npy", "application/npy")
TYPES = (
    "image/*",
    "multipart/form-data",
    "application/json",
    "application/octet-stream",
    NPY_TYPES[0],
    "application/safetensors",
    "text/plain",
)
"""The content types that are read, for messages and for the documentation."""

_DECODERS: dict[bytes, Decoder] = {
    b"application/json": decode_json,
    b"application/octet-stream": decode_raw,
    b"application/x-npy": decode_npy,
    b"application/npy": decode_npy,
    b"application/safetensors": decode_safetensors,
    b"application/x-safetensors": decode_safetensors,
    b"application/vnd.safetensors": decode_safetensors,
}
_MAX_FIELDS = 64
"""Parts of a form that are no files."""


def decode(content_type: bytes, chunks: Sequence[bytes], head: BodyContext) -> Decoded:
    """Read a body, in pieces as they came; `content_type` is empty if there is none.

    Raises:
        BadRequestError: The body cannot be read.
        InvalidInputError: It does not fit the model, or the form of its type.
        TooLargeError: It holds too much.
        UnsupportedTypeError: Nothing here reads its type or encoding.
    """
    decoder = _DECODERS.get(content_type)
    if decoder is None:
        decoder = _decode_image if content_type.startswith(b"image/") else _find(content_type)
    encoding = head.headers.get(b"content-encoding")
    if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
        raise UnsupportedTypeError(
            f"Content-Encoding: {encoding[:40].decode('latin-1')} is not supported; send the body "
            "without an encoding"
        )
    return decoder(chunks, head)


def _find(content_type: bytes) -> Decoder:
    """Return the decoder of a content type with parameters, or in another case."""
    bare = content_type.partition(b";")[0].strip().lower()
    if bare in _DECODERS:
        return _DECODERS[bare]
    if bare.startswith(b"image/"):
        return _decode_image
    if bare == b"text/plain":
        return lambda chunks, head: _decode_text(content_type, chunks, head)
    if bare == b"multipart/form-data":
        return lambda chunks, head: _decode_form(content_type, chunks, head)
    types = ", ".join(TYPES)
    if bare == b"application/x-www-form-urlencoded":
        return _decode_untyped
    if not bare:
        raise UnsupportedTypeError(f"Content-Type is missing; use one of {types}")
    raise UnsupportedTypeError(
        f"Content-Type {bare[:80].decode('latin-1')!r} is not supported; use one of {types}"
    )


def _decode_untyped(chunks: Sequence[bytes], head: BodyContext) -> Decoded:
    """Read what curl sends with -d alone: JSON under a type that nobody has chosen."""
    if next((chunk for chunk in chunks if chunk), b"").lstrip()[:1] == b"{":
        return decode_json(chunks, head)
    raise UnsupportedTypeError(
        "application/x-www-form-urlencoded is what curl sends by default; only a JSON object may "
        f"have it. Add -H 'Content-Type: image/jpeg', or another of {', '.join(TYPES)}"
    )


def _decode_image(chunks: Sequence[bytes], head: BodyContext) -> Decoded:
    if not any(chunks):
        raise InvalidInputError("the body is empty; it must be an encoded image")
    rest = b""
    if head.query:
        rest = parameters.merge(parameters.from_query(head.query))
    return Decoded([Payload("image", chunks)], False, rest, is_whole=True)


def _decode_text(content_type: bytes, chunks: Sequence[bytes], head: BodyContext) -> Decoded:
    """Read a text; it goes to the model as the JSON string that it would be in `instances`."""
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


def _decode_form(content_type: bytes, chunks: Sequence[bytes], head: BodyContext) -> Decoded:
    """Read a form (RFC 7578): each file is an instance, each field a parameter.

    If the model has several inputs, and parts have their names, these parts are one instance.
    """
    form = _Form(head)
    _, options = parse_options_header(content_type.decode("latin-1"))
    try:
        parser = PushMultipartParser(
            options.get("boundary", "").encode("latin-1"),
            max_segment_count=head.limits.max_instances + _MAX_FIELDS,
            strict=True,
        )
        segment: MultipartSegment | None = None
        content: list[bytes] = []
        # All at once: after the last boundary it drops the rest of a chunk, but would refuse a line
        # break that clients may send there in a chunk of its own.
        for event in parser.parse(b"".join(chunks)):
            if isinstance(event, MultipartSegment):
                segment, content = event, []
            elif event is None:
                assert segment is not None
                form.add(segment, b"".join(content))
            else:
                content.append(bytes(event))
        parser.close()
    except ParserLimitReached as error:
        raise TooLargeError(f"the form: {error}") from None
    except (MultipartError, ValueError) as error:
        raise BadRequestError(f"the form: {error}") from None
    payloads = form.take_payloads()
    given = {**parameters.from_query(head.query), **form.fields}
    return Decoded(payloads, True, parameters.merge(given, form.parameters))


class _Form:
    """Gathers the parts of a form."""

    def __init__(self, head: BodyContext) -> None:
        self.payloads: list[Payload] = []
        self.fields: dict[str, bytes] = {}
        self.parameters = b""
        self._head = head
        names = [spec.name for spec in head.inputs]
        self._inputs = names if len(names) > 1 else []
        """Names of parts that together are one instance."""
        self._parts: dict[str, _Part] = {}
        """Parts of that instance."""

    def add(self, segment: MultipartSegment, content: bytes) -> None:
        """Take the next part."""
        content_type = segment.content_type or ""
        if segment.name in self._inputs:
            if segment.name in self._parts:
                raise BadRequestError(
                    f"part {segment.name[:80]!r}: appears more than once; parts with the names of "
                    "inputs are one instance, and each further instance needs its own request"
                )
            is_text = segment.filename is None and content_type in ("", "text/plain")
            self._parts[segment.name] = _Part(content_type, content, is_text)
        elif segment.filename is None and not content_type.startswith(("image/", "application/")):
            self._add_field(segment.name, content)
        elif segment.name == "parameters" and content_type in ("", "application/json"):
            self.parameters = content
        else:
            place = f"file {len(self.payloads)} ({(segment.filename or segment.name)[:80]!r})"
            self.payloads += self._read_file(content_type, content, place)
            if len(self.payloads) > self._head.limits.max_instances:
                raise TooLargeError(
                    f"the form holds more than {self._head.limits.max_instances} instances"
                )

    def take_payloads(self) -> list[Payload]:
        """Return the instances of all parts."""
        if not self._parts:
            if not self.payloads:
                raise InvalidInputError("the form holds no file; one at least is needed")
            return self.payloads
        if missing := [name for name in self._inputs if name not in self._parts]:
            raise InvalidInputError(
                f"the form has {_names(self._parts)} but not {_names(missing)}: an instance needs "
                "all inputs"
            )
        if self.payloads:
            raise InvalidInputError(
                f"the form has other files beside {_names(self._parts)}, which are one instance"
            )
        if all(part.is_npy for part in self._parts.values()):
            tensors = [
                read_npy([part.content], f"part {name!r}")._replace(name=name)
                for name, part in self._parts.items()
            ]
            return instances_of(tensors, self._head).payloads
        members = [
            msgspec.json.encode(name) + b":" + part.as_json(f"part {name!r}")
            for name, part in self._parts.items()
        ]
        return [Payload("json", (b"{" + b",".join(members) + b"}",))]

    def _add_field(self, name: str, content: bytes) -> None:
        if name == "parameters":
            self.parameters = content
        elif name in self.fields:
            raise BadRequestError(f"field {name[:80]!r}: appears more than once")
        else:
            self.fields[name] = parameters.literal(content.decode("utf-8", "replace"))

    def _read_file(self, content_type: str, content: bytes, place: str) -> list[Payload]:
        if not content:
            raise InvalidInputError(f"{place}: is empty")
        if content_type.startswith("image/"):
            return [Payload("image", (content,))]
        try:
            if content_type in NPY_TYPES or content.startswith(NPY_MAGIC):
                return instances_of([read_npy([content], place)], self._head).payloads
            if content_type in ("", "application/octet-stream"):
                if is_image(content):  # forms say octet-stream for unknown types
                    return [image_or_bytes(content)]
                bare = BodyContext({}, b"", self._head.inputs, self._head.limits)
                return decode_raw([content], bare).payloads
        except ServiceError as error:
            if not error.message.startswith(place):
                error.message = f"{place}: {error.message}"
            raise
        raise UnsupportedTypeError(
            f"{place}: {content_type[:80]!r} is not supported in a form; use image/*, "
            f"application/octet-stream or {NPY_TYPES[0]}"
        )


class _Part(NamedTuple):
    """A part of a form that is one input of an instance."""

    content_type: str
    content: bytes
    is_text: bool

    @property
    def is_npy(self) -> bool:
        """It is an array as numpy.save writes it."""
        return self.content_type in NPY_TYPES or self.content.startswith(NPY_MAGIC)

    def as_json(self, place: str) -> bytes:
        """Return its JSON text; a file becomes `{"b64": ...}`, which the worker decodes."""
        if self.is_text:
            return parameters.literal(self.content.decode("utf-8", "replace"))
        if self.content_type != "application/json":
            return msgspec.json.encode({"b64": self.content})
        try:
            if parameters.is_too_deep(self.content):
                raise InvalidInputError(f"{place}: nested more than {parameters.MAX_DEPTH} deep")
            msgspec.json.decode(self.content.decode())
        except parameters.JsonErrors as error:
            raise BadRequestError(f"{place}: {parameters.json_message(error)}") from None
        return self.content


def _names(names: Iterable[str]) -> str:
    return " and ".join(repr(name[:80]) for name in names)
