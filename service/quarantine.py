"""Inputs that have killed workers, by digest, so that the same input does not kill more.

Digests are kept, never payloads, and as many as a bound allows. Used by the event loop alone.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from models.spec import TensorHeader
from service.request import Buffer
from workers.messages import Kind

MAX_INPUTS = 1024
"""The oldest makes room for one more."""
_DIGEST_BYTES = 16
_SAMPLE_BYTES = 32
"""Of the begin, of the middle and of the end: enough to tell most payloads of one length apart."""


class _Stay(NamedTuple):
    until: float
    num_bytes: int
    sample: bytes


class Quarantine:
    """The inputs of one model that are not to be tried for a while.

    While it is empty, it costs those who ask one look-up in an empty dictionary. While it is not,
    inputs of another length cost the same, and of those of one of its lengths all but the few with
    an equal sample are told apart without a digest.
    """

    def __init__(self, *, duration_s: float, max_inputs: int = MAX_INPUTS) -> None:
        """Begin empty.

        Args:
            duration_s: How long an input stays; 0 keeps nothing.
            max_inputs: How many there may be at once.
        """
        self.duration_s = duration_s
        self.lengths: dict[int, Counter[bytes]] = {}
        """Samples of the payloads inside, by the payload's length in bytes."""
        self._max_inputs = max_inputs
        self._stays: OrderedDict[bytes, _Stay] = OrderedDict()
        """By digest; the next to leave comes first, since all stay equally long."""

    def num_inputs(self, now: float) -> int:
        """How many are inside."""
        self._release(now)
        return len(self._stays)

    def add(
        self,
        kind: Kind,
        headers: Sequence[TensorHeader],
        parameters: bytes,
        payload: bytes,
        now: float,
    ) -> str:
        """Take an input in, and return its digest, for the log."""
        digest = _digest(kind, headers, parameters, payload)
        if self.duration_s > 0:
            if digest in self._stays:
                self._drop(digest)
            elif len(self._stays) >= self._max_inputs:
                self._drop(next(iter(self._stays)))
            stay = _Stay(now + self.duration_s, len(payload), _sample(payload))
            self._stays[digest] = stay
            self.lengths.setdefault(stay.num_bytes, Counter())[stay.sample] += 1
        return digest.hex()

    def left_s(
        self,
        kind: Kind,
        headers: Sequence[TensorHeader],
        parameters: bytes,
        chunks: Sequence[Buffer],
        now: float,
    ) -> float:
        """How long an input has to stay yet, in seconds; 0 for one that is not inside.

        Args:
            kind: Of the payload.
            headers: Of its tensors.
            parameters: What the model was told with it.
            chunks: The payload, in pieces.
            now: CLOCK_MONOTONIC seconds.
        """
        self._release(now)
        payload = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        samples = self.lengths.get(len(payload))
        if samples is None or _sample(payload) not in samples:
            return 0.0
        stay = self._stays.get(_digest(kind, headers, parameters, payload))
        return 0.0 if stay is None else stay.until - now

    def _release(self, now: float) -> None:
        """Let those go whose time is over."""
        while self._stays:
            digest, stay = next(iter(self._stays.items()))
            if stay.until > now:
                return
            self._drop(digest)

    def _drop(self, digest: bytes) -> None:
        stay = self._stays.pop(digest)
        samples = self.lengths[stay.num_bytes]
        samples[stay.sample] -= 1
        if not samples[stay.sample]:
            del samples[stay.sample]
        if not samples:
            del self.lengths[stay.num_bytes]


def _sample(payload: Buffer) -> bytes:
    middle = len(payload) // 2
    return b"".join(
        (
            payload[:_SAMPLE_BYTES],
            payload[middle : middle + _SAMPLE_BYTES],
            payload[-_SAMPLE_BYTES:],
        )
    )


def _digest(
    kind: Kind, headers: Sequence[TensorHeader], parameters: bytes, payload: Buffer
) -> bytes:
    # What stands before the payload is one msgpack value, which says where it ends.
    digest = blake2b(msgspec.msgpack.encode((kind, headers, parameters)), digest_size=_DIGEST_BYTES)
    digest.update(payload)
    return digest.digest()
