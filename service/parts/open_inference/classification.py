"""Outputs as their best classes: Triton's extension "classification". Imported with the first."""

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from inferpool.service.errors import InvalidInputError
from inferpool.service.parts.open_inference.values import BYTES, DTYPES, InferOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_MAX_VALUES = 1 << 20
"""Most values in one output: they are sorted in the event loop."""
_MAX_CLASSES = 1 << 14
"""Most texts in one output."""


def classified(output: InferOutput, count: int, labels: "Sequence[str]") -> InferOutput:
    """Return the classes with the largest values of each instance, the largest first.

    Each is the text `value:index`, or `value:index:label` if it has a label. Equal values are in
    the order of their indices.

    Args:
        output: Values [B, ...]; those of an instance are counted along all dimensions.
        count: Classes for each instance; all if there are fewer.
        labels: Names of the classes, or none.

    Raises:
        InvalidInputError: The output has no numbers, or too many.
    """
    values = _values_of(output)
    count = min(count, values.shape[1])
    if values.size > _MAX_VALUES or values.shape[0] * count > _MAX_CLASSES:
        raise InvalidInputError(
            f"output {output.name!r}: {values.size} values are too many for {count} classes each"
        )
    form = "%f:%d" if values.dtype.kind == "f" else "%d:%d"
    texts = []
    for row in values:
        order = _largest(row, count)
        for index, value in zip(order.tolist(), row[order].tolist(), strict=True):
            label = f":{labels[index]}" if index < len(labels) else ""
            texts.append((form % (value, index) + label).encode())
    return output._replace(datatype=BYTES, shape=(values.shape[0], count), chunks=texts)


def _largest(row: "NDArray[Any]", count: int) -> "NDArray[np.intp]":
    """Return the indices of the largest values, the largest first; equal ones in their order."""
    indices = np.arange(len(row))
    if 0 < count < len(row):  # all are not sorted, only those that may be among the largest
        indices = indices[~(row < np.partition(row, -count)[-count])]
    # The order is that of the reversed values, reversed: so equal values keep their order.
    order = np.argsort(row[indices][::-1], kind="stable")[::-1][:count]
    return indices[len(indices) - 1 - order]


def _values_of(output: InferOutput) -> "NDArray[Any]":
    """Return the values of each instance as one row."""
    dtype = DTYPES.get(output.datatype, "bool")
    if dtype == "bool":
        raise InvalidInputError(
            f"output {output.name!r}: {output.datatype} has no values to be classes"
        )
    data = b"".join(output.chunks)
    if dtype == "bfloat16":  # the upper half of a float32
        flat = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        flat = np.frombuffer(data, dtype)
    return flat.reshape(output.shape[0], prod(output.shape[1:]))
