"""Reads the bodies of jobs from a disk. Runs in threads.

Lines of JSON, archives and forms are read one instance at a time, so that a million of them need no
memory. What is wrong with one instance is an error in its own place; what is wrong with the whole
body, such as an early end, raises, and then there is no job at all.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import msgspec
from multipart import MultipartSegment  # type: ignore[import-untyped]  # has no annotations

from inferpool.models.json_errors import BYTE_ORDER_MARK
from inferpool.service.api.codecs import parameters
from inferpool.service.api.codecs.body import BodyContext, Limits, Payload
from inferpool.service.api.codecs.files import place_of_file, read_named_file, read_typed_file
from inferpool.service.api.codecs.forms import MAX_FIELDS, Form, read_parts
from inferpool.service.api.codecs.json import decode_instance
from inferpool.service.api.codecs.names import is_label
from inferpool.service.api.codecs.requests import TYPES, decode
from inferpool.service.errors import InvalidInputError, ServiceError, TooLargeError
from inferpool.service.parts.jobs.http.archive import read_archive
from inferpool.service.parts.jobs.jobs import Instances
from inferpool.service.parts.jobs.records import JobProblem, StoredInstance

MAX_INSTANCES = 1_000_000
"""The most instances of a job."""
LINES_TYPES = (
    *("application/jsonl", "application/x-ndjson", "application/ndjson"),
    *("application/jsonlines", "application/x-jsonlines"),
)
TAR_TYPE = "application/x-tar"
JOB_TYPES = (*TYPES, LINES_TYPES[0], TAR_TYPE)
"""The content types that are read, for messages and for the documentation."""

_FORM_TYPE = "multipart/form-data"
_MAX_AT_ONCE = 16_384
"""The most instances of a body that is read whole. The parser of JSON has a field for each, and
takes 10 MB and 30 ms to build for so many."""
_BUFFER_BYTES = 256 * 1024
_TURN_S = 0.0005
_PAUSE_S = 1e-6
_SPACE = b" \t\r\n"


T = TypeVar("T")


class JobBody(msgspec.Struct, frozen=True):
    """The parameters and the instances of a body."""

    parameters: bytes
    """A JSON object for all instances, or empty."""
    instances: Instances
    """Begins to read the instances; raises a `ServiceError` if the body is no good after all."""


def read_body(content_type: bytes, path: Path, head: BodyContext) -> JobBody:
    """Begin to read the body of a job, which must stay where it is until its instances are read.

    Args:
        content_type: Its content type; empty if there is none.
        path: The file that holds it.
        head: Everything else about it. The limits are those of single calls.

    Raises:
        BadRequestError: The body cannot be read.
        InvalidInputError: It does not fit the model, or the form of its type, or is empty.
        TooLargeError: It holds too much.
        UnsupportedTypeError: Nothing here reads its type or encoding.
    """
    most = max(_MAX_AT_ONCE, head.limits.max_instances)
    head = msgspec.structs.replace(
        head, limits=msgspec.structs.replace(head.limits, max_instances=most)
    )
    bare = _bare(content_type)
    if bare == _FORM_TYPE:
        return _read_form(content_type, path, head)
    reader = _READERS.get(bare)
    if reader is None:
        return _read_whole(content_type, path, head)
    given = parameters.merge(parameters.from_query(head.query))
    return JobBody(given, lambda: _checked(reader(path, head)))


def most_bytes(content_type: bytes, limits: Limits) -> int:
    """Return how long a body of a type may be: only those that are read in pieces may be large."""
    bare = _bare(content_type)
    return limits.most_bytes(of_job=bare == _FORM_TYPE or bare in _READERS)


def _bare(content_type: bytes) -> str:
    return content_type.partition(b";")[0].strip().lower().decode("latin-1")


def _checked(instances: Iterable[StoredInstance]) -> Iterator[StoredInstance]:
    """Pass instances on, if there is one at least and not too many of them."""
    number = 0
    for number, instance in enumerate(_in_turns(instances), 1):
        if number > MAX_INSTANCES:
            raise TooLargeError(f"the body has more than {MAX_INSTANCES} instances; make two jobs")
        yield instance
    if not number:
        raise InvalidInputError("the body has no instances; a job needs one at least")


def _in_turns(items: Iterable[T]) -> Iterator[T]:
    """Pass items on, and pause now and then for other threads.

    The event loop would else wait for Python's lock for 5 ms (`sys.getswitchinterval`) before each
    of its steps. A pause of no time would not do: this thread would take the lock again at once.
    """
    until = time.monotonic() + _TURN_S
    for item in items:
        yield item
        if time.monotonic() > until:
            time.sleep(_PAUSE_S)
            until = time.monotonic() + _TURN_S


def _read_whole(content_type: bytes, path: Path, head: BodyContext) -> JobBody:
    """Read a body of a type that has no pieces, as `/predict` does."""
    try:
        if path.stat().st_size > head.limits.max_body_bytes:
            raise head.limits.too_large()
        decoded = decode(content_type, [path.read_bytes()], head, JOB_TYPES, may_guess=False)
    except TooLargeError as error:
        raise TooLargeError(
            f"{error.message}. {LINES_TYPES[0]} and {TAR_TYPE} may hold up to {MAX_INSTANCES} "
            "instances in a job"
        ) from None
    return JobBody(decoded.parameters, lambda: map(_stored, decoded.payloads))


def _read_lines(path: Path, head: BodyContext) -> Iterator[StoredInstance]:
    """Read lines of JSON, each an instance. Empty lines are none, as in `inferpool batch`."""
    most = head.limits.max_body_bytes
    with path.open("rb", buffering=_BUFFER_BYTES) as file:
        if file.read(len(BYTE_ORDER_MARK)) != BYTE_ORDER_MARK:
            file.seek(0)
        number = num_empty = 0
        while line := file.readline(most + 1):
            number += 1
            if len(line) > most and not line.endswith(b"\n"):
                while line and not line.endswith(b"\n"):
                    line = file.readline(_BUFFER_BYTES)
                yield _problem(_too_long(most), f"line {number}")
            elif line.strip(_SPACE):
                try:
                    yield _stored(decode_instance(line, head.interface))
                except ServiceError as error:
                    yield _problem(error, f"line {number}")
            else:
                num_empty += 1
                if num_empty > MAX_INSTANCES:
                    raise TooLargeError(f"the body has more than {MAX_INSTANCES} empty lines")


def _read_tar(path: Path, head: BodyContext) -> Iterator[StoredInstance]:
    """Read the files of an archive, each an instance. The labels of webdataset are none."""
    with path.open("rb", buffering=_BUFFER_BYTES) as file:
        index = 0
        for found in read_archive(file, head.limits.max_body_bytes):
            if is_label(found.name):
                continue
            place = place_of_file(index, found.name)
            index += 1
            if found.problem is not None:
                yield _problem(found.problem, place)
                continue
            try:
                yield _stored(read_named_file(found.name, found.content, place, head))
            except ServiceError as error:
                yield _problem(error)


_READERS: Mapping[str, Callable[[Path, BodyContext], Iterator[StoredInstance]]] = {
    **dict.fromkeys(LINES_TYPES, _read_lines),
    TAR_TYPE: _read_tar,
}


def _read_form(content_type: bytes, path: Path, head: BodyContext) -> JobBody:
    """Read a form twice: first its fields, since they may come last, and then its files."""
    if head.interface.form == "instance":
        return _read_whole(content_type, path, head)
    form = Form(head)
    num_files = 0

    def room(segment: MultipartSegment) -> int:
        return parameters.MAX_PARAMETER_BYTES if form.is_field(segment) else 0

    with closing(_pieces(path)) as pieces:
        for segment, content in _in_turns(read_parts(content_type, pieces, _MAX_PARTS, room)):
            if form.is_input(segment):
                return _read_whole(content_type, path, head)
            if not form.is_field(segment):
                num_files += 1
                if num_files > MAX_INSTANCES:
                    raise TooLargeError(
                        f"the form has more than {MAX_INSTANCES} files; make two jobs"
                    )
            elif content is None:
                raise TooLargeError(
                    f"field {segment.name[:80]!r}: more than {parameters.MAX_PARAMETER_BYTES} bytes"
                )
            else:
                form.add(segment, content)
    if not num_files:
        raise InvalidInputError("the form holds no file; one at least is needed")
    given = form.merged_parameters(head.query)
    return JobBody(given, lambda: _checked(_read_files(content_type, path, head)))


def _read_files(content_type: bytes, path: Path, head: BodyContext) -> Iterator[StoredInstance]:
    """Read the files of a form, each an instance, or several if it is an array of them."""
    form = Form(head)
    most = head.limits.max_body_bytes

    def room(segment: MultipartSegment) -> int:
        return 0 if form.is_field(segment) else most

    index = 0
    with closing(_pieces(path)) as pieces:
        for segment, content in read_parts(content_type, pieces, _MAX_PARTS, room):
            if form.is_field(segment):
                continue
            place = place_of_file(index, segment.filename or segment.name)
            instances: Iterable[StoredInstance]
            try:
                if content is None:
                    raise _too_long(most)
                payloads = read_typed_file(segment.content_type or "", content, place, head)
                instances = map(_stored, payloads)
                index += len(payloads)
            except ServiceError as error:
                instances = [_problem(error, place)]
                index += 1
            yield from instances


_MAX_PARTS = MAX_INSTANCES + MAX_FIELDS + 1
"""One more than may be, so that this module says what there is too much of."""


def _pieces(path: Path) -> Generator[bytes, None, None]:
    """Yield what a file holds. A short rest comes with the last piece, as `read_parts` asks."""
    with path.open("rb", buffering=0) as file:
        piece = file.read(_BUFFER_BYTES)
        while following := file.read(_BUFFER_BYTES):
            if len(following) < _BUFFER_BYTES:
                piece += following
                continue
            yield piece
            piece = following
        if piece:
            yield piece


def _stored(payload: Payload) -> StoredInstance:
    return StoredInstance(payload.kind, b"".join(payload.chunks), payload.headers)


def _problem(error: ServiceError, place: str = "") -> StoredInstance:
    """Return an instance that cannot be read; its message begins with `place`."""
    message = error.message
    if not message.startswith(place):
        message = f"{place}: {message}"
    return StoredInstance(None, problem=JobProblem(error.code, message))


def _too_long(most: int) -> TooLargeError:
    return TooLargeError(
        f"is larger than the limit for an instance, {most} bytes (the setting max_body_bytes)"
    )
