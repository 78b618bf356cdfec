"""Decides which instances are computed alone, or not at all, after workers died of their input.

The quarantine knows inputs; this applies it to the dispatcher's instances. Used by the event loop's
thread alone.
"""

import logging
import time
from collections.abc import Sequence
from math import ceil

from inferpool.service.errors import QuarantinedError
from inferpool.service.queue.instance import Buffer, Instance
from inferpool.service.queue.quarantine import MAX_CRASHES, Input, Quarantine
from inferpool.service.telemetry.metrics import ModelMetrics
from inferpool.workers.arena import Arena
from inferpool.workers.messages import ItemError, ItemRef, Outcome

logger = logging.getLogger(__name__)


class Suspects:
    """Decides which instances of one model may be sent to a worker, and beside which others."""

    def __init__(self, quarantine: Quarantine, arena: Arena, metrics: ModelMetrics) -> None:
        """Begin with what the quarantine holds.

        Args:
            quarantine: Inputs that have killed workers.
            arena: Where the payloads of instances lie.
            metrics: Counts the instances that are refused.
        """
        self._quarantine = quarantine
        self._arena = arena
        self._metrics = metrics

    @property
    def num_quarantined(self) -> int:
        """Inputs that are refused."""
        return self._quarantine.num_inputs(time.monotonic())

    def check(self, ref: ItemRef, chunks: Sequence[Buffer], now: float) -> bool:
        """Tell whether an input must be computed alone, since a worker has died with it.

        Raises:
            QuarantinedError: It must not be computed at all.
        """
        quarantine = self._quarantine
        whole = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        input = Input(ref.kind, ref.headers, ref.parameters, whole)
        left_s = quarantine.left_s(input, now)
        if left_s > 0:
            self._metrics.rejected["quarantined"] += 1
            raise _quarantined(left_s)
        return quarantine.is_suspect(input, now)

    def blame(self, batch: Sequence[Instance], now: float) -> bool:
        """Hold a worker's death against the batch that it had begun.

        Returns:
            Whether an input went into quarantine, so that `refusal` has news.
        """
        is_any_guilty = False
        for instance in batch:
            input = self._input_of(instance)
            if not instance.is_solo:
                self._quarantine.note_death(input, now)
                instance.num_crashes = 1
                instance.is_solo = True
                continue
            instance.num_crashes, digest = self._quarantine.note_death_alone(
                input, instance.num_crashes, now
            )
            if instance.num_crashes >= MAX_CRASHES:
                is_any_guilty = True
                logger.error(
                    "%s: an input has killed %d workers: not trying it again (digest %s)",
                    self._quarantine.name,
                    instance.num_crashes,
                    digest,
                    extra=instance.ref.log_ids(),
                )
        return is_any_guilty

    def note_answers(self, batch: Sequence[Instance], outcomes: Sequence[Outcome]) -> None:
        """A batch has come back: hold nothing more against an input that succeeded alone."""
        quarantine = self._quarantine
        if batch[0].is_solo and not isinstance(outcomes[0], ItemError):
            quarantine.acquit(self._input_of(batch[0]))
        if quarantine.recent and not all(isinstance(each, ItemError) for each in outcomes):
            quarantine.note_success()

    def refusal(self, instance: Instance) -> QuarantinedError | None:
        """The error of an admitted instance whose input has killed workers meanwhile, if it has."""
        if instance.ref.num_bytes not in self._quarantine.lengths:
            return None
        if self._quarantine.left_s(self._input_of(instance), time.monotonic()) <= 0:
            return None
        return _quarantined(self._quarantine.duration_s)

    def _input_of(self, instance: Instance) -> Input:
        """What an instance asks for, as it lies in its slot; not to be kept."""
        ref = instance.ref
        arena = memoryview(self._arena.memory.map)
        payload = arena[ref.offset : ref.offset + ref.num_bytes]
        return Input(ref.kind, ref.headers, ref.parameters, payload)


def _quarantined(left_s: float) -> QuarantinedError:
    return QuarantinedError(
        "workers have died while they computed this very input; "
        f"it is not tried again within the next {ceil(left_s)} s"
    )
