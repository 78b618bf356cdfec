"""Bodies and answers of SageMaker as CSV, as JSON lines and as JSON. Runs in the event loop.

What these mean is not said by AWS, but by the toolkit sagemaker-inference (`decoder.py`,
`encoder.py`): the first dimension of a body is that of its instances, and so it is with answers.
"""

import csv
import io
import math
import re
from collections.abc import Iterator, Sequence

import msgspec

from inferpool.models.json_errors import BYTE_ORDER_MARK, JsonErrors
from inferpool.service.api.codecs.body import BodyContext, Decoded, Payload
from inferpool.service.api.codecs.json import SPACE, decode_instance, decode_json, reader_of
from inferpool.service.errors import (
    BadRequestError,
    InvalidInputError,
    NotAcceptableError,
    ServiceError,
    TooLargeError,
)

_LIST_OF_INSTANCES = re.compile(rb'\[[ \t\r\n]*[\[{"]')
"""The start of a list of instances; a list of anything else is one instance."""
_HEADER = re.compile(rb";\s*header\s*=\s*\"?present\b", re.IGNORECASE)
"""The parameter for a first row with the names of columns (RFC 4180, 3)."""
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(\.[0-9]*|(?=[eE]))?|(\.[0-9]+))(?:[eE][-+]?[0-9]+)?")
_PLAIN = b"0123456789-., \t"
"""Bytes of rows of numbers without exponents; one with too many digits is refused as in JSON."""
_NUMBER_BYTES = b"0123456789+-.eE,"
_MAX_DIGITS = 19
_MAX_CHARS = 400
"""The longest cell that may be a number; a float has 309 digits at most before its point."""
_MOST_CELLS = 1 << 16
"""Each takes the event loop up to 0.7 us; rows of numbers as JSON has them take 5 ns a number, and
40 ns with exponents."""
_MOST_NUMBERS = 1 << 20
"""With exponents, or empty."""
_MOST_BYTES = 4 << 20
"""Rows that are not all numbers take up to 10 ns a byte."""
_MOST_BLANK = 1 << 18
"""Blank lines, and lines within quotes."""
_BEFORE_NUMBERS = frozenset("0123456789+-. \t")
_numbers = msgspec.json.Decoder(list[float])
_any = msgspec.json.Decoder()
_MAX_DEPTH = 4
"""Levels of an answer that become cells of one row."""


class _Members(msgspec.Struct):
    instances: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_members = msgspec.json.Decoder(_Members)
_skipped = msgspec.json.Decoder(msgspec.Raw)


def decode_any_json(chunks: Sequence[bytes], head: BodyContext) -> tuple[Decoded, bool]:
    """Read JSON: `instances` as by `/predict`, or a list of instances, or one instance.

    Returns:
        The instances, and whether the body has the member `instances`.

    Raises:
        ServiceError: It cannot be read.
    """
    text = _text_of(chunks, head)
    if not head.interface.envelope:
        return decode_json([text], head), False
    if text[:1] == b"{" and b'"instances"' in text and _has_instances(text):
        return decode_json([text], head), True
    if _LIST_OF_INSTANCES.match(text):
        try:
            return decode_json([b'{"instances":%b}' % text], head), False
        except BadRequestError:
            decode_instance(text)  # it names the place in the body as the client has sent it
            raise
    return Decoded([decode_instance(text, head.interface)], is_batch=False), False


def decode_lines(chunks: Sequence[bytes], head: BodyContext) -> Decoded:
    """Read JSON lines: one instance in each.

    Raises:
        ServiceError: It cannot be read.
    """
    payloads = []
    for number, line in _lines_of(_text_of(chunks, head), head.limits.max_instances):
        try:
            payloads.append(decode_instance(line, head.interface))
        except ServiceError as error:
            raise type(error)(f"line {number}: {error.message}") from None
    return Decoded(payloads, is_batch=True)


def decode_csv(content_type: bytes, chunks: Sequence[bytes], head: BodyContext) -> Decoded:
    """Read CSV: one instance in each row.

    A row is a list of numbers and texts, or an object if the first row names the columns; a row
    with a single text is that text.

    Raises:
        ServiceError: It cannot be read.
    """
    text = _text_of(chunks, head)
    has_names = _HEADER.search(content_type) is not None
    most = head.limits.max_instances
    read = reader_of(head.interface)
    payloads: list[Payload] = []
    num_others, num_bytes = 0, 0
    if not has_names and b'"' not in text:
        for _, line in _lines_of(text, most):
            numbers = _numbers_in(line)
            if numbers is None:
                num_others += line.count(b",") + 1
                num_bytes += len(line)
                _check_others(num_others, num_bytes)
                numbers = _encoded(list(map(_value_of, line.decode().split(","))))
            payloads.append(read(memoryview(numbers)))
        return Decoded(payloads, is_batch=True)
    _check_others(text.count(b",") + 1, len(text))
    _check_lines(text.count(b"\n") + text.count(b"\r"), most)
    names: list[str] | None = None
    for row in _rows_of(text):
        if has_names and names is None:
            names = row
            continue
        if len(payloads) == most:
            raise _too_many(most)
        if names is not None and len(row) != len(names):
            raise InvalidInputError(
                f"row {len(payloads) + 1}: has {len(row)} values, and the first row has "
                f"{len(names)} names"
            )
        values = list(map(_value_of, row))
        value = values if names is None else dict(zip(names, values, strict=True))
        payloads.append(read(memoryview(_encoded(value))))
    if not payloads:
        raise InvalidInputError("the body has no row")
    return Decoded(payloads, is_batch=True)


