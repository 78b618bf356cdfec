"""The protocol's values: names of datatypes, requests and answers. REST and gRPC share them.

Field names and datatypes are those of the Open Inference Protocol, version 2.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from inferpool.service.queue.instance import Buffer

DTYPES = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "INT8": "int8",
    "UINT16": "uint16",
    "INT16": "int16",
    "UINT32": "uint32",
    "INT32": "int32",
    "UINT64": "uint64",
    "INT64": "int64",
    "FP16": "float16",
    "BF16": "bfloat16",
    "FP32": "float32",
    "FP64": "float64",
}
"""The protocol's names of dtypes, and ours. It has BYTES too: texts, pictures, and JSON."""
DATATYPES = {ours: theirs for theirs, ours in DTYPES.items()}
BYTES = "BYTES"
BYTES_INPUT = "input"
"""The name of the BYTES input of a model that declares no tensors; any other name will do."""
BYTES_OUTPUT = "output"
"""The name of the output of a model that answers with JSON or content."""


class InferInput(NamedTuple):
    """One input of a request."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    """With the batch first."""
    chunks: Sequence[Buffer]
    """Its bytes, row-major and little-endian, in pieces. For BYTES: one piece for each element,
    without its length."""
    parameters: Mapping[str, object] = {}


class RequestedOutput(NamedTuple):
    """One output that a request asks for."""

    name: str
    parameters: Mapping[str, object] = {}


class InferRequest(NamedTuple):
    """A request of the protocol."""

    inputs: Sequence[InferInput]
    id: str = ""
    parameters: Mapping[str, object] = {}
    outputs: Sequence[RequestedOutput] = ()
    """Empty asks for all."""


class InferOutput(NamedTuple):
    """One output of an answer."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    chunks: Sequence[Buffer]
    """Its bytes, like those of an `InferInput`."""
    parameters: Mapping[str, object] = {}

    def pieces(self) -> Sequence[Buffer]:
        """Return its bytes as the binary forms have them: BYTES with their lengths before them."""
        if self.datatype != BYTES:
            return self.chunks
        found: list[Buffer] = []
        for element in self.chunks:
            found += (len(element).to_bytes(4, "little"), element)
        return found
