"""Inputs that have killed workers, by digest, so that the same input does not kill more.

The verdict is by deaths alone with an input. The death of a whole batch says only that each of its
inputs may have been the cause: each is a *suspect* from then on, and computed alone whenever it
comes, so that it takes nobody with it, until it has succeeded so. An input with which two workers
have died while each held nothing else, and which has not succeeded between, is guilty, whoever
asked for it and whether anybody still waited: it goes into quarantine. However often an input was
in a batch with somebody else's poison counts for nothing.

When several different inputs in a row have killed while they were alone, and not one batch has
succeeded between, it is not the inputs: they are let go, and none is taken until one succeeds.

Digests are kept, never payloads, and as many as a bound allows. Used by the event loop alone.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from inferpool.models.spec import TensorHeader
from inferpool.service.queue.instance import Buffer
from inferpool.workers.messages import Kind

logger = logging.getLogger(__name__)

MAX_CRASHES = 3
"""Workers that may die with an input: in a batch, however many those are, and twice with it alone.
"""
MAX_INPUTS = 1024
"""The oldest makes room for one more."""
_MAX_SUSPECTS = 4096
_NUM_DOUBTFUL = 3
"""Different inputs in a row of which workers have died: the workers' fault, not theirs."""
_DIGEST_BYTES = 16
_SAMPLE_BYTES = 32
"""Of the begin, of the middle and of the end: enough to tell most payloads of one length apart."""
_NUM_BLOCKS = 16
_BLOCK_BYTES = 1024
"""What a mark looks at: of a batch of 64, whatever its size, some 1.2 ms of hashing."""


