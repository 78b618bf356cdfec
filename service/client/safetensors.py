"""The safetensors format: tensors as bytes, with neither numpy nor torch."""

import json
import re
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from inferpool.service.client.errors import ProtocolError

SAFETENSORS_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
"""Names of the safetensors format by those of numpy and torch."""

_BY_SAFETENSORS = {theirs: ours for ours, theirs in SAFETENSORS_DTYPES.items()}
_DTYPE_BYTES = {
    name: 1 if name == "bool" else int(re.sub(r"\D", "", name)) // 8 for name in SAFETENSORS_DTYPES
}


class Tensor(NamedTuple):
    """A tensor as it travels: little-endian, in C order, without gaps."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def safetensors_parts(tensors: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """A safetensors file, in pieces; the widest dtypes come first, so that each is aligned."""
    ordered = sorted(tensors.items(), key=lambda item: -_DTYPE_BYTES[item[1].dtype])
    entries = {}
    position = 0
    for name, tensor in ordered:
        end = position + len(tensor.data)
        dtype = SAFETENSORS_DTYPES[tensor.dtype]
        entries[name] = {
            "dtype": dtype,
            "shape": tensor.shape,
            "data_offsets": (position, end),
        }
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *(tensor.data for _, tensor in ordered)]


def read_safetensors(body: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file, over a copy of it that may be written to.

    Raises:
        ProtocolError: It is none.
    """
    copy = memoryview(bytearray(body))
    try:
        begin = 8 + int.from_bytes(copy[:8], "little")
        entries = json.loads(bytes(copy[8:begin]))
        entries.pop("__metadata__", None)
        return {name: _entry(copy[begin:], entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"the answer is no safetensors file: {error!r}") from None


def _entry(data: memoryview, entry: Mapping[str, Any]) -> Tensor:
    begin, end = entry["data_offsets"]
    tensor = Tensor(_BY_SAFETENSORS[entry["dtype"]], tuple(entry["shape"]), data[begin:end])
    size = prod(tensor.shape) * _DTYPE_BYTES[tensor.dtype]
    if size != len(tensor.data) or any(length < 0 for length in tensor.shape):
        raise ValueError(f"{entry} does not add up")
    return tensor
