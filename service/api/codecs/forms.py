"""Bodies of type multipart/form-data: files are instances, fields are parameters (RFC 7578)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
from multipart import (  # type: ignore[import-untyped]  # ships without annotations
    MultipartError,
    MultipartSegment,
    ParserLimitReached,
    PushMultipartParser,
    parse_options_header,
)

from inferpool.models.json_errors import BYTE_ORDER_MARK, JsonErrors, json_message
from inferpool.service.api.codecs import parameters
from inferpool.service.api.codecs.body import BodyContext, Decoded, Payload
from inferpool.service.api.codecs.files import place_of_file, read_typed_file
from inferpool.service.api.codecs.tensors import NPY_MAGIC, NPY_TYPES, instances_of, read_npy
from inferpool.service.errors import BadRequestError, InvalidInputError, TooLargeError

MAX_FIELDS = 64
"""Parts of a form that are no files."""


def decode_form(content_type: bytes, chunks: Sequence[bytes], head: BodyContext) -> Decoded:
    """Read a form (RFC 7578): each file is an instance, each field a parameter.

    If the model has several inputs, and parts have their names, these parts are one instance.

    Raises:
        ServiceError: It cannot be read, does not fit the model, or holds too much.
    """
    form = Form(head)
    # All at once: after the last boundary the parser drops the rest of a chunk, but would refuse a
    # line break that clients may send there in a chunk of its own.
    most = head.limits.max_instances + MAX_FIELDS
    for segment, content in read_parts(content_type, [b"".join(chunks)], most):
        assert content is not None  # nothing is too long
        form.add(segment, content)
    payloads = form.take_payloads()
    is_batch = head.interface.envelope or len(payloads) > 1
    return Decoded(payloads, is_batch, form.merged_parameters(head.query))


def read_parts(
    content_type: bytes,
    chunks: Iterable[bytes],
    max_parts: int,
    max_bytes: Callable[[MultipartSegment], float] = lambda _: float("inf"),
) -> Iterator[tuple[MultipartSegment, bytes | None]]:
    """Yield the parts of a form with their contents, and hold one of them at a time.

    Args:
        content_type: It names the boundary.
        chunks: The body. What comes after the last boundary must be in the same chunk.
        max_parts: The most parts.
        max_bytes: Tells how much of a part to hold; the content of a longer one is None.

    Raises:
        BadRequestError: It is no form, or ends early.
        TooLargeError: It has too many parts, or too long headers in one.
    """
    _, options = parse_options_header(content_type.decode("latin-1"))
    try:
        parser = PushMultipartParser(
            options.get("boundary", "").encode("latin-1"), max_segment_count=max_parts, strict=True
        )
        segment: MultipartSegment | None = None
        content: list[bytes] = []
        num_bytes, most = 0, 0.0
        for chunk in chunks:
            for event in parser.parse(chunk):
                if isinstance(event, MultipartSegment):
                    segment, content, num_bytes, most = event, [], 0, max_bytes(event)
                elif event is None:
                    assert segment is not None
                    yield segment, b"".join(content) if num_bytes <= most else None
                    content = []
                else:
                    num_bytes += len(event)
                    if num_bytes <= most:
                        content.append(bytes(event))
                    else:
                        content = []
        parser.close()
    except ParserLimitReached as error:
        raise TooLargeError(f"the form: {error}") from None
    except (MultipartError, ValueError) as error:
        raise BadRequestError(f"the form: {error}") from None


class Form:
    """Gathers the parts of a form."""

    def __init__(self, head: BodyContext) -> None:
        self._payloads: list[Payload] = []
        self._fields: dict[str, bytes] = {}
        self._parameters = b""
        self._head = head
        names = [spec.name for spec in head.inputs]
        self._inputs = names if len(names) > 1 else []
        """Names of parts that together are one instance."""
        self._parts: dict[str, _Part] = {}
        """Parts of that instance."""

    def is_input(self, segment: MultipartSegment) -> bool:
        """Return whether a part is one of several inputs that together are one instance."""
        return segment.name in self._inputs

    def is_field(self, segment: MultipartSegment) -> bool:
        """Return whether a part, which is no input, is a parameter; else it is a file."""
        content_type = segment.content_type or ""
        if segment.filename is None and (
            content_type == "application/json"
            or not content_type.startswith(("image/", "application/"))
        ):
            return True
        return segment.name == "parameters" and content_type in ("", "application/json")

    def add(self, segment: MultipartSegment, content: bytes) -> None:
        """Add the next part.

        Raises:
            ServiceError: It cannot be used, or there are too many.
        """
        content_type = segment.content_type or ""
        if self.is_input(segment):
            if segment.name in self._parts:
                raise BadRequestError(
                    f"part {segment.name[:80]!r}: appears more than once; parts with the names of "
                    "inputs are one instance, and each further instance needs its own request"
                )
            is_text = segment.filename is None and content_type in ("", "text/plain")
            self._parts[segment.name] = _Part(content_type, content, is_text)
        elif self.is_field(segment):
            self._add_field(segment.name, content)
        else:
            place = place_of_file(len(self._payloads), segment.filename or segment.name)
            self._payloads += read_typed_file(content_type, content, place, self._head)
            if len(self._payloads) > self._head.limits.max_instances:
                raise TooLargeError(
                    f"the form holds more than {self._head.limits.max_instances} instances"
                )

    def merged_parameters(self, query: bytes) -> bytes:
        """Return the parameters of a query and of all fields as one JSON object.

        Raises:
            ServiceError: They cannot be read, or are too many.
        """
        given = {**parameters.from_query(query), **self._fields}
        return parameters.merge(given, self._parameters)

    def take_payloads(self) -> list[Payload]:
        """Return the instances of all parts."""
        if not self._parts:
            if not self._payloads:
                raise InvalidInputError(
                    "the form holds no file; one at least is needed: each file (-F file=@FILE) is "
                    "an instance, and each other field a parameter"
                )
            return self._payloads
        if missing := [name for name in self._inputs if name not in self._parts]:
            raise InvalidInputError(
                f"the form has {_names(self._parts)} but not {_names(missing)}: an instance needs "
                "all inputs"
            )
        if self._payloads:
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
            self._parameters = content
        elif len(self._fields) >= MAX_FIELDS:
            raise TooLargeError(f"the form has more than {MAX_FIELDS} fields")
        elif name in self._fields:
            raise BadRequestError(f"field {name[:80]!r}: appears more than once")
        else:
            self._fields[name] = parameters.literal(content.decode("utf-8", "replace"))


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
        text = self.content.removeprefix(BYTE_ORDER_MARK)
        try:
            if parameters.is_too_deep(text):
                raise InvalidInputError(f"{place}: nested more than {parameters.MAX_DEPTH} deep")
            msgspec.json.decode(text.decode())
        except JsonErrors as error:
            raise BadRequestError(f"{place}: {json_message(error, text)}") from None
        return text


def _names(names: Iterable[str]) -> str:
    return " and ".join(repr(name[:80]) for name in names)
