"""Numbers and texts of tensors as JSON, both ways. Imported with the first, because of numpy."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from math import prod
from typing import Any

import msgspec
import numpy as np

from inferpool.models.json_errors import JsonErrors, json_message
from inferpool.service.errors import BadRequestError, InvalidInputError, TooLargeError
from inferpool.service.parts.open_inference.values import BYTES, DTYPES, InferOutput
from inferpool.service.queue.instance import Buffer

BINARY_ALONE = ("FP16", "BF16")
"""Datatypes that have no form in JSON."""
_SPACE = b" \t\r\n"
_SEARCHED_BYTES = 1 << 15
_NO_LIST = bytes(code for code in range(256) if code not in b"[,]")


def read_data(
    data: msgspec.Raw, datatype: str, shape: Sequence[int], place: str, most_rows: int
) -> Sequence[Buffer]:
    """Return the bytes of a tensor that is given as JSON: one list, or lists in lists.

    Args:
        data: JSON.
        datatype: The protocol's name of the dtype; for BYTES there is a piece for each text.
        shape: Shape of the tensor.
        place: What messages call it.
        most_rows: The largest batch, and most elements of BYTES.

    Raises:
        BadRequestError: It is no such list.
        InvalidInputError: The lists are of another shape, or a number is out of range.
        TooLargeError: The batch is too large.
    """
    if datatype in BINARY_ALONE:
        raise BadRequestError(
            f"{place}: {datatype} has no form in JSON; send it as binary, by binary_data_size"
        )
    num_rows = prod(shape) if datatype == BYTES else prod(shape[:1])
    if num_rows > most_rows:
        raise TooLargeError(
            f"{place}: a batch of {num_rows}; the limit for one request is {most_rows}"
        )
    if datatype == BYTES:
        return [text.encode() for text in _texts(bytes(data), shape, place)]
    if datatype not in DTYPES:
        raise BadRequestError(
            f"{place}: {datatype[:40]!r} is not one of {', '.join(DTYPES)}, {BYTES}"
        )
    kind: Any = {"B": bool, "F": int | float}.get(datatype[0], int)  # as float it takes longer
    values = _numbers(bytes(data), kind, shape, place)
    if kind is bool:
        return [bytes(values)]
    return [_packed(values, DTYPES[datatype], datatype, place)]


def write_data(output: InferOutput) -> bytes:
    """Return the values of an output as one JSON list; NaN and infinities become null.

    Raises:
        BadRequestError: It has no form in JSON.
    """
    place = f"output {output.name!r}"
    if output.datatype in BINARY_ALONE:
        raise BadRequestError(
            f"{place}: {output.datatype} has no form in JSON; ask for it as binary, by binary_data"
        )
    if output.datatype == BYTES:
        try:
            return msgspec.json.encode([str(chunk, "utf-8") for chunk in output.chunks])
        except UnicodeDecodeError:
            raise BadRequestError(
                f"{place}: it is no text, so JSON cannot hold it; ask for it as binary, by "
                "binary_data"
            ) from None
    flat = np.frombuffer(b"".join(output.chunks), DTYPES[output.datatype])
    return msgspec.json.encode(flat.tolist())


def _numbers(data: bytes, kind: Any, shape: Sequence[int], place: str) -> list[Any]:
    """Return the numbers of lists as one list. Lists in lists cost too much to be made first."""
    rank = _checked_rank(data, shape, place)
    text, num = data.translate(None, _SPACE), prod(shape)
    if rank == 1:
        found = text.count(b",") + (text != b"[]")
        if found != num:
            raise InvalidInputError(f"{place}: {list(shape)} has {num} values, found {found}")
    else:
        _check_nesting(text, shape, place)
        text = b"[%b]" % text.translate(None, b"[,]" if not num else b"[]")
    try:
        values: list[Any] = _decoder(list[kind]).decode(text)
    except JsonErrors as error:
        raise _wrong(error, text, place) from None
    return values


def _texts(data: bytes, shape: Sequence[int], place: str) -> list[str]:
    """Return the texts of lists as one list."""
    rank = _checked_rank(data, shape, place)
    made: Any = str
    for size in reversed(shape if rank > 1 else (prod(shape),)):
        made = tuple[(made,) * size]  # type: ignore[misc]  # longer lists end the decoding
    try:
        values = _decoder(made).decode(data)
    except JsonErrors as error:
        raise _wrong(error, data, place) from None
    for _ in range(rank - 1):
        values = list(chain.from_iterable(values))
    return list(values)


def _wrong(error: Exception, text: bytes, place: str) -> InvalidInputError:
    # To find a number that is out of range takes a second in a long text.
    message = json_message(error, text if len(text) <= _SEARCHED_BYTES else b"")
    return InvalidInputError(f"{place}: {message.replace('`$', '`data')}")


def _checked_rank(data: bytes, shape: Sequence[int], place: str) -> int:
    """Return how deep the first list is nested."""
    rank = 0
    for code in data:
        if code == 0x5B:
            rank += 1
        elif code not in _SPACE:
            break
    if rank not in (1, len(shape) or 1):
        raise InvalidInputError(
            f"{place}: data is nested {rank} deep; one list is expected, or {len(shape)} deep for "
            f"{list(shape)}"
        )
    return rank


def _check_nesting(text: bytes, shape: Sequence[int], place: str) -> None:
    """Check by brackets and commas alone that lists have a shape."""
    found, expected = text.translate(None, _NO_LIST), b""
    if prod(size or 1 for size in shape) <= len(text):
        for size in reversed(shape):
            expected = b"[%b]" % b",".join([expected] * size)
    is_empty = 0 in shape
    if (text if is_empty else found) == expected and is_empty == (b"[]" in text):
        return
    length = min(len(found), len(expected))
    differ = np.frombuffer(found, "u1", length) != np.frombuffer(expected, "u1", length)
    before = found[: int(differ.argmax()) if differ.any() else length]
    axis = max(before.count(b"[") - before.count(b"]") - 1, 0)
    raise InvalidInputError(
        f"{place}: data is not nested as {list(shape)} says: in dimension {axis}, or below it, a "
        "list has another length"
    )


def _packed(values: Sequence[Any], dtype: str, datatype: str, place: str) -> bytes:
    """Return numbers as bytes, each in the range of its dtype."""
    try:
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and is found below
            array = np.array(values, dtype)
    except OverflowError:
        limits: Any = np.finfo(dtype) if datatype[0] == "F" else np.iinfo(dtype)
        least, most = (
            limit if isinstance(limit, int) else float(limit) for limit in (limits.min, limits.max)
        )
        index = next(i for i, value in enumerate(values) if not least <= value <= most)
    else:
        if array.dtype.kind != "f" or np.isfinite(array).all():
            return array.tobytes()
        index = int(np.argmin(np.isfinite(array)))
    shown = str(values[index])[:30]
    raise InvalidInputError(
        f"{place}: value {index} of data, {shown}, is out of range for {datatype}"
    )


@lru_cache(maxsize=64)
def _decoder(kind: Any) -> "msgspec.json.Decoder[Any]":
    return msgspec.json.Decoder(kind)
