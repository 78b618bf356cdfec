"""Has one worker check a version of a model, while the others load. Runs in the front end."""

import asyncio
from asyncio import Future
from collections.abc import Awaitable, Callable
from dataclasses import replace

from inferpool.workers.host.engine import WorkerHandle, WorkerId
from inferpool.workers.shared.config import CheckReport, WorkerConfig
from inferpool.workers.shared.errors import WorkerStartError

Start = Callable[[WorkerId, WorkerConfig, Callable[[str], None]], Awaitable[WorkerHandle]]

_ELSEWHERE = CheckReport()
"""Tells a worker not to check its model, since another one does."""
_PATIENCE_S = 10.0


class SharedCheck:
    """Starts workers of one version: one checks it, and the others wait for its findings.

    If that worker does not come up, or takes much longer to load than another one, the other one is
    started again to check.
    """

    def __init__(self, start: Start, *, patience_s: float = _PATIENCE_S) -> None:
        """Start nothing yet.

        Args:
            start: Starts a worker, like `Engine.start`.
            patience_s: Seconds that a worker waits for the findings of another one, beyond twice
                the time of its own load.
        """
        self._start = start
        self._patience_s = patience_s
        self._verdict: Future[WorkerStartError | None] | None = None
        """Set while a worker checks; its result is the error if the version is refused."""
        self.report: CheckReport | None = None
        """The latest findings; None before the first."""
        self._is_due = True
        """The next worker checks the version."""

    def _is_done(self) -> bool:
        """True if there are findings that hold for the workers that start now."""
        return not self._is_due

    def forget(self) -> None:
        """Have the next worker check anew, since it may load other files.

        The findings stay until there are others: if it is refused, the former workers serve on.
        """
        self._is_due = True

    async def start(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> WorkerHandle:
        """Start a worker, and return once it is ready and the version is checked.

        Raises:
            WorkerStartError: It did not become ready, or another worker has refused the version.
        """
        if self._is_done() or config.check == "off":
            return await self._start(id, replace(config, checked=self.report), on_progress)
        if self._verdict is None:
            return await self._check(id, config, on_progress)
        began = asyncio.get_running_loop().time()
        worker = await self._start(id, replace(config, checked=_ELSEWHERE), on_progress)
        try:
            patience_s = 2 * (asyncio.get_running_loop().time() - began) + self._patience_s
            while not self._is_done() and (verdict := self._verdict) is not None:
                on_progress("waiting until another worker has checked the model")
                await asyncio.wait([verdict], timeout=patience_s)
                if not verdict.done():
                    break
                if (refusal := verdict.result()) is not None:
                    raise WorkerStartError(str(refusal), permanent=True)
        except BaseException:
            await worker.stop(0)
            raise
        if self._is_done():
            return worker
        await worker.stop(0)
        return await self._check(id, config, on_progress)

    async def _check(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> WorkerHandle:
        verdict = self._verdict = asyncio.get_running_loop().create_future()
        refusal: WorkerStartError | None = None
        try:
            worker = await self._start(id, replace(config, checked=None), on_progress)
            self.report = worker.ready.checked
            self._is_due = False
        except WorkerStartError as error:
            refusal = error if error.permanent else None
            raise
        finally:
            if self._verdict is verdict:
                self._verdict = None
            verdict.set_result(refusal)
        return worker
