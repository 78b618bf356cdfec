"""Files that are instances: in a form they have a content type, in an archive only a name."""

from collections.abc import Mapping

import msgspec

from inferpool.models.json_errors import BYTE_ORDER_MARK
from inferpool.service.api.codecs.body import BodyContext, Payload
from inferpool.service.api.codecs.json import decode_instance, image_or_bytes, is_image
from inferpool.service.api.codecs.names import FileKind, kind_by_name
from inferpool.service.api.codecs.tensors import (
    NPY_MAGIC,
    NPY_TYPES,
    decode_raw,
    instances_of,
    read_npy,
)
from inferpool.service.errors import (
    BadRequestError,
    InvalidInputError,
    ServiceError,
    UnsupportedTypeError,
)

OCTET_TYPES = ("", "application/octet-stream", "binary/octet-stream")
"""Types that say nothing of the content."""

_TYPES: Mapping[FileKind, str] = {"image": "image/*", "npy": NPY_TYPES[0]}


def place_of_file(index: int, name: str) -> str:
    """Return how messages call a file: by the number of its instance, and by its name."""
    return f"file {index} ({name[:80]!r})"


def read_typed_file(
    content_type: str, content: bytes, place: str, head: BodyContext
) -> list[Payload]:
    """Read a file with a content type, which may be empty. An array may hold several instances.

    Raises:
        BadRequestError: It cannot be read; messages begin with `place`.
        InvalidInputError: It does not fit the model, or is empty.
        TooLargeError: It holds too many instances.
        UnsupportedTypeError: Files of this type are not read.
    """
    if not content:
        raise InvalidInputError(f"{place}: is empty")
    if content_type.startswith("image/"):
        return [Payload("image", (content,))]
    try:
        if content_type in NPY_TYPES or content.startswith(NPY_MAGIC):
            return instances_of([read_npy([content], place)], head).payloads
        if content_type in OCTET_TYPES:
            if is_image(content):  # forms say octet-stream for unknown types
                return [image_or_bytes(content)]
            bare = BodyContext({}, b"", head.inputs, head.limits, head.interface)
            return decode_raw([content], bare).payloads
    except ServiceError as error:
        if not error.message.startswith(place):
            error.message = f"{place}: {error.message}"
        raise
    raise UnsupportedTypeError(
        f"{place}: {content_type[:80]!r} is not supported in a form; use image/*, "
        f"application/octet-stream or {NPY_TYPES[0]}"
    )


def read_named_file(name: str, content: bytes, place: str, head: BodyContext) -> Payload:
    """Read a file without a content type as one instance.

    A text goes to the model as a JSON string, without the space around it. The JSON of a .json
    file is what it would be in the list of a body.

    Raises:
        BadRequestError: It cannot be read; messages begin with `place`.
        InvalidInputError: It does not fit the model, is empty, or holds several instances.
        TooLargeError: It holds too many instances.
    """
    kind = kind_by_name(name)
    if kind == "text":
        try:
            text = content.decode().strip()
        except UnicodeDecodeError as error:
            raise BadRequestError(f"{place}: byte {error.start} is not UTF-8") from None
        if not text:
            raise InvalidInputError(f"{place}: is empty")
        return Payload("json", (msgspec.json.encode(text),))
    if kind == "json" and content:
        try:
            return decode_instance(content.removeprefix(BYTE_ORDER_MARK), head.interface)
        except ServiceError as error:
            raise type(error)(f"{place}: {error.message}") from None
    payloads = read_typed_file(_TYPES.get(kind, ""), content, place, head)
    if len(payloads) > 1:
        raise InvalidInputError(
            f"{place}: holds {len(payloads)} instances; here each file must be one"
        )
    return payloads[0]
