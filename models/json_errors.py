"""Messages about JSON that is wrong, with the place. Any process."""

import json
import math
import re
import sys
from collections.abc import Callable, Iterable

import msgspec

from inferpool.models.texts import printable

JsonErrors = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Every error that msgspec raises on foreign JSON."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""RFC 8259 (8.1) allows to ignore it."""

_HIGH = rb"\\u[dD][89abAB][0-9a-fA-F][0-9a-fA-F]"
_LOW = rb"\\u[dD][c-fC-F][0-9a-fA-F][0-9a-fA-F]"
_FINE = rb"\\[^u]", rb"\\u(?![dD][89a-fA-F])", _HIGH + _LOW
_STEPS = b"|".join(rb"(?:(?:%b)[^\\]*+)++" % each for each in _FINE)  # no way back: texts are long
_LONE_SURROGATE = re.compile(rb"[^\\]*+(?:%b)*+(%b|%b)" % (_STEPS, _HIGH, _LOW))
_MAX_SHOWN = 30
_MAX_PLACE = 200


def json_message(error: Exception, text: bytes | memoryview = b"") -> str:
    """Return what is wrong with a JSON text, with its place in it.

    Args:
        error: The error of msgspec.
        text: The text.
    """
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 (byte {error.start})"
    if isinstance(error, RecursionError):
        return "nested too deep"
    message = str(error)
    if "out of range" in message and (found := number_out_of_range(text)):
        return f"{found} is out of range"
    if "truncated" in message or "hex escape" in message or "surrogate" in message:
        if lone := _LONE_SURROGATE.match(text):
            return f"malformed JSON: half of a surrogate pair (byte {lone.start(1)})"
        if "truncated" in message:
            return f"malformed JSON: it ends too early, after {len(text)} bytes"
    return message.replace("JSON is malformed: ", "malformed JSON: ")


def number_out_of_range(
    text: bytes | memoryview, most_whole: float = sys.float_info.max
) -> str | None:
    """Return the first number of a JSON text that no float can hold: "1e999 at [3].x"; or None.

    Args:
        text: The text. If it is no JSON, the result is None.
        most_whole: The largest whole number that is in range.
    """

    def whole(digits: str) -> object:
        return _LongNumber(digits) if abs(float(digits)) > most_whole else 0

    def fraction(digits: str) -> object:
        return _LongNumber(digits) if math.isinf(float(digits)) else 0

    try:
        value = json.loads(bytes(text), parse_int=whole, parse_float=fraction)
    except (ValueError, RecursionError):
        return None
    found = first_in(value, lambda each: isinstance(each, _LongNumber))
    return found and placed(*found)


def first_in(
    value: object, is_wanted: Callable[[object], bool], place: str = ""
) -> tuple[object, str] | None:
    """Return the first value in objects and lists that meets a claim, and its place."""
    if is_wanted(value):
        return value, place
    members: Iterable[tuple[object, object]] = ()
    if isinstance(value, dict):
        members = value.items()
    elif isinstance(value, list | tuple):
        members = enumerate(value)
    for name, each in members:
        if isinstance(each, dict | list | tuple) or is_wanted(each):
            step = f".{name}" if isinstance(value, dict) else f"[{name}]"
            if found := first_in(each, is_wanted, place + step):
                return found
    return None


def placed(value: object, place: str) -> str:
    """Return a value and its place as messages say it: "1e999 at [3].x". Long places are cut."""
    shown = printable(place.removeprefix(".")[:_MAX_PLACE])
    return f"{value} at {shown}{'...' * (len(place) > _MAX_PLACE)}" if place else str(value)


class _LongNumber(str):
    """The digits of a number that is out of range."""

    __slots__ = ()

    def __str__(self) -> str:
        shown = self[:_MAX_SHOWN]
        return shown if len(shown) == len(self) else f"{shown}... ({len(self)} characters)"
