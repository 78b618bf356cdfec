"""Decides whether a version may serve: compares it with the one that serves, as the policy says."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from inferpool.service.catalog.catalog import Catalog, ModelVersion
from inferpool.service.errors import VersionRefusedError
from inferpool.service.parts.swap.comparison import Comparison, output_fault, why_not
from inferpool.service.parts.swap.inputs import InputRecorder, SwapInput, inputs_of
from inferpool.service.parts.swap.requests import SwapOptions
from inferpool.service.parts.swap.validation import LabelledInput, sample_of, validate
from inferpool.service.parts.swap.watching import FaultShare, VersionWatch

if TYPE_CHECKING:
    from inferpool.service.api.routes.health import SwapFigures

_LOOK_EVERY_S = 0.05
_RESTART_WITHIN_S = 60.0
"""How long to wait for a worker of the version that serves; one that fails pauses for less."""
_MOST_SHADOWED = 64
"""Inputs of a shadow that may wait to be computed; those that come meanwhile are not copied."""


class SwapDecision:
    """The decision about one version, before it serves. Lives in the event loop."""

    def __init__(
        self,
        catalog: Catalog,
        old: ModelVersion,
        new: ModelVersion,
        options: SwapOptions,
        say: Callable[[str], None],
        cases: Sequence[LabelledInput] = (),
    ) -> None:
        """Decide about a version by comparison with the one that serves.

        Args:
            catalog: Gives a canary its share of the calls.
            old: The version that serves.
            new: The version that is judged.
            options: The policy and the bounds.
            say: Told what is being done.
            cases: The inputs of `options.validation`.
        """
        self.figures: SwapFigures | None = None
        """The figures that have been found up to now."""
        self.faults_before = FaultShare.of(old)
        """The counts of the version that serves, when the change began."""
        self._catalog = catalog
        self._old = old
        self._new = new
        self._options = options
        self._say = say
        self._cases = cases
        self._comparison = Comparison(old.pool, new.pool, are_alike=not cases)
        self._is_compared = options.policy != "force"
        self._live: Sequence[SwapInput] | None = None
        """Live inputs that the version of now has answered before it left; None if it is there."""

    async def record(self) -> None:
        """Have the version that serves answer all inputs now, since it leaves before it is judged.

        Raises:
            InvalidInputError: An input of the validation cannot be read any more.
        """
        old = self._old.pool
        self._is_compared = self._is_compared and await self._is_old_ready()
        if not self._is_compared:
            return
        self._live = await self._recorded()
        samples = [*await inputs_of(old), *self._live]
        for number, sample in enumerate(samples, 1):
            self._say(f"the version of now answers {number} of {len(samples)} inputs")
            await self._comparison.record(sample)
        for number, case in enumerate(self._cases, 1):
            self._say(f"the version of now answers {number} of {len(self._cases)} labelled inputs")
            sample = await asyncio.to_thread(sample_of, case, old)
            await self._comparison.record(sample, with_tensors=False)
        self._comparison.is_old_gone = True

    async def decide(self) -> None:
        """Find out whether the version may serve.

        Raises:
            VersionRefusedError: It is not good enough; has the figures that show why.
        """
        try:
            await self._decide()
        except VersionRefusedError as error:
            self.figures = self.figures or self._comparison.figures()
            error.figures = asdict(self.figures)
            raise

    async def _decide(self) -> None:
        options = self._options
        self._say("looks at its outputs")
        if fault := await output_fault(self._new.pool):
            self._comparison.note_fault(fault)
            raise VersionRefusedError(f"its outputs cannot be used: {fault}")
        if self._is_compared and self._live is None:
            self._is_compared = await self._is_old_ready()
        if not self._is_compared:
            return  # it is not asked for, or nothing serves that it could be compared with
        await self._compare()
        if options.policy == "shadow":
            await self._shadow()
        elif options.policy == "canary":
            await self._canary()

    async def _is_old_ready(self) -> bool:
        """Wait for the version that serves, if its workers restart just now."""
        pool, until = self._old.pool, time.monotonic() + _RESTART_WITHIN_S
        while not pool.is_ready and not pool.is_lost and time.monotonic() < until:
            self._say("waits for a worker of the version that serves")
            await asyncio.sleep(_LOOK_EVERY_S)
        return pool.is_ready

    async def _compare(self) -> None:
        live = await self._recorded() if self._live is None else self._live
        inputs = [*await inputs_of(self._old.pool), *live]

        def show(num: int) -> None:
            self._say(f"compared on {num} of {len(inputs)} inputs")

        share = self._options.max_fault_share
        await self._comparison.add(inputs, show, max_fault_share=share)
        self.figures = self._comparison.figures()
        if self._cases:

            def show_validated(num: int) -> None:
                self._say(f"validated on {num} of {len(self._cases)} inputs")

            self.figures = await validate(
                self._comparison, self._new.pool, self._cases, self.figures, show_validated
            )
        elif not self.figures.num_inputs:
            raise VersionRefusedError(
                "there is no input to compare it on: no traffic came within wait_s, and the model "
                "has no example; send some, or give `validation`, or use the policy `force`"
            )
        self._refuse_if(why_not(self.figures, self._options))

    async def _recorded(self) -> Sequence[SwapInput]:
        recorder = InputRecorder(self._old.pool, self._options.num_inputs)
        until = time.monotonic() + self._options.wait_s
        try:
            while not recorder.is_full and time.monotonic() < until:
                self._say(f"waits for live inputs, {len(recorder.inputs)} have come")
                await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            recorder.stop()
        return recorder.take_all()

    async def _shadow(self) -> None:
        """Have both versions compute copies of a share of the traffic, and compare the answers."""
        options, comparison = self._options, self._comparison
        recorder = InputRecorder(self._old.pool, _MOST_SHADOWED, options.traffic_share)
        until, num = time.monotonic() + options.duration_s, 0
        try:
            while (left_s := until - time.monotonic()) > 0:
                self._say(f"shadow: compared on {num} live inputs, {left_s:.0f} s left")
                for sample in recorder.take_all():
                    if time.monotonic() >= until:
                        break
                    await comparison.add([sample])
                    num += 1
                figures = self._with_accuracy(comparison.figures())
                if num >= options.num_inputs and why_not(figures, options):
                    break
                await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            recorder.stop()
        self.figures = self._with_accuracy(comparison.figures())
        self._refuse_if(why_not(self.figures, options))
        if not num:
            raise VersionRefusedError(f"as a shadow, it has computed no live input: {self._none}")

    async def _canary(self) -> None:
        """Have the version answer a share of the calls, until it is worse or the time is over."""
        options = self._options
        until, reason = time.monotonic() + options.duration_s, ""
        self._catalog.begin_canary(self._new, options.traffic_share)
        watch = VersionWatch(
            self._old, self._new, options, FaultShare.of(self._old), is_canary=True
        )
        watch.begin()
        try:
            while (left_s := until - time.monotonic()) > 0:
                await asyncio.sleep(min(_LOOK_EVERY_S, left_s))
                reason = await watch.look()
                self._say(f"canary: {watch.num_answered} inputs answered, {left_s:.0f} s left")
                if reason:
                    break
        finally:
            watch.stop()
            self._catalog.end_canary(self._new)
        assert self.figures is not None, "it has been compared"
        self.figures = watch.with_figures(self.figures)
        self._refuse_if(reason and f"as a canary, {reason}")
        if not self.figures.num_answered:
            raise VersionRefusedError(f"as a canary, it has answered no call: {self._none}")

    @property
    def _none(self) -> str:
        """Why a shadow or a canary has got nothing, and what to do."""
        options = self._options
        return (
            f"none was for it within duration_s ({options.duration_s:g} s), with a traffic_share "
            f"of {options.traffic_share:g}; send some, raise these, or use the policy `verified`"
        )

    def _with_accuracy(self, figures: "SwapFigures") -> "SwapFigures":
        assert self.figures is not None, "it has been compared"
        return replace(
            figures,
            num_validated=self.figures.num_validated,
            accuracy=self.figures.accuracy,
            accuracy_before=self.figures.accuracy_before,
        )

    def _refuse_if(self, reason: str) -> None:
        if reason:
            raise VersionRefusedError(reason)