def csv_of(values: Sequence[bytes], *, is_batch: bool) -> bytes:
    """Render answers as rows, with the numbers and texts of each in their order.

    A list that answers a single instance has its first dimension along the rows.

    Raises:
        NotAcceptableError: One is nested too deep for a row, or they have too many values.
    """
    if is_batch and all(map(_are_numbers, values)):
        return b"".join([b"%b\n" % value.strip(b"[]") for value in values])  # as JSON has them
    if sum(value.count(b",") for value in values) > _MOST_CELLS:
        raise NotAcceptableError(
            f"Accept: text/csv: the answers have more than {_MOST_CELLS} values, not all of them "
            "numbers; ask for application/json"
        )
    answers = [_any.decode(value) for value in values]
    if not is_batch and isinstance(answers[0], list):
        answers = answers[0]
    stream = io.StringIO(newline="")
    csv.writer(stream, lineterminator="\n").writerows(list(_cells_of(each)) for each in answers)
    return stream.getvalue().encode()


def _are_numbers(value: bytes) -> bool:
    """Return whether an answer is a number, or a list of them."""
    return value[:1] not in b'{"' and not value[1:-1].translate(None, _NUMBER_BYTES)


def _cells_of(value: object, depth: int = 0) -> Iterator[object]:
    if depth > _MAX_DEPTH:
        raise NotAcceptableError("Accept: text/csv: the answer is nested too deep for a row")
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _cells_of(each, depth + 1)
    else:
        yield value


def _text_of(chunks: Sequence[bytes], head: BodyContext) -> bytes:
    most = head.limits.max_json_bytes
    if sum(map(len, chunks)) > most:
        raise TooLargeError(
            f"the body is larger than {most} bytes, the limit for texts (the setting "
            "max_json_bytes)"
        )
    text = b"".join(chunks).removeprefix(BYTE_ORDER_MARK).strip(SPACE)
    if not text:
        raise InvalidInputError("the body is empty")
    try:
        if not text.isascii():
            text.decode()
    except UnicodeDecodeError as error:
        raise BadRequestError(f"the body: byte {error.start} is not UTF-8") from None
    return text


def _has_instances(text: bytes) -> bool:
    try:
        return _members.decode(text).instances is not msgspec.UNSET
    except JsonErrors:
        return True  # `decode_json` says what is wrong


def _lines_of(text: bytes, most: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers."""
    _check_lines(text.count(b"\n"), most)
    if text.count(b"\n") >= most and sum(1 for line in text.split(b"\n", 2 * most) if line) > most:
        raise _too_many(most)
    num = 0
    for number, line in enumerate(io.BytesIO(text), 1):
        if line.strip(SPACE):
            num += 1
            if num > most:
                raise _too_many(most)
            yield number, line.strip(SPACE)


def _too_many(most: int) -> TooLargeError:
    return TooLargeError(
        f"the body has more than {most} instances, the limit for one request (the setting "
        "max_instances_per_request)"
    )


def _numbers_in(line: bytes) -> bytes | None:
    """Return a row of numbers as JSON; None if JSON has another form for one of them."""
    row = b"[%b]" % line
    others = line.translate(None, _PLAIN)
    try:
        if others:
            is_fit = not others.strip(b"eE+") and line.count(b",") <= _MOST_NUMBERS
            return row if is_fit and _numbers.decode(row) else None
        if b",," in row or row[1] == 0x2C or row[-2] == 0x2C:
            if row.count(b",,") > _MOST_NUMBERS:
                return None
            row = row.replace(b",,", b",null,").replace(b",,", b",null,")
            row = row.replace(b"[,", b"[null,").replace(b",]", b",null]")
        _skipped.decode(row)
    except JsonErrors:
        return None
    return row


def _check_others(num: int, num_bytes: int) -> None:
    if num > _MOST_CELLS or num_bytes > _MOST_BYTES:
        unit = f"{_MOST_CELLS} values" if num > _MOST_CELLS else f"{_MOST_BYTES} bytes"
        raise TooLargeError(
            f"the body has more than {unit} in rows that are not all numbers, or have quotes or "
            "names; send it in several requests"
        )


def _check_lines(num: int, most: int) -> None:
    if num > most + _MOST_BLANK:
        raise TooLargeError(
            f"the body has {num} lines, most of them blank or within quotes: {_MOST_BLANK} more "
            "than instances are the limit"
        )


def _rows_of(text: bytes) -> Iterator[list[str]]:
    try:
        for row in csv.reader(io.StringIO(text.decode(), newline=""), strict=True):
            if row:
                yield row
    except csv.Error as error:
        raise BadRequestError(f"the body is not CSV: {error}") from None


def _encoded(row: "list[object] | dict[str, object]") -> bytes:
    if isinstance(row, list) and len(row) == 1 and isinstance(row[0], str):
        return msgspec.json.encode(row[0])
    return msgspec.json.encode(row)


def _value_of(cell: str) -> object:
    """Return the number or the text of a cell; nothing if it is empty."""
    if cell and cell[0] not in _BEFORE_NUMBERS:  # most texts: the rest takes five times as long
        return cell
    bare = cell.strip(" \t")
    if not bare:
        return None
    found = _NUMBER.fullmatch(bare) if len(bare) <= _MAX_CHARS else None
    if found is None:
        return cell
    if found[1] is None and found[2] is None and len(bare) < _MAX_DIGITS:
        return int(bare)
    number = float(bare)
    return number if math.isfinite(number) else cell
