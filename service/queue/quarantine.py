"""Quarantines an input that has killed workers, so that it kills no more.

A worker's death proves something only if the worker held one input alone. When a whole batch dies,
each of its inputs becomes a *suspect*: from then on it is computed alone, so that it takes no other
with it, until it succeeds once. An input that two workers died of while they held nothing else goes
into quarantine, unless it succeeded in between. It does not matter which client asked for it, or
whether that one still waited. Sharing a batch with a bad input, however often, is never enough.

If several different inputs in a row each kill a worker while alone, and no batch succeeds in
between, then the workers are at fault, not the inputs. All are released, and none is quarantined
until a batch succeeds.

Only digests are kept, never payloads, and only a bounded number. Used by the event loop's thread
alone.
"""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from math import ceil
from typing import NamedTuple

import msgspec

from inferpool.models.spec import Kind, TensorHeader
from inferpool.service.errors import QuarantinedError
from inferpool.service.queue.instance import Buffer, Instance
from inferpool.service.telemetry.metrics import ModelMetrics
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.messages import ItemError, ItemRef, Outcome

logger = logging.getLogger(__name__)

MAX_CRASHES = 3
"""Deaths that quarantine an input: one with a batch (or several), and two with it alone."""
MAX_INPUTS = 1024
"""Quarantined inputs. The oldest makes room for one more."""
_MAX_SUSPECTS = 4096
_NUM_DOUBTFUL = 3
"""Different inputs in a row that kill workers: from here on the workers are at fault."""
_DIGEST_BYTES = 16
_SAMPLE_BYTES = 32
"""Bytes from the start, the middle and the end: they tell most payloads of a length apart."""
_NUM_BLOCKS = 16
_BLOCK_BYTES = 1024
"""The parts of a payload that `mark` hashes, which takes 1.2 ms for 64 payloads of any size."""
CALL_HEADERS = b'"envelope":true,"headers":'
"""Stands before a call's HTTP headers, where a protocol ends the parameters with these.

They are no part of the input: another client sends it with others, as does the same one later."""


