"""Decides whether a version may serve: compares it with the one that serves, as the policy says."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from inferpool.service.catalog.catalog import ModelVersion
from inferpool.service.catalog.comparison import Comparison, why_not
from inferpool.service.catalog.inputs import InputRecorder, SwapInput, inputs_of
from inferpool.service.catalog.requests import SwapOptions
from inferpool.service.errors import VersionRefusedError

if TYPE_CHECKING:
    from inferpool.service.api.routes.models import SwapFigures

_LOOK_EVERY_S = 0.05


class Judge:
    """Judges one version, before it serves. Lives in the event loop."""

    def __init__(
        self,
        old: ModelVersion,
        new: ModelVersion,
        options: SwapOptions,
        say: Callable[[str], None],
    ) -> None:
        """Judge a version against the one that serves; `say` is told what is being done."""
        self.figures: SwapFigures | None = None
        """The figures that have been found up to now."""
        self._old = old
        self._new = new
        self._options = options
        self._say = say

    async def judge(self) -> None:
        """Find out whether the version may serve.

        Raises:
            VersionRefusedError: It is not good enough; `figures` show why.
        """
        old, new, options = self._old, self._new, self._options
        if not old.pool.is_ready:
            return  # nothing serves that it could be compared with
        comparison = Comparison(old.pool, new.pool)
        inputs = [*inputs_of(old.pool)]
        if options.policy != "force":
            inputs += await self._recorded()

        def show(num: int) -> None:
            self._say(f"compared on {num} of {len(inputs)} inputs")

        await comparison.add(inputs, show)
        self.figures = figures = comparison.figures()
        if options.policy == "force":
            if figures.num_inputs and figures.num_faults == figures.num_inputs:
                raise VersionRefusedError(f"it fails on every input: {figures.first_fault}")
            return
        if reason := why_not(figures, options):
            raise VersionRefusedError(reason)

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
