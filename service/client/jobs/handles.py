"""Jobs to wait on, iterate over and cancel: one class for each client."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Literal, Protocol, TypeVar, overload

from ..calls import Steps
from ..errors import InferpoolError
from ..many import Outcome
from ..results import Prediction
from .calls import JobSteps
from .documents import JobInfo, read_line

_T = TypeVar("_T")


class RunSteps(Protocol):
    """Performs the steps of a call."""

    def __call__(self, steps: Steps[_T], /) -> _T:
        """Return the result."""


class RunStepsAsync(Protocol):
    """Performs the steps of a call in an event loop."""

    def __call__(self, steps: Steps[_T], /) -> Awaitable[_T]:
        """Return the result."""


class _Handle:
    """The state of a job as its handles show it."""

    def __init__(self, steps: JobSteps) -> None:
        self._steps = steps

    @property
    def id(self) -> str:
        """ID by which `Client.job` finds it again."""
        return self._steps.info.id

    @property
    def info(self) -> JobInfo:
        """The job when the service was last asked; see `refresh`."""
        return self._steps.info

    @property
    def state(self) -> str:
        """State when the service was last asked: `queued`, `running`, `succeeded`, ..."""
        return self._steps.info.state

    def __repr__(self) -> str:
        """Return the ID and the state."""
        return f"{type(self).__name__}({self.id!r}, {self.state!r})"

    def _read(self, line: bytes, *, return_errors: bool) -> Outcome:
        outcome = read_line(line, self.info)
        if isinstance(outcome, InferpoolError) and not return_errors:
            raise outcome
        return outcome


class Job(_Handle):
    """A job in the service. It goes on there whether or not anybody waits for it.

    >>> job = client.submit(Path(name) for name in names)
    >>> for prediction in job:  # as they become known
    ...     print(prediction.index, prediction.value)
    """

    def __init__(self, steps: JobSteps, run: RunSteps) -> None:
        super().__init__(steps)
        self._run = run

    def refresh(self) -> JobInfo:
        """Ask the service how the job is now.

        Raises:
            InferpoolError: The service does not say; `UnknownJobError`: it has no such job.
        """
        return self._run(self._steps.refresh())

    def wait(
        self,
        timeout_s: float | None = None,
        on_progress: Callable[[JobInfo], None] | None = None,
    ) -> JobInfo:
        """Wait until the job is over, however it ends.

        A service that is restarted meanwhile is waited for: until the timeout, or for ten minutes
        if there is none. Each wait takes one of the client's connections.

        Args:
            timeout_s: Longest wait; None for no limit.
            on_progress: Called with the job about once a second, and at its end.

        Raises:
            DeadlineExceededError: The job is not over; it goes on.
            InferpoolError: The service has no such job, or does not answer.
        """
        return self._run(self._steps.wait(timeout_s, on_progress))

    def __iter__(self) -> Iterator[Prediction]:
        """Yield each prediction; see `predictions`."""
        return self.predictions()

    @overload
    def predictions(
        self,
        *,
        first: int = 0,
        timeout_s: float | None = None,
        return_errors: Literal[False] = False,
    ) -> Iterator[Prediction]: ...

    @overload
    def predictions(
        self, *, first: int = 0, timeout_s: float | None = None, return_errors: Literal[True]
    ) -> Iterator[Outcome]: ...

    def predictions(
        self, *, first: int = 0, timeout_s: float | None = None, return_errors: bool = False
    ) -> Iterator[Outcome]:
        """Yield each prediction in the order of the inputs as soon as the service has it.

        Leaving the loop leaves the job going on. A service that is restarted is waited for, as
        `wait` does.

        Args:
            first: Index of the first instance to yield.
            timeout_s: Longest time until the last one is there; None for no limit.
            return_errors: Yield errors in their places, instead of raising the first one.

        Raises:
            InferpoolError: Error of the first instance without a prediction, unless
                `return_errors`; its `index` says which. Or the service does not answer.
        """
        for line in self.lines(first=first, timeout_s=timeout_s):
            yield self._read(line, return_errors=return_errors)

    def lines(self, *, first: int = 0, timeout_s: float | None = None) -> Iterator[bytes]:
        """Yield each prediction or error as a line of JSON, as the service writes it.

        See `predictions`; the lines have no line break.
        """
        deadline = self._steps.deadline(timeout_s)
        while lines := self._run(self._steps.next_lines(first, deadline)):
            yield from lines
            first += len(lines)

    @overload
    def result(
        self, timeout_s: float | None = None, *, return_errors: Literal[False] = False
    ) -> list[Prediction]: ...

    @overload
    def result(
        self, timeout_s: float | None = None, *, return_errors: Literal[True]
    ) -> list[Outcome]: ...

    def result(
        self, timeout_s: float | None = None, *, return_errors: bool = False
    ) -> list[Prediction] | list[Outcome]:
        """Wait for all predictions, and return them; see `predictions`."""
        if return_errors:
            return list(self.predictions(timeout_s=timeout_s, return_errors=True))
        return list(self.predictions(timeout_s=timeout_s))

    def cancel(self) -> JobInfo:
        """End the job early, unless it is over already; what was computed is kept.

        Raises:
            InferpoolError: The service has no such job, or does not answer.
        """
        return self._run(self._steps.cancel())

    def delete(self) -> None:
        """Cancel the job if it is not over, and delete it with its result.

        Raises:
            InferpoolError: The service has no such job, or does not answer.
        """
        self._run(self._steps.delete())


class AsyncJob(_Handle):
    """A job in the service like `Job`, with async methods."""

    def __init__(self, steps: JobSteps, run: RunStepsAsync) -> None:
        super().__init__(steps)
        self._run = run

    async def refresh(self) -> JobInfo:
        """Ask the service how the job is now; see `Job.refresh`."""
        return await self._run(self._steps.refresh())

    async def wait(
        self,
        timeout_s: float | None = None,
        on_progress: Callable[[JobInfo], None] | None = None,
    ) -> JobInfo:
        """Wait until the job is over; see `Job.wait`. Cancelling this leaves the job going on."""
        return await self._run(self._steps.wait(timeout_s, on_progress))

    def __aiter__(self) -> AsyncIterator[Prediction]:
        """Yield each prediction; see `predictions`."""
        return self.predictions()

    @overload
    def predictions(
        self,
        *,
        first: int = 0,
        timeout_s: float | None = None,
        return_errors: Literal[False] = False,
    ) -> AsyncIterator[Prediction]: ...

    @overload
    def predictions(
        self, *, first: int = 0, timeout_s: float | None = None, return_errors: Literal[True]
    ) -> AsyncIterator[Outcome]: ...

    async def predictions(
        self, *, first: int = 0, timeout_s: float | None = None, return_errors: bool = False
    ) -> AsyncIterator[Outcome]:
        """Yield each prediction as soon as the service has it; see `Job.predictions`."""
        async for line in self.lines(first=first, timeout_s=timeout_s):
            yield self._read(line, return_errors=return_errors)

    async def lines(
        self, *, first: int = 0, timeout_s: float | None = None
    ) -> AsyncIterator[bytes]:
        """Yield each prediction or error as a line of JSON; see `Job.lines`."""
        deadline = self._steps.deadline(timeout_s)
        while lines := await self._run(self._steps.next_lines(first, deadline)):
            for line in lines:
                yield line
            first += len(lines)

    @overload
    async def result(
        self, timeout_s: float | None = None, *, return_errors: Literal[False] = False
    ) -> list[Prediction]: ...

    @overload
    async def result(
        self, timeout_s: float | None = None, *, return_errors: Literal[True]
    ) -> list[Outcome]: ...

    async def result(
        self, timeout_s: float | None = None, *, return_errors: bool = False
    ) -> list[Prediction] | list[Outcome]:
        """Wait for all predictions, and return them; see `predictions`."""
        if return_errors:
            found = self.predictions(timeout_s=timeout_s, return_errors=True)
            return [each async for each in found]
        return [each async for each in self.predictions(timeout_s=timeout_s)]

    async def cancel(self) -> JobInfo:
        """End the job early, unless it is over already; see `Job.cancel`."""
        return await self._run(self._steps.cancel())

    async def delete(self) -> None:
        """Cancel the job if it is not over, and delete it; see `Job.delete`."""
        await self._run(self._steps.delete())
