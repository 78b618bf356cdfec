"""The loop of a run: inputs from the readers to the target, and answers to the output."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from inferpool.service.batch.inputs import BatchAnswer, SourceUnusableError
from inferpool.service.batch.outputs import AnswerFile, Journal
from inferpool.service.batch.reading import DecodedInput, read_ahead
from inferpool.service.batch.report import BatchReport
from inferpool.service.batch.sources import BatchSource
from inferpool.service.batch.target import BatchTarget, refused

_WINDOW = 4
"""Rooms of the target that may wait to be written, if one answer is late and the order is kept."""


class TooManyErrorsError(Exception):
    """More inputs failed than may."""


class BatchRun:
    """One run over a source. Event loop only."""

    def __init__(
        self,
        source: BatchSource,
        output: AnswerFile,
        report: BatchReport,
        *,
        keeps_order: bool = True,
        max_errors: int | None = None,
    ) -> None:
        self._source = source
        self._output = output
        self._report = report
        self._keeps_order = keeps_order
        self._max_errors = max_errors
        self._waiting: dict[int, BatchAnswer] = {}
        """Answers that are not written yet, by index."""
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def missing(self) -> Sequence[int]:
        """Return the indices of the inputs without an answer in the output.

        Raises:
            SourceUnusableError: The output has answers for other inputs.
        """
        known = bytearray(len(self._source))
        for answer in self._output.earlier() if isinstance(self._output, Journal) else ():
            is_there = 0 <= answer.index < len(known)
            if not is_there or known[answer.index]:
                raise SourceUnusableError(
                    f"--resume: the output has an answer too many, for input {answer.index} "
                    f"({answer.name}): it is of other inputs"
                )
            known[answer.index] = 1
            self._report.add(answer, is_earlier=True)
        return [index for index, is_known in enumerate(known) if not is_known]

    async def run(
        self, target: BatchTarget, indices: Sequence[int], *, num_readers: int, chunk: int
    ) -> None:
        """Compute inputs, and write their answers.

        Raises:
            RunLostError: The target can compute no more. What has an answer is written.
            TooManyErrorsError: More than `max_errors` failed.
            OSError: The output cannot be written.
        """
        if not indices:
            return
        self._left = iter(indices)
        self._next = next(self._left)
        self._written = asyncio.Semaphore(_WINDOW * target.room)
        self._room = asyncio.Semaphore(target.room)
        chunks = read_ahead(
            self._source,
            indices,
            num_readers=num_readers,
            chunk=chunk,
            decodes=target.decodes,
            pins=target.pins,
        )
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix="batch-read") as thread:
            try:
                while given := await loop.run_in_executor(thread, _following, chunks):
                    for each in given:
                        await self._written.acquire()
                        await self._room.acquire()
                        if self._failure is not None:
                            raise self._failure
                        task = asyncio.create_task(self._compute(target, each))
                        self._tasks.add(task)
                        task.add_done_callback(self._tasks.discard)
                while self._tasks and self._failure is None:
                    await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
                if self._failure is not None:
                    raise self._failure
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
                await loop.run_in_executor(thread, chunks.close)  # type: ignore[attr-defined]  # a generator

    async def _compute(self, target: BatchTarget, given: DecodedInput) -> None:
        try:
            if given.input.error:
                answer = refused(given, "unreadable", given.input.error)
            else:
                answer = await target.predict(given)
            self._take(answer)
        except Exception as error:  # handed to `run`, which raises it
            self._failure = self._failure or error
            self._written.release()
        finally:
            self._room.release()

    def _take(self, answer: BatchAnswer) -> None:
        """Write an answer, with those that waited for it."""
        if self._failure is not None:
            return
        ready = [answer]
        if self._keeps_order:
            self._waiting[answer.index] = answer
            ready = []
            while (found := self._waiting.pop(self._next, None)) is not None:
                ready.append(found)
                self._next = next(self._left, -1)
        if not ready:
            return
        self._output.write(ready)
        for each in ready:
            self._written.release()
            self._report.add(each)
        if self._max_errors is not None and self._report.num_failed > self._max_errors:
            raise TooManyErrorsError(
                f"{self._report.num_failed} inputs failed, more than --max-errors "
                f"{self._max_errors}"
            )


def _following(chunks: Iterator[Sequence[DecodedInput]]) -> Sequence[DecodedInput]:
    return next(chunks, ())


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._began