class InputContent(NamedTuple):
    """Everything that makes an input what it is."""

    kind: Kind
    headers: Sequence[TensorHeader]
    """The headers of its tensors."""
    parameters: bytes
    """The parameters that the caller gave the model with it, without headers of the call."""
    payload: Buffer

    @classmethod
    def of(cls, ref: ItemRef, payload: Buffer) -> "InputContent":
        """Return the content of an instance."""
        parameters, _, _ = ref.parameters.partition(CALL_HEADERS)
        return cls(ref.kind, ref.headers, parameters, payload)

    @property
    def sample(self) -> bytes:
        """A few bytes that differ for most payloads of one length."""
        payload = self.payload
        middle = len(payload) // 2
        parts = payload[middle : middle + _SAMPLE_BYTES], payload[-_SAMPLE_BYTES:]
        return b"".join((payload[:_SAMPLE_BYTES], *parts))

    def digest(self) -> bytes:
        """Return the digest of every byte, by which an input is quarantined."""
        return self._digest(b"", [self.payload])

    def mark(self) -> bytes:
        """Return a cheap digest for suspicion, which covers only parts of a long payload."""
        payload = self.payload
        num_bytes = len(payload)
        if num_bytes <= _NUM_BLOCKS * _BLOCK_BYTES:
            return self._digest(b"mark", [payload])
        last = num_bytes - _BLOCK_BYTES
        starts = [last * number // (_NUM_BLOCKS - 1) for number in range(_NUM_BLOCKS)]
        return self._digest(b"mark", [payload[start : start + _BLOCK_BYTES] for start in starts])

    def _digest(self, purpose: bytes, pieces: Sequence[Buffer]) -> bytes:
        # The rest is one msgpack value, which says where it ends and the payload begins.
        rest = (self.kind, self.headers, self.parameters, len(self.payload))
        digest = blake2b(msgspec.msgpack.encode(rest), digest_size=_DIGEST_BYTES, person=purpose)
        for piece in pieces:
            digest.update(piece)
        return digest.digest()


class Quarantine:
    """The inputs of one model that are not tried for a while, and those under suspicion.

    While it is empty, a lookup costs two empty dictionaries. Otherwise inputs of another length
    cost the same, and most others are told apart by their samples, without a digest.
    """

    def __init__(self, *, name: str, duration_s: float, max_inputs: int = MAX_INPUTS) -> None:
        """Start empty.

        Args:
            name: The model's name, for the log.
            duration_s: How long an input stays quarantined or under suspicion; 0 keeps nothing.
            max_inputs: How many may be quarantined at once.
        """
        self.name = name
        self.duration_s = duration_s
        self._quarantined = _Register(duration_s, max_inputs)
        self._suspects = _Register(duration_s, _MAX_SUSPECTS)
        self.lengths = self._quarantined.lengths
        """Samples of the quarantined payloads, by the payload's length in bytes."""
        self.suspect_lengths = self._suspects.lengths
        """The same for the inputs under suspicion."""
        self.recent: set[bytes] = set()
        """Digests of the inputs that killed a worker while alone since a batch last succeeded."""

    def num_inputs(self, now: float) -> int:
        """Return the number of quarantined inputs."""
        self._quarantined.release(now)
        return len(self._quarantined.entries)

    def left_s(self, input: InputContent, now: float) -> float:
        """Return for how many seconds an input stays quarantined; 0 if it is not."""
        if not self._quarantined.may_have(input, now):
            return 0.0
        entry = self._quarantined.entries.get(input.digest())
        return 0.0 if entry is None else entry.until - now

    def is_suspect(self, input: InputContent, now: float) -> bool:
        """Return whether a worker died with an input that has not succeeded alone since."""
        return self._suspects.may_have(input, now) and input.mark() in self._suspects.entries

    def record_death(self, input: InputContent, now: float) -> None:
        """Suspect an input after a worker died with it and others."""
        if not self._is_in_doubt:
            self._suspects.put(input.mark(), input, 1, now)

    def record_death_alone(
        self, input: InputContent, num_crashes: int, now: float
    ) -> tuple[int, str]:
        """Judge an input after a worker died with it and nothing else.

        Args:
            input: The input.
            num_crashes: Workers that died with this instance of it before. Those that died with a
                whole batch count as one.
            now: CLOCK_MONOTONIC seconds.

        Returns:
            The number of workers that died with this input, in any instance of it, and its digest
            for the log. From `MAX_CRASHES` on it must not be tried again.
        """
        digest = input.digest()
        if self.duration_s > 0 and len(self.recent) < _NUM_DOUBTFUL:
            self.recent.add(digest)
            if self._is_in_doubt:
                self._release_all()
        if self._is_in_doubt:
            return num_crashes + 1, digest.hex()
        self._suspects.release(now)
        entry = self._suspects.entries.get(digest)
        num_crashes = 1 + max(num_crashes, entry.num_crashes if entry else 0)
        self._suspects.put(input.mark(), input, 1, now)
        self._suspects.put(digest, input, num_crashes, now)
        if num_crashes >= MAX_CRASHES:
            self._quarantined.put(digest, input, num_crashes, now)
        return num_crashes, digest.hex()

    def clear(self, input: InputContent) -> None:
        """Drop the suspicion against an input that has succeeded alone."""
        self._suspects.drop(input.mark())
        self._suspects.drop(input.digest())

    def add(self, input: InputContent, now: float) -> None:
        """Quarantine an input that has killed the decoders of a worker."""
        self.record_death_alone(input, MAX_CRASHES - 1, now)

    def record_success(self) -> None:
        """Record that a batch has succeeded, so workers do not die of every input."""
        self.recent.clear()

    @property
    def _is_in_doubt(self) -> bool:
        return len(self.recent) >= _NUM_DOUBTFUL

    def _release_all(self) -> None:
        """Release the inputs that were quarantined while nothing succeeded."""
        logger.warning(
            "%s: workers have died of %d different inputs in a row, and no batch has succeeded in "
            "between, so the inputs are not the cause; none is quarantined until a batch succeeds",
            self.name,
            len(self.recent),
        )
        for digest in self.recent:
            self._quarantined.drop(digest)
        self._suspects.clear()


class Suspects:
    """Applies the quarantine to instances: which are refused, and which are computed alone."""

    def __init__(self, quarantine: Quarantine, arena: Arena, metrics: ModelMetrics) -> None:
        self._quarantine = quarantine
        self._arena = arena
        self._metrics = metrics

    def check(
        self, ref: ItemRef, chunks: Sequence[Buffer], now: float, *, is_traffic: bool
    ) -> bool:
        """Return whether an input must be computed alone, since a worker has died with it.

        Raises:
            QuarantinedError: It must not be computed at all, which is counted if it is traffic.
        """
        quarantine = self._quarantine
        whole = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        input = InputContent.of(ref, whole)
        left_s = quarantine.left_s(input, now)
        if left_s > 0:
            self._metrics.rejected["quarantined"] += is_traffic
            raise _quarantined(left_s)
        return quarantine.is_suspect(input, now)

    def blame(self, batch: Sequence[Instance], now: float) -> bool:
        """Suspect the inputs of the batch that a worker had begun when it died.

        Returns:
            Whether an input went into quarantine, so that others in the queue may be refused now.
        """
        has_quarantined = False
        for instance in batch:
            input = self._input_of(instance)
            if not instance.is_solo:
                self._quarantine.record_death(input, now)
                instance.num_crashes = 1
                instance.is_solo = True
                continue
            instance.num_crashes, digest = self._quarantine.record_death_alone(
                input, instance.num_crashes, now
            )
            if instance.num_crashes >= MAX_CRASHES:
                has_quarantined = True
                logger.error(
                    "%s: an input has killed %d workers: not trying it again (digest %s)",
                    self._quarantine.name,
                    instance.num_crashes,
                    digest,
                    extra=instance.ref.log_ids(),
                )
        return has_quarantined

    def record_answers(self, batch: Sequence[Instance], outcomes: Sequence[Outcome]) -> None:
        """Clear the suspicion against an input that has come back alone with an answer.

        An input that decoders have died of goes into quarantine.
        """
        quarantine = self._quarantine
        if ItemError in map(type, outcomes):
            for instance, outcome in zip(batch, outcomes, strict=True):
                if isinstance(outcome, ItemError) and outcome.code == "worker_crashed":
                    quarantine.add(self._input_of(instance), time.monotonic())
        if batch[0].is_solo and not isinstance(outcomes[0], ItemError):
            quarantine.clear(self._input_of(batch[0]))
        if quarantine.recent and not all(isinstance(each, ItemError) for each in outcomes):
            quarantine.record_success()

    def refusal(self, instance: Instance) -> QuarantinedError | None:
        """Return the error of an admitted instance if its input was quarantined meanwhile."""
        if instance.ref.num_bytes not in self._quarantine.lengths:
            return None
        if self._quarantine.left_s(self._input_of(instance), time.monotonic()) <= 0:
            return None
        return _quarantined(self._quarantine.duration_s)

    def _input_of(self, instance: Instance) -> InputContent:
        """Return the input of an instance, as a view of its arena slot that must not be kept."""
        ref = instance.ref
        arena = memoryview(self._arena.memory.map)
        return InputContent.of(ref, arena[ref.offset : ref.offset + ref.num_bytes])


class _QuarantineEntry(NamedTuple):
    until: float
    num_bytes: int
    sample: bytes
    num_crashes: int


class _Register:
    """Digests of inputs that expire after a time, or sooner if there are too many."""

    def __init__(self, duration_s: float, max_inputs: int) -> None:
        self.lengths: dict[int, Counter[bytes]] = {}
        self.entries: OrderedDict[bytes, _QuarantineEntry] = OrderedDict()
        """The next to expire comes first, since all stay equally long."""
        self._duration_s = duration_s
        self._max_inputs = max_inputs

    def put(self, digest: bytes, input: InputContent, num_crashes: int, now: float) -> None:
        """Add an input, or extend its stay."""
        if not self._duration_s:
            return
        self.drop(digest)
        if len(self.entries) >= self._max_inputs:
            self.drop(next(iter(self.entries)))
        until = now + self._duration_s
        entry = _QuarantineEntry(until, len(input.payload), input.sample, num_crashes)
        self.entries[digest] = entry
        self.lengths.setdefault(entry.num_bytes, Counter())[entry.sample] += 1

    def may_have(self, input: InputContent, now: float) -> bool:
        """Return whether only a digest can tell an input from all that are here."""
        self.release(now)
        samples = self.lengths.get(len(input.payload))
        return samples is not None and input.sample in samples

    def release(self, now: float) -> None:
        """Drop the inputs that have expired."""
        while self.entries:
            digest, entry = next(iter(self.entries.items()))
            if entry.until > now:
                return
            self.drop(digest)

    def drop(self, digest: bytes) -> None:
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
        self.entries.clear()
        self.lengths.clear()


def _quarantined(left_s: float) -> QuarantinedError:
    return QuarantinedError(
        "workers have died while they computed this very input; "
        f"it is not tried again within the next {ceil(left_s)} s"
    )
