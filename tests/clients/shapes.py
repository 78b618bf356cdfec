"""The models of these tests: their names, tensors and labels, as both servers declare them.

Triton's own Python loads this file too, so it imports nothing that is not in the standard library.
"""

from dataclasses import dataclass

MAX_BATCH_SIZE = 8
Tensor = tuple[str, str, tuple[int, ...]]
"""Name, datatype of the protocol, and shape of one instance."""
DATATYPES = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
    "BF16": "bfloat16",
}
"""Names of the protocol's datatypes in numpy and torch."""


@dataclass(frozen=True)
class PeerModel:
    """One model that both servers serve."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    labels: tuple[str, ...] = ()
    """Names of the classes of its only output."""
    streams: bool = False
    """It answers in parts."""


_HALVES = ("FP16", "BF16")
MODELS = {
    "add_sub": PeerModel(
        inputs=(("INPUT0", "INT32", (4,)), ("INPUT1", "INT32", (4,))),
        outputs=(("SUM", "INT32", (4,)), ("DIFFERENCE", "INT32", (4,))),
    ),
    "types": PeerModel(
        inputs=tuple((f"IN_{t}", t, (2,)) for t in DATATYPES if t not in _HALVES),
        outputs=tuple((f"OUT_{t}", t, (2,)) for t in DATATYPES if t not in _HALVES),
    ),
    "halves": PeerModel(
        inputs=tuple((f"IN_{t}", t, (2,)) for t in _HALVES),
        outputs=tuple((f"OUT_{t}", t, (2,)) for t in _HALVES),
    ),
    "scores": PeerModel(
        inputs=(("x", "FP32", (4,)),),
        outputs=(("y", "FP32", (4,)),),
        labels=("ant", "bee", "cow", "dog"),
    ),
    "any_size": PeerModel(
        inputs=(("x", "FP32", (-1,)),),
        outputs=(("y", "FP32", (-1,)),),
    ),
    "half_floats": PeerModel(
        inputs=(("x", "FP16", (-1,)),),
        outputs=(("y", "FP16", (-1,)),),
    ),
    "lengths": PeerModel(
        inputs=(("input", "BYTES", (1,)),),
        outputs=(("length", "INT32", (1,)),),
    ),
    "counts": PeerModel(
        inputs=(("n", "INT32", (1,)),),
        outputs=(("output", "BYTES", (1,)),),
        streams=True,
    ),
    "fails": PeerModel(
        inputs=(("x", "INT32", (1,)),),
        outputs=(("y", "INT32", (1,)),),
    ),
}
"""`scores`, `any_size`, `half_floats`, `types` and `halves` return what they were given; `lengths`
returns the number of bytes; `counts` answers n by the parts [0], [1], ... [n - 1] as JSON, and
fails at part 2 if n is more than 100; `fails` fails for a number below 0, and returns others."""
