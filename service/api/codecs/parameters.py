"""Parameters for the model, as JSON: from a body, from a form, or from the query string."""

from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate
from urllib.parse import parse_qsl

import msgspec

from inferpool.models.json_errors import BYTE_ORDER_MARK, JsonErrors, json_message
from inferpool.service.errors import BadRequestError, InvalidInputError, TooLargeError

MAX_PARAMETER_BYTES = 16 * 1024
MAX_DEPTH = 100
"""The deepest nesting of JSON: parsers recurse, and Python's default limit is 1,000 frames."""

TENSOR_KEYS = ("dtype", "shape", "name")
"""Query keys that describe a body of raw tensor bytes."""
OUTPUT_KEY = "output"
"""The query key that picks one output of several."""
_OUR_KEYS = frozenset((*TENSOR_KEYS, OUTPUT_KEY))
_MAX_QUERY_FIELDS = 64
_SHORT_QUERY_BYTES = 256

_DEPTH_STEPS = bytes(1 if code in b"[{" else 255 if code in b"]}" else 0 for code in range(256))
"""Maps an opening bracket to 1 and a closing one to -1 (as a signed byte)."""
_NO_BRACKETS = bytes(code for code in range(256) if code not in b'[]{}"')

_MANY_BRACKETS = 100_000
"""With more, numpy is worth its import: 16 MiB of them take it 50 ms, and `accumulate` 400."""

_raw_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_query(query: bytes) -> Mapping[str, str]:
    """Parse a query string.

    Raises:
        BadRequestError: A key is there twice, or there are too many.
    """
    return _read_short(query) if len(query) <= _SHORT_QUERY_BYTES else _read(query)


def from_query(query: bytes) -> Mapping[str, bytes]:
    """Return the parameters in a query string, each as JSON: a literal, or else a string.

    Raises:
        BadRequestError: A key is there twice, or there are too many.
    """
    if not query:
        return {}
    fields = read_query(query)
    return {key: literal(text) for key, text in fields.items() if key not in _OUR_KEYS}


def literal(text: str) -> bytes:
    """Return the JSON of a value given as text: the text itself if it is JSON, else a string."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= MAX_PARAMETER_BYTES and not is_too_deep(encoded):
        try:
            msgspec.json.decode(encoded)
        except JsonErrors:
            pass
        else:
            return encoded.strip()
    return msgspec.json.encode(encoded.decode("utf-8", "replace"))


def merge(given: Mapping[str, bytes], text: bytes = b"", place: str = "parameters") -> bytes:
    """Return one JSON object of all parameters.

    `given` has JSON by name, from the query or a form. `text` is a JSON object or nothing; its
    members go first. Messages call it `place`.

    Raises:
        BadRequestError: The text is not JSON.
        InvalidInputError: It is not an object.
        TooLargeError: There is too much of it.
    """
    text = text.removeprefix(BYTE_ORDER_MARK)
    if len(text) > MAX_PARAMETER_BYTES:
        raise _too_large(place)
    members = _members(text, place) if text else {}
    if given:
        pairs = {**given, **members}.items()
        text = b",".join([msgspec.json.encode(key) + b":" + value for key, value in pairs])
        text = b"{" + text + b"}"
    elif not members:
        text = b""
    if len(text) > MAX_PARAMETER_BYTES:
        raise _too_large(place)
    return text


def is_too_deep(text: bytes) -> bool:
    """Return whether JSON is nested deeper than `MAX_DEPTH`: exact, and in C for long texts."""
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return False
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = text.translate(None, _NO_BRACKETS)
    if b'"' in brackets:
        brackets = b"".join(brackets.split(b'"')[::2])
    steps = memoryview(brackets.translate(_DEPTH_STEPS)).cast("b")
    if len(steps) > _MANY_BRACKETS:
        import numpy as np

        return int(np.asarray(steps).cumsum(dtype=np.int32).max()) > MAX_DEPTH
    return max(accumulate(steps), default=0) > MAX_DEPTH


def _members(text: bytes, place: str) -> dict[str, bytes]:
    """Return the members of a JSON object, each checked to be JSON; none for null."""
    if is_too_deep(text):
        raise InvalidInputError(f"{place}: nested more than {MAX_DEPTH} deep")
    try:
        value = msgspec.json.decode(text)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise InvalidInputError(f'{place}: must be an object such as {{"top_k": 3}}')
        return {key: bytes(raw) for key, raw in _raw_members.decode(text).items()}
    except JsonErrors as error:
        raise BadRequestError(f"{place}: {json_message(error, text)}") from None


def _read(query: bytes) -> Mapping[str, str]:
    try:
        pairs = parse_qsl(
            query.decode("latin-1"), keep_blank_values=True, max_num_fields=_MAX_QUERY_FIELDS
        )
    except ValueError:
        raise BadRequestError(f"the query has more than {_MAX_QUERY_FIELDS} fields") from None
    fields = dict(pairs)
    if len(fields) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BadRequestError(f"the query has {twice!r} more than once")
    return fields


_read_short = lru_cache(maxsize=256)(_read)
"""Cached: clients repeat the same few queries, and parsing one takes 2 to 3 us."""


def _too_large(place: str) -> TooLargeError:
    return TooLargeError(f"{place}: more than {MAX_PARAMETER_BYTES} bytes")
