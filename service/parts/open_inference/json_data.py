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
_MAX_RANK = 16
_SPACE = b" \t\r\n"


def read_data(
    data: msgspec.Raw, datatype: str, shape: Sequence[int], place: str, most_texts: int
) -> Sequence[Buffer]:
    """Return the bytes of a tensor that is given as JSON: one list, or lists in lists.

    Args:
        data: JSON.
        datatype: The protocol's name of the dtype; for BYTES there is a piece for each text.
        shape: Shape of the tensor.
        place: What messages call it.
        most_texts: Most elements of BYTES.

    Raises:
        BadRequestError: It is no such list.
        InvalidInputError: The lists are of another shape, or a number is out of range.
        TooLargeError: There are too many texts.
    """
    if datatype in BINARY_ALONE:
        raise BadRequestError(
            f"{place}: {datatype} has no form in JSON; send it as binary, by binary_data_size"
        )
    if datatype == BYTES:
        kind: type = str
        if prod(shape) > most_texts:
            raise TooLargeError(
                f"{place}: a batch of {prod(shape)}; the limit for one request is {most_texts}"
            )
    elif datatype in DTYPES:
        kind = {"B": bool, "F": float}.get(datatype[0], int)
    else:
        raise BadRequestError(
            f"{place}: {datatype[:40]!r} is not one of {', '.join(DTYPES)}, {BYTES}"
        )
    values = _flat(data, kind, shape, place)
    if kind is str:
        return [value.encode() for value in values]
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


def _flat(data: msgspec.Raw, kind: type, shape: Sequence[int], place: str) -> list[Any]:
    """Return the values of lists as one list."""
    rank = _rank(data)
    if rank not in (1, len(shape) or 1):
        raise InvalidInputError(
            f"{place}: data is nested {rank} deep; one list is expected, or {len(shape)} deep for "
            f"{list(shape)}"
        )
    try:
        values = _decoder(kind, rank).decode(data)
    except JsonErrors as error:
        where = str(json_message(error, data)).replace("`$", "`data")
        raise InvalidInputError(f"{place}: {where}") from None
    if rank > 1:
        rows = [values]
        for axis, size in enumerate(shape):
            wrong = next((len(row) for row in rows if len(row) != size), None)
            if wrong is not None:
                raise InvalidInputError(
                    f"{place}: a list of {wrong} in dimension {axis}, where {list(shape)} has "
                    f"{size}"
                )
            rows = list(chain.from_iterable(rows))
        return rows
    if len(values) != prod(shape):
        raise InvalidInputError(
            f"{place}: {list(shape)} has {prod(shape)} values, found {len(values)}"
        )
    return values  # type: ignore[no-any-return]  # the decoder's type is made up


def _packed(values: Sequence[Any], dtype: str, datatype: str, place: str) -> bytes:
    """Return numbers as bytes, each in the range of its dtype."""
    try:
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and is found below
            array = np.array(values, dtype)
    except OverflowError:
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        index = next(i for i, value in enumerate(values) if not least <= value <= most)
    else:
        if array.dtype.kind != "f" or np.isfinite(array).all():
            return array.tobytes()
        index = int(np.argmin(np.isfinite(array)))
    shown = str(values[index])[:30]
    raise InvalidInputError(
        f"{place}: value {index} of data, {shown}, is out of range for {datatype}"
    )


def _rank(data: msgspec.Raw) -> int:
    """Return how deep the first list is nested."""
    rank = 0
    for code in memoryview(data):
        if code == 0x5B:
            rank += 1
        elif code not in _SPACE:
            break
    return rank


@lru_cache(maxsize=64)
def _decoder(kind: type, rank: int) -> "msgspec.json.Decoder[Any]":
    made: Any = kind
    for _ in range(min(rank, _MAX_RANK)):
        made = list[made]
    return msgspec.json.Decoder(made)
