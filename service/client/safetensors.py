"""The safetensors format: tensors as bytes, with neither numpy nor torch."""

import json
import re
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from .errors import ProtocolError

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
"""Dtype names of the safetensors format, by the names that numpy and torch use."""
_DTYPES = {theirs: ours for ours, theirs in SAFETENSORS_DTYPES.items()}
_DTYPE_BYTES = {
    name: 1 if name == "bool" else int(re.sub(r"\D", "", name)) // 8 for name in SAFETENSORS_DTYPES
}


class RawTensor(NamedTuple):
    """A tensor's bytes: little-endian, in C order, without gaps."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def safetensors_parts(tensors: Mapping[str, RawTensor]) -> list[bytes | memoryview]:
    """Return a safetensors file in pieces; the widest dtypes come first, so each is aligned."""
    ordered = sorted(tensors.items(), key=lambda item: -_DTYPE_BYTES[item[1].dtype])
    entries = {}
    begin = 0
    for name, tensor in ordered:
        end = begin + len(tensor.data)
        entries[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (begin, end),
        }
        begin = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return [len(header).to_bytes(8, "little") + header, *(tensor.data for _, tensor in ordered)]


def read_safetensors(body: bytes) -> dict[str, RawTensor]:
    """Read a safetensors file. The tensors share one writable copy of it.

    Raises:
        ProtocolError: The bytes are not a safetensors file.
    """
    copy = memoryview(bytearray(body))
    try:
        begin = 8 + int.from_bytes(copy[:8], "little")
        entries = json.loads(bytes(copy[8:begin]))
        entries.pop("__metadata__", None)
        return {name: _read_entry(copy[begin:], entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"the answer is not a safetensors file: {error!r}") from None


def _read_entry(data: memoryview, entry: Mapping[str, Any]) -> RawTensor:
    begin, end = entry["data_offsets"]
    tensor = RawTensor(_DTYPES[entry["dtype"]], tuple(entry["shape"]), data[begin:end])
    num_bytes = prod(tensor.shape) * _DTYPE_BYTES[tensor.dtype]
    if num_bytes != len(tensor.data) or any(length < 0 for length in tensor.shape):
        raise ValueError(f"shape, dtype and offsets disagree: {entry}")
    return tensor
