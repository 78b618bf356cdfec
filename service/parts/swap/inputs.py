"""Inputs for comparisons of versions: an example, made-up ones, and live ones."""

import asyncio
from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from inferpool.models.bodies import body_of
from inferpool.models.spec import DTYPE_BYTES, Kind, TensorHeader
from inferpool.service.api.codecs.body import BodyContext, Limits, Payload
from inferpool.service.api.codecs.requests import decode
from inferpool.service.errors import ServiceError
from inferpool.service.queue.instance import Buffer
from inferpool.service.queue.pool import Pool
from inferpool.workers.shared.messages import ItemRef

if TYPE_CHECKING:
    from inferpool.models.spec import TensorSpec

_NUM_MADE_UP = 8
_MAX_BYTES = 64 * 2**20
"""The most memory that recorded inputs take, and those that are made up."""
_FREE_LENGTH = 8
"""The length of a dimension that may have any."""


class SwapInput(msgspec.Struct, frozen=True, kw_only=True):
    """One input, with everything that its answer depends on."""

    kind: Kind
    payload: bytes
    headers: tuple[TensorHeader, ...] = ()
    parameters: bytes = b""
    is_made_up: bool = False
    """It has random numbers."""
    is_live: bool = False
    """A client has sent it."""

    @classmethod
    def of(cls, payload: Payload, parameters: bytes) -> "SwapInput":
        """Return an instance that was read like that of a call."""
        return cls(
            kind=payload.kind,
            payload=b"".join(map(bytes, payload.chunks)),
            headers=payload.headers,
            parameters=parameters,
        )


class InputRecorder:
    """Records the inputs that a version gets, until there are enough. Lives in the event loop."""

    def __init__(self, pool: Pool, most: int, share: float = 1.0) -> None:
        """Begin to record up to `most` inputs, a share of those that come."""
        self.inputs: list[SwapInput] = []
        self._most = most
        self._share = share
        self._owed = 0.0
        self._num_bytes = 0
        self.stop = pool.guard(self.take)
        """Records nothing more."""

    @property
    def is_full(self) -> bool:
        """Nothing more is recorded."""
        return len(self.inputs) >= self._most

    def take(self, ref: ItemRef, chunks: Sequence[Buffer]) -> None:
        """Copy an instance that is about to be submitted, if it is its turn."""
        self._owed += self._share
        if self._owed < 1:
            return
        self._owed -= 1
        if self.is_full or self._num_bytes + ref.num_bytes > _MAX_BYTES:
            return
        self._num_bytes += ref.num_bytes
        payload = b"".join(map(bytes, chunks))
        self.inputs.append(
            SwapInput(
                kind=ref.kind,
                payload=payload,
                headers=ref.headers,
                parameters=ref.parameters,
                is_live=True,
            )
        )

    def take_all(self) -> list[SwapInput]:
        """Return what was recorded since the last call, and make room for more."""
        inputs, self.inputs, self._num_bytes = self.inputs, [], 0
        return inputs


async def inputs_of(pool: Pool) -> list[SwapInput]:
    """Return the example of a model, and inputs that are made up from what it declares."""
    if pool.example is None and not pool.inputs:
        return []
    return await asyncio.to_thread(list, _inputs_of(pool))  # large ones are slow to create


def _inputs_of(pool: Pool) -> Iterator[SwapInput]:
    if pool.example is not None:
        body = msgspec.json.encode(body_of(pool.interface, pool.example))
        head = BodyContext({}, b"", pool.inputs, Limits(), pool.interface)
        try:
            decoded = decode(b"application/json", [body], head)
        except ServiceError:
            pass  # the example is too long for an HTTP call
        else:
            for payload in decoded.payloads:
                yield SwapInput.of(payload, decoded.parameters)
    if pool.inputs and all(each.shape for each in pool.inputs) and not pool.reads_own_form:
        rng = np.random.default_rng(0)
        num_bytes = sum(prod(_shape_of(each)) * DTYPE_BYTES[each.dtype] for each in pool.inputs)
        for _ in range(min(_NUM_MADE_UP, _MAX_BYTES // max(1, num_bytes))):
            yield _made_up(pool.inputs, rng)


def _shape_of(spec: "TensorSpec") -> tuple[int, ...]:
    return tuple(_FREE_LENGTH if size < 0 else size for size in spec.instance_shape)


def _made_up(inputs: "Sequence[TensorSpec]", rng: np.random.Generator) -> SwapInput:
    headers: list[TensorHeader] = []
    pieces: list[bytes] = []
    for spec in inputs:
        shape = _shape_of(spec)
        headers.append(TensorHeader(spec.name, spec.dtype, shape, sum(map(len, pieces))))
        pieces.append(_numbers(spec.dtype, prod(shape), rng))
    payload = b"".join(pieces)
    return SwapInput(kind="tensors", payload=payload, headers=tuple(headers), is_made_up=True)


def _numbers(dtype: str, num: int, rng: np.random.Generator) -> bytes:
    """Return random numbers: fractions around 0, bytes of any value, or small whole numbers."""
    if dtype == "bfloat16":
        bits = rng.standard_normal(num).astype(np.float32).view(np.uint32)
        return (bits >> 16).astype(np.uint16).tobytes()
    if dtype.startswith("float"):
        return rng.standard_normal(num).astype(dtype).tobytes()
    if dtype == "uint8":
        return rng.integers(0, 256, num, dtype=np.uint8).tobytes()
    small = rng.integers(0, 2, num)
    return small.astype(f"<i{DTYPE_BYTES[dtype]}").tobytes()
