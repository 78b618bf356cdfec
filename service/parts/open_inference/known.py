"""Requests whose JSON came before, with one binary tensor of one instance: nothing is parsed again.

A client sends the same JSON with each call of its loop, and only the tensor behind it differs.
Event loop only.
"""

from collections.abc import Sequence
from typing import NamedTuple

from inferpool.models.spec import TensorHeader, TensorSpec
from inferpool.service.api.codecs.body import Decoded, Payload
from inferpool.service.api.exchange import ModelEntry
from inferpool.service.parts.open_inference.requests import KNOWN_BYTES
from inferpool.service.parts.open_inference.values import BYTES, InferRequest
from inferpool.service.queue.instance import Buffer

_MOST = 256


class KnownRequest(NamedTuple):
    """A request that passed its checks, for a model with these inputs."""

    inputs: Sequence[TensorSpec]
    asked: InferRequest
    """Without its inputs."""
    headers: tuple[TensorHeader, ...]
    num_bytes: int
    """Bytes of the tensor."""
    parameters: bytes

    def decoded(self, text_bytes: int, chunks: Sequence[Buffer]) -> Decoded:
        """Return a body that begins with the same JSON."""
        pieces = [memoryview(chunks[0])[text_bytes:], *chunks[1:]]
        return Decoded([Payload("tensors", pieces, self.headers)], True, self.parameters)


class KnownRequests(dict[bytes, KnownRequest]):
    """Known requests by their JSON. Their number is bounded."""

    def find(
        self, text_bytes: int | None, chunks: Sequence[Buffer], entry: ModelEntry
    ) -> KnownRequest | None:
        """Return the request that a body is known to be; None if it must be read.

        Args:
            text_bytes: Bytes of its JSON, as its head says.
            chunks: The body.
            entry: The version that it is for.
        """
        if text_bytes is None or not 0 < text_bytes <= min(KNOWN_BYTES, len(chunks[0])):
            return None
        known = self.get(bytes(memoryview(chunks[0])[:text_bytes]))
        if known is None or known.inputs is not entry.inputs:
            return None
        return known if sum(map(len, chunks)) - text_bytes == known.num_bytes else None

    def remember(
        self,
        text_bytes: int | None,
        chunks: Sequence[Buffer],
        entry: ModelEntry,
        request: InferRequest,
        decoded: Decoded,
    ) -> None:
        """Store a request that was read, if others like it need not be."""
        (payload, *others), (given, *more) = decoded.payloads, request.inputs
        if others or more or given.datatype in (BYTES, "BOOL"):  # each bool is checked
            return
        if text_bytes is None or not 0 < text_bytes <= min(KNOWN_BYTES, len(chunks[0])):
            return
        num_bytes = sum(map(len, payload.chunks))
        if sum(map(len, chunks)) - text_bytes != num_bytes:
            return  # the tensor is in the JSON
        if len(self) >= _MOST:
            self.clear()
        self[bytes(memoryview(chunks[0])[:text_bytes])] = KnownRequest(
            entry.inputs,
            request._replace(inputs=()),
            payload.headers,
            num_bytes,
            decoded.parameters,
        )