class Input(NamedTuple):
    """All that makes an input what it is."""

    kind: Kind
    headers: Sequence[TensorHeader]
    """Of its tensors."""
    parameters: bytes
    """What the model was told with it."""
    payload: Buffer

    @property
    def sample(self) -> bytes:
        """A few bytes that tell most payloads of one length apart."""
        payload = self.payload
        middle = len(payload) // 2
        return b"".join(
            (
                payload[:_SAMPLE_BYTES],
                payload[middle : middle + _SAMPLE_BYTES],
                payload[-_SAMPLE_BYTES:],
            )
        )

    def digest(self) -> bytes:
        """What a verdict goes by: it covers every byte."""
        return self._digest(b"", [self.payload])

    def mark(self) -> bytes:
        """What suspicion goes by: of a long payload it covers parts, so that it costs little."""
        payload = self.payload
        num_bytes = len(payload)
        if num_bytes <= _NUM_BLOCKS * _BLOCK_BYTES:
            return self._digest(b"mark", [payload])
        last = num_bytes - _BLOCK_BYTES
        starts = [last * number // (_NUM_BLOCKS - 1) for number in range(_NUM_BLOCKS)]
        return self._digest(b"mark", [payload[start : start + _BLOCK_BYTES] for start in starts])

    def _digest(self, purpose: bytes, pieces: Sequence[Buffer]) -> bytes:
        # What stands before the payload is one msgpack value, which says where it ends.
        rest = (self.kind, self.headers, self.parameters, len(self.payload))
        digest = blake2b(msgspec.msgpack.encode(rest), digest_size=_DIGEST_BYTES, person=purpose)
        for piece in pieces:
            digest.update(piece)
        return digest.digest()


class Quarantine:
    """The inputs of one model that are not to be tried for a while, and those under suspicion.

    While it is empty, it costs those who ask a look-up in each of two empty dictionaries. While it
    is not, inputs of another length cost the same, and of those of one of its lengths all but the
    few with an equal sample are told apart without a digest.
    """

    def __init__(self, *, name: str, duration_s: float, max_inputs: int = MAX_INPUTS) -> None:
        """Begin empty.

        Args:
            name: Of the model, for the log.
            duration_s: How long an input stays, or is under suspicion; 0 keeps nothing.
            max_inputs: How many may be inside at once.
        """
        self.name = name
        self.duration_s = duration_s
        self._guilty = _Register(duration_s, max_inputs)
        self._suspects = _Register(duration_s, _MAX_SUSPECTS)
        self.lengths = self._guilty.lengths
        """Samples of the payloads inside, by the payload's length in bytes."""
        self.suspect_lengths = self._suspects.lengths
        """Likewise, of those under suspicion."""
        self.recent: set[bytes] = set()
        """Digests of the inputs that killed alone since a batch last succeeded."""

    def num_inputs(self, now: float) -> int:
        """How many are inside."""
        self._guilty.release(now)
        return len(self._guilty.entries)

    def left_s(self, input: Input, now: float) -> float:
        """How long an input has to stay yet, in seconds; 0 for one that is not inside.

        Args:
            input: The input.
            now: CLOCK_MONOTONIC seconds.
        """
        if not self._guilty.may_have(input, now):
            return 0.0
        entry = self._guilty.entries.get(input.digest())
        return 0.0 if entry is None else entry.until - now

    def is_suspect(self, input: Input, now: float) -> bool:
        """Whether a worker has died lately with an input that has not succeeded alone since."""
        return self._suspects.may_have(input, now) and input.mark() in self._suspects.entries

    def note_death(self, input: Input, now: float) -> None:
        """A worker has died with an input and with others."""
        if not self._is_in_doubt:
            self._suspects.put(input.mark(), input, 1, now)

    def note_death_alone(self, input: Input, num_crashes: int, now: float) -> tuple[int, str]:
        """A worker has died with an input and nothing else; which may be the verdict.

        Args:
            input: The input.
            num_crashes: Workers that died with this instance of it before: those that died with a
                whole batch count as one.
            now: CLOCK_MONOTONIC seconds.

        Returns:
            Workers that died with it by now, other instances of it included, and its digest for
            the log. From `MAX_CRASHES` on it is not to be tried again.
        """
        digest = input.digest()
        if self.duration_s > 0 and len(self.recent) < _NUM_DOUBTFUL:
            self.recent.add(digest)
            if self._is_in_doubt:
                self._let_go()
        if self._is_in_doubt:
            return num_crashes + 1, digest.hex()
        self._suspects.release(now)
        entry = self._suspects.entries.get(digest)
        num_crashes = 1 + max(num_crashes, entry.num_crashes if entry else 0)
        self._suspects.put(input.mark(), input, 1, now)
        self._suspects.put(digest, input, num_crashes, now)
        if num_crashes >= MAX_CRASHES:
            self._guilty.put(digest, input, num_crashes, now)
        return num_crashes, digest.hex()

    def acquit(self, input: Input) -> None:
        """A suspect has succeeded alone: what its workers died of was something else."""
        self._suspects.drop(input.mark())
        self._suspects.drop(input.digest())

    def note_success(self) -> None:
        """A batch has succeeded: workers do not die of everything."""
        self.recent.clear()

    @property
    def _is_in_doubt(self) -> bool:
        return len(self.recent) >= _NUM_DOUBTFUL

    def _let_go(self) -> None:
        """Take back what was held against inputs while nothing succeeded."""
        logger.warning(
            "%s: workers have died of %d different inputs in a row, and nothing has succeeded "
            "between: it is not the inputs, and none is quarantined until a batch succeeds",
            self.name,
            len(self.recent),
        )
        for digest in self.recent:
            self._guilty.drop(digest)
        self._suspects.clear()


class _Entry(NamedTuple):
    until: float
    num_bytes: int
    sample: bytes
    num_crashes: int


class _Register:
    """Digests of inputs, which leave after a time, or sooner if there are too many."""

    def __init__(self, duration_s: float, max_inputs: int) -> None:
        self.lengths: dict[int, Counter[bytes]] = {}
        self.entries: OrderedDict[bytes, _Entry] = OrderedDict()
        """The next to leave comes first, since all stay equally long."""
        self._duration_s = duration_s
        self._max_inputs = max_inputs

    def put(self, digest: bytes, input: Input, num_crashes: int, now: float) -> None:
        """Take an input in, or let it stay longer."""
        if not self._duration_s:
            return
        self.drop(digest)
        if len(self.entries) >= self._max_inputs:
            self.drop(next(iter(self.entries)))
        until = now + self._duration_s
        entry = _Entry(until, len(input.payload), input.sample, num_crashes)
        self.entries[digest] = entry
        self.lengths.setdefault(entry.num_bytes, Counter())[entry.sample] += 1

    def may_have(self, input: Input, now: float) -> bool:
        """Whether a digest is needed to tell an input from all that are here."""
        self.release(now)
        samples = self.lengths.get(len(input.payload))
        return samples is not None and input.sample in samples

    def release(self, now: float) -> None:
        """Let those go whose time is over."""
        while self.entries:
            digest, entry = next(iter(self.entries.items()))
            if entry.until > now:
                return
            self.drop(digest)

    def drop(self, digest: bytes) -> None:
        """Forget an input, if it is here."""
        entry = self.entries.pop(digest, None)
        if entry is None:
            return
        samples = self.lengths[entry.num_bytes]
        samples[entry.sample] -= 1
        if not samples[entry.sample]:
            del samples[entry.sample]
        if not samples:
            del self.lengths[entry.num_bytes]

    def clear(self) -> None:
        """Forget all."""
        self.entries.clear()
        self.lengths.clear()
