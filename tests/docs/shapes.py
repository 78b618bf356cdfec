"""Compares an answer with the one that a page prints."""

import json
import re

_GAP = re.compile(r"(?:\.\.\.|…)(\s*})?")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_REST = "…"


def printed(text: str) -> object:
    """Read JSON in which `...` or `…` stand for what is left out."""
    pieces = []
    position = 0
    for string in _STRING.finditer(text):
        pieces += [_without_gaps(text[position : string.start()]), string[0]]
        position = string.end()
    pieces.append(_without_gaps(text[position:]))
    return json.loads("".join(pieces))


def difference(shown: object, real: object, place: str = "answer") -> str:
    """Return where a real value differs from the printed one, or an empty text.

    Keys, types and strings must be the same, but a printed string may leave things out by `…`, a
    real list may be longer, and any number equals any other.
    """
    if shown == _REST:
        return ""
    if isinstance(shown, dict) and isinstance(real, dict):
        expected = set(shown) - {_REST}
        if missing := expected - set(real):
            return f"{place} has no {sorted(missing)}: {real}"
        if _REST not in shown and (more := set(real) - expected):
            return f"{place} has {sorted(more)} too: {real}"
        pairs = [(shown[key], real[key], f"{place}.{key}") for key in expected]
    elif isinstance(shown, list) and isinstance(real, list):
        values = [each for each in shown if each != _REST]
        if len(real) < len(values):
            return f"{place} is shorter than printed: {real}"
        pairs = [(value, real[i], f"{place}[{i}]") for i, value in enumerate(values)]
    elif isinstance(shown, str) and isinstance(real, str):
        is_same = shown == real or "…" in shown or "..." in shown
        return "" if is_same else f"{place} is {real!r}, and {shown!r} is printed"
    else:
        is_same = _kind(shown) == _kind(real)
        return "" if is_same else f"{place} is {real!r}, and {shown!r} is printed"
    return next((found for each in pairs if (found := difference(*each))), "")


def _without_gaps(text: str) -> str:
    in_array, in_object = f'"{_REST}"', f'"{_REST}": "{_REST}"'
    return _GAP.sub(lambda gap: in_object + gap[1] if gap[1] else in_array, text)


def _kind(value: object) -> type:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float if is_number else type(value)
