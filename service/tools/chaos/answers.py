"""Comparison of two JSON answers: floats may differ by rounding, all else must be equal."""

from collections.abc import Mapping, Sequence

import msgspec

_MAX_SHOWN = 80
_MAX_ROUNDINGS = 64
_ATOL_SHARE = 0.01
"""Share of the tolerance by which numbers close to zero may differ."""


class Expected:
    """The right answer to one input."""

    def __init__(self, body: bytes, tolerance: float) -> None:
        """Take the answer that the service gave when nothing else was asked.

        Args:
            body: JSON.
            tolerance: By how much a float may differ, as a part of itself: a batch of another size
                is rounded otherwise.
        """
        self.value = msgspec.json.decode(body)
        self._tolerance = tolerance
        self._known_right = {body}

    def complaint(self, body: bytes) -> str:
        """Say what is wrong with an answer; empty if nothing is."""
        if body in self._known_right:
            return ""
        try:
            value = msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            return f"no JSON: {error}"
        complaint = difference(self.value, value, self._tolerance)
        if not complaint and len(self._known_right) < _MAX_ROUNDINGS:
            self._known_right.add(body)
        return complaint

    def is_same_as(self, other: "Expected") -> bool:
        """Return whether the two answers are alike, so that nobody would see a swap."""
        return not difference(self.value, other.value, self._tolerance)


def difference(expected: object, found: object, tolerance: float, place: str = "answer") -> str:
    """Name the first place where two JSON values differ by more than rounding; empty if none."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        if expected.keys() != found.keys():
            return f"{place}: expected the keys {list(expected)}, found {list(found)}"
        for key, value in expected.items():
            if complaint := difference(value, found[key], tolerance, f"{place}.{key}"):
                return complaint
        return ""
    if _is_list(expected) and _is_list(found):
        assert isinstance(expected, Sequence)
        assert isinstance(found, Sequence)
        if len(expected) != len(found):
            return f"{place}: expected {len(expected)} entries, found {len(found)}"
        for i, (left, right) in enumerate(zip(expected, found, strict=True)):
            if complaint := difference(left, right, tolerance, f"{place}[{i}]"):
                return complaint
        return ""
    if _is_number(expected) and _is_number(found) and float in (type(expected), type(found)):
        assert isinstance(expected, int | float)
        assert isinstance(found, int | float)
        allowed = tolerance * (max(abs(expected), abs(found)) + _ATOL_SHARE)
        is_same = abs(expected - found) <= allowed
    else:
        is_same = type(expected) is type(found) and expected == found
    return "" if is_same else f"{place}: expected {_shown(expected)}, found {_shown(found)}"


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
