"""Inputs of a batch run, from files, members of archives and cells of tables; their answers.

An unreadable input becomes an input with an error: it never ends the run.
"""

import json
import math
import os
import re
import stat
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from inferpool.models.json_errors import BYTE_ORDER_MARK, first_in, placed
from inferpool.models.spec import Interface, Kind
from inferpool.service.api.codecs.json import decode_instance, is_image
from inferpool.service.api.codecs.names import kind_by_name
from inferpool.service.errors import ServiceError
from inferpool.service.settings.names import FlagError

InputKind: TypeAlias = Literal["image", "bytes", "json", "npy"]
"""Form of an input: an encoded picture, opaque bytes, a JSON value, or a file of numpy."""
_HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which UTF-8 cannot have."""
MAX_FILE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInput:
    """One input of a run."""

    index: int
    """Its place in the source, from 0; it is the same each time the source is opened."""
    name: str
    """A path, a member of an archive, or a line or row, for people."""
    kind: InputKind
    data: bytes = b""
    text: bytes = b""
    """The JSON that the data came in, where it is not the data."""
    label: str | None = None
    """The right answer, if the source knows it."""
    error: str = ""
    """Why it could not be read or decoded; then there is no data."""
    code: str = "unreadable"
    """The code of that error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAnswer:
    """The outcome for one input: a prediction or an error."""

    index: int
    name: str
    label: str | None = None
    prediction: object = None
    """A JSON value."""
    code: str = ""
    """The code of the error; empty if there is a prediction."""
    message: str = ""


class SourceUnusableError(FlagError):
    """The inputs or the output cannot be used as the flags say; the message says what to do."""


class RunLostError(Exception):
    """The model, the service or the output is gone, so the run cannot go on."""


def input_at(index: int, name: str, path: str, label: str | None = None) -> BatchInput:
    """Read a file. Anything else is an error: a pipe would block."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return failed_input(index, name, "is no file", label)
            if status.st_size > MAX_FILE_BYTES:
                return failed_input(index, name, "is larger than 1 GiB", label)
            data = file.read()
    except (OSError, ValueError) as error:  # a ValueError for a NUL in the name
        return unreadable_input(index, name, error, label)
    return input_of(index, name, data, label)


def input_of(index: int, name: str, data: bytes, label: str | None = None) -> BatchInput:
    """Return the input for a file's content; the name determines its kind."""
    kind = kind_by_name(name)
    if kind == "text":
        try:
            data = json.dumps(data.decode("utf-8-sig").strip(), ensure_ascii=False).encode()
        except UnicodeDecodeError as error:
            return failed_input(index, name, f"is not in UTF-8: {error}", label)
    if not data or data == b'""':
        return failed_input(index, name, "is empty", label)
    if kind == "json" or kind == "text":
        return _json_input(index, name, data, label)
    if kind == "bytes" and is_image(data):
        kind = "image"
    return BatchInput(index=index, name=name, kind=kind, data=data, label=label)


def input_of_cell(index: int, name: str, value: object, folder: str) -> BatchInput:
    """Return the input for a cell: bytes, a dataset's picture, a file's path, or JSON."""
    if isinstance(value, dict) and "bytes" in value and value.keys() <= {"bytes", "path"}:
        value = value["path"] if value["bytes"] is None else value["bytes"]
    if isinstance(value, bytes):
        kind: InputKind = "image" if is_image(value) else "bytes"
        return BatchInput(index=index, name=name, kind=kind, data=value)
    if isinstance(value, str) and kind_by_name(value) in ("image", "npy"):
        return input_at(index, value, os.path.join(folder, value))
    try:
        data = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        return failed_input(index, name, f"is no JSON value: {_why_no_value(value) or error}")
    return _json_input(index, name, data)


def _why_no_value(value: object) -> str:
    """Return which part of a value JSON cannot hold, and where; empty for other reasons."""
    if (found := first_in(value, _is_foreign)) is None:
        return ""
    part, place = found
    return placed("half of a surrogate pair" if isinstance(part, str) else part, place)


def _is_foreign(part: object) -> bool:
    if isinstance(part, str):
        return _HALF.search(part) is not None
    return isinstance(part, float) and not math.isfinite(part)


def _json_input(index: int, name: str, data: bytes, label: str | None = None) -> BatchInput:
    """Return the input for JSON, read as in a call to a service: {"b64": ...} is bytes."""
    try:
        payload = decode_instance(data.removeprefix(BYTE_ORDER_MARK))
    except ServiceError as error:
        return failed_input(index, name, error.message, label)
    assert payload.kind in ("image", "bytes", "json"), "which JSON is"
    content, text = b"".join(payload.chunks), b"" if payload.kind == "json" else data
    kind = cast("InputKind", payload.kind)
    return BatchInput(index=index, name=name, kind=kind, data=content, text=text, label=label)


def as_spoken(
    given: BatchInput, data: bytes | memoryview, interface: Interface
) -> tuple[Kind, bytes | memoryview]:
    """Return an input that is no array as a model with such an interface takes it.

    Raises:
        InvalidInputError: It is to be base64, and is not.
    """
    if given.kind == "json" or (given.text and not interface.envelope):
        payload = decode_instance(given.text or bytes(data), interface)
        return payload.kind, b"".join(payload.chunks)
    return "bytes" if given.kind == "npy" else given.kind, data


def unreadable_input(
    index: int, name: str, error: OSError | ValueError, label: str | None = None
) -> BatchInput:
    """Return an input that the system could not read."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return failed_input(index, name, f"cannot be read: {text}", label)


def failed_input(index: int, name: str, error: str, label: str | None = None) -> BatchInput:
    """Return an input with an error instead of data."""
    return BatchInput(index=index, name=name, kind="bytes", error=error, label=label)


def piece_of(fd: int, place: tuple[int, int]) -> bytes:
    """Read a piece of a file: `place` has its offset and its length.

    Raises:
        OSError: It is not there, or too large.
    """
    start, num_bytes = place
    if num_bytes > MAX_FILE_BYTES:
        raise OSError("is larger than 1 GiB")
    data = os.pread(fd, num_bytes, start)
    if len(data) != num_bytes:
        raise OSError("the file ends too early")
    return data


def stamp_of(path: str) -> str:
    """Return a text that changes with a file: its size and the time of its last change."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return "-"
    return f"{status.st_size} {status.st_mtime_ns}"
