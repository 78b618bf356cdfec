"""Files that are instances: in a form they have a content type, in an archive only a name."""

import os
from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

from inferpool.service.api.codecs.body import BodyContext, Payload
from inferpool.service.api.codecs.json import decode_instance, image_or_bytes, is_image
from inferpool.service.api.codecs.tensors import NPY_MAGIC, decode_raw, instances_of, read_npy
from inferpool.service.errors import (
    BadRequestError,
    InvalidInputError,
    ServiceError,
    UnsupportedTypeError,
)

NPY_TYPES = ("application/x-npy", "application/npy")

FileKind: TypeAlias = Literal["image", "json", "text", "npy", "bytes"]
"""Content of a file by its name: an encoded picture, a JSON value, a text, an array, or anything
else, which is a picture too if it begins like one."""

_IMAGES = frozenset(
    (
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff"),
        *(".ppm", ".pgm", ".pbm", ".jp2", ".ico", ".tga", ".avif", ".qoi", ".dds", ".pcx"),
        *(".psd", ".sgi", ".im", ".msp", ".icns", ".fli", ".xbm", ".xpm"),
    )
)
_OTHERS: Mapping[str, FileKind] = {".json": "json", ".txt": "text", ".npy": "npy"}
_TYPES: Mapping[FileKind, str] = {"image": "image/*", "npy": NPY_TYPES[0]}
_LABELS = ("cls", "label")


def kind_by_name(name: str) -> FileKind:
    """Return what a file holds by the end of its name."""
    suffix = os.path.splitext(name)[1].lower()
    return "image" if suffix in _IMAGES else _OTHERS.get(suffix, "bytes")


def is_label(name: str) -> bool:
    """Return whether a file is the label of the file beside it with the same stem (webdataset)."""
    return name.rpartition("/")[2].partition(".")[2].lower() in _LABELS


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
        if content_type in ("", "application/octet-stream"):
            if is_image(content):  # forms say octet-stream for unknown types
                return [image_or_bytes(content)]
            bare = BodyContext({}, b"", head.inputs, head.limits)
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
            return decode_instance(content)
        except ServiceError as error:
            raise type(error)(f"{place}: {error.message}") from None
    payloads = read_typed_file(_TYPES.get(kind, ""), content, place, head)
    if len(payloads) > 1:
        raise InvalidInputError(
            f"{place}: holds {len(payloads)} instances; here each file must be one"
        )
    return payloads[0]
