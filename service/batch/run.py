"""The loop of a run: inputs from the readers to the target, and answers to the output."""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from inferpool.service.batch.inputs import BatchAnswer, SourceUnusableError
from inferpool.service.batch.outputs import AnswerFile, Journal, in_utf8
from inferpool.service.batch.reading import DecodedInput, end_readers, read_ahead
from inferpool.service.batch.report import BatchReport
from inferpool.service.batch.sources import BatchSource

_WINDOW = 4
"""Multiple of the target's room that may wait for a late answer if the order is kept."""

_END_S = 1.0
"""Time for a reader to finish, if the run ends before its inputs do."""


class TooManyErrorsError(Exception):
    """More inputs failed than allowed."""


class BatchTarget(Protocol):
    """Computes inputs: a pool in this process, or a service elsewhere. Event loop only."""

    room: int
    """Number of inputs under way that keeps all replicas busy."""
    max_pixels: int | None
    """Readers are to decode pictures up to this number of pixels; None: to decode none."""

    async def predict(self, given: DecodedInput) -> BatchAnswer:
        """Compute an input. The answer has errors that concern the input alone.

        Raises:
            RunLostError: Nothing more can be computed.
        """


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
        """Unwritten answers, by index."""
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def check_errors(self) -> None:
        """Check that no more inputs have failed than allowed, in earlier runs too.

        Raises:
            TooManyErrorsError: More have.
        """
        if self._max_errors is not None and self._report.num_failed > self._max_errors:
            raise TooManyErrorsError(
                f"{self._report.num_failed} inputs failed, more than --max-errors "
                f"{self._max_errors}"
            )

    def missing(self) -> Sequence[int]:
        """Return the indices of the inputs without an answer in the output.

        Raises:
            SourceUnusableError: The output has answers for other inputs.
        """
        known = bytearray(len(self._source))
        if not isinstance(self._output, Journal):
            return range(len(known))
        for answer in self._output.earlier():
            if not 0 <= answer.index < len(known) or known[answer.index]:
                raise _others(f"an answer too many, for input {answer.index} ({answer.name})")
            name = in_utf8(self._source.name(answer.index))
            if name and name != in_utf8(answer.name):
                raise _others(f"{answer.name} as input {answer.index}, which is {name} now")
            known[answer.index] = 1
            self._report.add(answer, is_earlier=True)
        missing = [index for index, is_known in enumerate(known) if not is_known]
        if missing and self._output.is_over:
            raise _others(f"{len(known) - len(missing)} answers, and the run that wrote it is over")
        return missing

    async def run(
        self, target: BatchTarget, indices: Sequence[int], *, num_readers: int, chunk: int
    ) -> None:
        """Compute inputs, and write their answers.

        Raises:
            RunLostError: The target can compute no more. All answers are written.
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
            room=target.room,
            max_pixels=target.max_pixels,
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
                closing = loop.run_in_executor(thread, chunks.close)
                await asyncio.wait([closing], timeout=_END_S)
                if not closing.done():
                    end_readers()
                await closing

    async def _compute(self, target: BatchTarget, given: DecodedInput) -> None:
        try:
            if given.input.error:
                answer = given.refused(given.input.code, given.input.error)
            else:
                answer = await target.predict(given)
            self._take(answer)
        except Exception as error:  # `run` raises it
            self._failure = self._failure or error
            self._written.release()
        finally:
            self._room.release()

    def _take(self, answer: BatchAnswer) -> None:
        """Write an answer, and those that waited for it."""
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
        self.check_errors()


def _others(found: str) -> SourceUnusableError:
    return SourceUnusableError(
        f"--resume: the output is of other inputs: it has {found}; name another --output, or "
        "--overwrite it"
    )


def _following(chunks: Iterator[Sequence[DecodedInput]]) -> Sequence[DecodedInput]:
    return next(chunks, ())
