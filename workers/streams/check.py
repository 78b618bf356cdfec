"""Checks a model that answers in parts, before its worker is ready. Worker processes only.

Its own instance is answered twice, and beside another one: the parts must be the same, each within
the tolerance of the model. Long streams are checked by their first parts.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from inferpool.models.accelerator.failures import is_lost_device, is_out_of_memory, raised
from inferpool.models.base import Model
from inferpool.models.errors import InputError, ModelError
from inferpool.models.item import Features, Item
from inferpool.models.streams import END
from inferpool.models.texts import text_of
from inferpool.workers.inside.compute import Computer
from inferpool.workers.inside.outcomes import NotFiniteAnswerError
from inferpool.workers.inside.shortage import release
from inferpool.workers.inside.staging import take
from inferpool.workers.shared.config import CheckReport, WorkerConfig
from inferpool.workers.start_check.check import LONG_S, ReadyCheck, hint
from inferpool.workers.start_check.likeness import are_close
from inferpool.workers.start_check.own_passes import Pass
from inferpool.workers.streams.parts import PartMaker, is_tensors
from inferpool.workers.streams.under_way import (
    OpenStream,
    PartsOfOneError,
    StreamCall,
    opened,
)

logger = logging.getLogger(__name__)

_MOST_PARTS = 64
"""Parts of a stream that are compared."""
_MOST_STEPS = 1000
"""Steps that are computed for them."""
_STEPS_TO_WARM = 3


@dataclass(slots=True)
class _Answer:
    """The first parts of one stream."""

    parts: list[Features | None] = field(default_factory=list)
    """Tensors after `postprocess`; None for other parts."""
    shown: list[object] = field(default_factory=list)
    """The same as they come out of JSON."""
    is_over: bool = False


class StreamCheck(ReadyCheck):
    """Check of one model that streams. Use it in the thread that computes."""

    def __init__(
        self,
        model: Model,
        config: WorkerConfig,
        example: Item | None,
        samples: Sequence[Item],
        **options: Any,
    ) -> None:
        """Choose the instance as `ReadyCheck` does.

        Raises:
            ModelError: The settings ask for what a model that streams cannot do.
        """
        name = type(model).__name__
        if config.placement.split:
            raise ModelError(f"{name} answers in parts, so it cannot be split over devices")
        if config.speed not in ("auto", "exact"):
            raise ModelError(f'{name} answers in parts: speed = "{config.speed}" cannot be used')
        if config.decode == "fast":
            raise ModelError(f'{name} answers in parts: decode = "fast" cannot be used')
        if model.joins and not callable(getattr(model, "admit", None)):
            raise ModelError(f"{name} has `joins = True`, and must define admit(batch, positions)")
        super().__init__(model, config, example, samples, **options)

    def warm_up(self, computer: Computer, sizes: Sequence[int]) -> float:
        """Compute the first steps of samples in some sizes; return the seconds of the longest step.

        Raises:
            ModelError: The model is refused, since it fails on its first sample.
        """
        model, longest_s = self._model, 0.0
        for size in sizes:
            items = [self._samples[row % len(self._samples)] for row in range(size)]
            began = time.monotonic()
            try:
                with torch.inference_mode(), closing(self._called(computer, items)) as call:
                    for _ in range(_STEPS_TO_WARM):
                        call.step()
                        longest_s = max(longest_s, time.monotonic() - began)
                        began = time.monotonic()
            except StopIteration:
                longest_s = max(longest_s, time.monotonic() - began)
            except PartsOfOneError:
                model._streams_alone = True
            except raised() as error:
                if is_out_of_memory(error) and size > self._config.max_batch_size:
                    release(error)
                    break
                is_ours = self._item is self._samples[0] and size == sizes[0]
                if is_ours and not self._is_made_up and not self.is_off:
                    self._refuse_raised(error, "")
                raise
            if model._streams_alone:
                break
        return longest_s

    def run(self, computer: Computer) -> CheckReport:
        """Check the model, unless that is off, and choose the sample of the canaries.

        Raises:
            ModelError: The model is refused; says why, and what to do.
        """
        if self.is_off and self._item is not None and not self._model.joins:
            self._learn(computer, self._item)
        return super().run(computer)

    def _learn(self, computer: Computer, item: Item) -> None:
        """Learn whether the parts are those of one instance: calls come accordingly."""
        try:
            with torch.inference_mode(), closing(self._called(computer, [item])) as call:
                for _ in range(_MOST_STEPS):
                    if call.step():
                        return
        except raised() as error:
            if is_lost_device(error):
                raise
            logger.debug("the sample has no part", exc_info=True)

    def _run(self, computer: Computer, item: Item) -> bool | None:
        """Check the instance; return whether its parts were finite, if they were computed."""
        model, when = self._model, ""
        began = time.monotonic()
        try:
            alone = self._answered(computer, item)
            took_s = time.monotonic() - began
            if not alone.parts:
                self._warn(f"{self._name} yields no part for {self._instance}")
            if not model.repeatable:
                return True
            when = " when it is asked again"
            again = self._answered(computer, item)
            if difference := self._other_parts(computer, alone, again):
                self._refuse(
                    f"{self._name} answers otherwise when it is asked the same again "
                    f"({difference}){hint(model, 'repeatable')}"
                )
                return True
            if model._streams_alone or not model.alone_as_in_batch:
                return True
            if self._config.max_batch_size == 1:
                return True
            if took_s > LONG_S:
                self._not_checked.append(f"beside another one, since it took {took_s:.1f} s")
                return True
            when = " beside another instance"
            beside = self._answered_beside(computer, item)
        except NotFiniteAnswerError as error:
            self._refuse(
                f"the {error} ({self._instance}{when}); if that is meant, say "
                "`finite_outputs = False`"
            )
            return False
        except InputError as error:
            if not self._step.startswith("render"):
                self._refuse_raised(error, when)
                return None
            self._not_checked.append(f"its answers, since render wants more: {text_of(error)}")
            return None
        except raised() as error:
            self._refuse_raised(error, when)
            return None
        if difference := self._other_parts(computer, alone, beside):
            self._refuse(
                f"{self._name} answers otherwise beside another instance than alone "
                f"({difference}){hint(model, 'alone_as_in_batch')}"
            )
        return True

    def _answered_beside(self, computer: Computer, item: Item) -> _Answer:
        """Answer the instance beside another one, or beside itself if no other one fits."""
        features = self._prepared(item)
        for other in self._others(item, features):
            try:
                return self._answered(computer, item, other())
            except raised() as error:  # it may be the other's fault
                if is_lost_device(error):
                    raise
                logger.debug("another instance does not fit beside it", exc_info=True)
        return self._answered(computer, item, features)

    def _answered(self, computer: Computer, item: Item, other: Features | None = None) -> _Answer:
        """Return the first parts of an instance: alone, or with another one."""
        joins = self._model.joins and other is not None
        rows = [self._prepared(item)]
        if other is not None:
            rows = [other] if joins else [*rows, other]
        streams = opened([item] * len(rows))
        maker, answer, position = PartMaker(computer), _Answer(), int(joins)
        began, num_left = time.monotonic(), _MOST_STEPS
        with closing(self._begun(computer, streams, rows)) as call:
            while not answer.is_over and num_left and len(answer.parts) < _MOST_PARTS:
                num_left -= 1
                if answer.parts and time.monotonic() > began + LONG_S:
                    break
                self._step = call.method
                try:
                    parts = call.step()
                except StopIteration:
                    answer.is_over = True
                    break
                if joins and call.has_stepped and position not in call.streams:
                    batch = self._collated(computer, [self._prepared(item)])
                    self._step = "admit"
                    call.admit(opened([item]), batch)
                    continue
                part = parts.get(position)
                if part is END:
                    answer.is_over = True
                elif position in parts:
                    self._add(answer, maker, part, item)
        return answer

    def _add(self, answer: _Answer, maker: PartMaker, part: object, item: Item) -> None:
        try:
            outputs: Features | None = None
            if is_tensors(part):  # `postprocess` may change them in place
                outputs = maker.outputs_of({name: each.clone() for name, each in part.items()})
            answer.parts.append(outputs)
            answer.shown.append(msgspec.json.decode(maker.encoded(part, item)))
        finally:
            self._step = maker.step

    def _other_parts(self, computer: Computer, one: _Answer, two: _Answer) -> str:
        """Return how two streams differ; empty if they do not."""
        num = min(len(one.parts), len(two.parts))
        if one.is_over and two.is_over and len(one.parts) != len(two.parts):
            return f"{len(two.parts)} parts instead of {len(one.parts)}"
        for number in range(num):
            first, other = one.parts[number], two.parts[number]
            if first is not None and other is not None:
                passes = [Pass(outputs=each, is_finite=True, took_s=0.0) for each in (first, other)]
                shown = one.shown[number], two.shown[number]
                if difference := self._difference(computer, passes[0], passes[1], *shown):
                    return f"part {number}: {difference}"
            elif not are_close(one.shown[number], two.shown[number]):
                return f"another part {number}"
        return ""

    def _called(self, computer: Computer, items: Sequence[Item]) -> StreamCall:
        return self._begun(computer, opened(items), [self._prepared(item) for item in items])

    def _begun(
        self, computer: Computer, streams: Sequence[OpenStream], rows: Sequence[Features]
    ) -> StreamCall:
        batch = self._collated(computer, rows)
        self._step = "stream"
        return StreamCall(self._model, streams, batch, is_alone=True)

    def _collated(self, computer: Computer, rows: Sequence[Features]) -> Features:
        """Collate features that are no batch of a client, in the way of batches."""
        staging = computer.staging
        self._step = "collate"
        if staging is None:
            return self._model.collate(rows)
        with staging.there.in_use():
            batch = staging.stage(self._model.collate(rows))
            handed_over = staging.there.mark()
        take(handed_over, batch)
        return batch
