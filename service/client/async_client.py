"""The client for code in an event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Literal, Self, TypeVar, Unpack, overload

import httpx

from .calls import Calls, Draw, Send, StepOutcome, Steps
from .connecting import open_async_client
from .errors import InferpoolError, UnsendableError
from .jobs.body import each_of
from .jobs.calls import JobPages, find, submit
from .jobs.handles import AsyncJob
from .many import Outcome, Window
from .options import (
    ClientOptions,
    ManyOptions,
    PredictOptions,
    SubmitOptions,
)
from .results import Health, Json, ModelInfo, Prediction, Reply
from .urls import DEFAULT_URL

_T = TypeVar("_T")

_OK = 200


class AsyncClient:
    """Client of a service like `Client`, with async methods. An async context manager.

    >>> async with AsyncClient("http://127.0.0.1:8000") as client:
    ...     print((await client.predict(Path("photo.jpg"))).top.label)
    tiger cat
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        """Check the options; the first call connects. See `Client`."""
        self._calls = Calls(url, options)
        self._http = open_async_client(
            self._calls.way,
            transport=transport,
            limits=self._calls.limits,
            verify=self._calls.verify,
        )
        # One per connection. httpx scans all waiting requests whenever one begins or ends, so
        # without this a thousand predictions at once cost five times as much.
        self._free = asyncio.Semaphore(self._calls.max_concurrency)

    async def predict(self, input: object, **options: Unpack[PredictOptions]) -> Prediction:
        """Ask for a prediction on one input. See `Client.predict`; cancelling ends the request."""
        return await self._run(self._calls.predict(input, options))

    @overload
    def predict_many(
        self,
        inputs: Iterable[object] | AsyncIterable[object],
        *,
        return_errors: Literal[False] = False,
        **options: Unpack[ManyOptions],
    ) -> AsyncIterator[Prediction]: ...

    @overload
    def predict_many(
        self,
        inputs: Iterable[object] | AsyncIterable[object],
        *,
        return_errors: Literal[True],
        **options: Unpack[ManyOptions],
    ) -> AsyncIterator[Outcome]: ...

    async def predict_many(
        self,
        inputs: Iterable[object] | AsyncIterable[object],
        *,
        return_errors: bool = False,
        **options: Unpack[ManyOptions],
    ) -> AsyncIterator[Outcome]:
        """Ask for predictions on many inputs, several at a time; see `Client.predict_many`.

        Yields results also while it awaits the next input. Closing the iterator cancels all that
        runs; `contextlib.aclosing` closes it as soon as you leave the loop.

        Args:
            inputs: Inputs as `predict` takes them. If reading them blocks, pass an async iterable.
            return_errors: Yield errors in their places, instead of raising the first one.
            **options: See `ManyOptions`.

        Raises:
            InferpoolError: Error of the first input without a prediction, unless `return_errors`.
        """
        window = Window(options, self._calls.max_concurrency)
        source = aiter(each_of(inputs))
        drawing: asyncio.Task[tuple[object, ...]] | None = None
        is_more = True
        running: dict[asyncio.Task[Outcome], int] = {}
        try:
            while True:
                if is_more and drawing is None and window.has_room:
                    drawing = asyncio.create_task(_next_input(source))
                if outcome := window.take(return_errors=return_errors):
                    yield outcome
                    continue
                if drawing is None and not running:
                    return
                awaited = {*running, drawing} if drawing is not None else {*running}
                done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                if drawing is not None and drawing in done:
                    drawn, drawing = drawing.result(), None
                    is_more = bool(drawn)
                    for value in drawn:
                        index = window.start()
                        running[asyncio.create_task(self._try(value, options, index))] = index
                for task in running.keys() & done:
                    window.finish(running.pop(task), task.result())
        finally:
            left = [*running, drawing] if drawing is not None else [*running]
            for each in left:
                each.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def stream(self, input: object, **options: Unpack[PredictOptions]) -> AsyncIterator[Json]:
        """Ask for a prediction that comes in parts, and yield each; see `Client.stream`.

        Closing the iterator ends the stream; `contextlib.aclosing` closes it as soon as you leave
        the loop.
        """
        reply = await self._run(self._calls.open_stream(input, options))
        response = reply.response
        assert response is not None, "a stream that was opened is open"
        try:
            reader = self._calls.reader_of(reply)
            try:
                async for piece in response.aiter_bytes():
                    for part in reader.read(piece):
                        yield part
            except httpx.RequestError as error:
                raise reader.broken(str(error) or type(error).__name__) from error
            reader.check_end()
        finally:
            self._free.release()
            await response.aclose()

    async def submit(self, inputs: object, **options: Unpack[SubmitOptions]) -> AsyncJob:
        """Hand inputs to the service as a job; see `Client.submit`.

        If reading the inputs blocks, pass an async iterable. Cancelling this makes no job, unless
        the service had all inputs already.
        """
        return AsyncJob(await self._run(submit(self._calls, inputs, options)), self._run)

    async def job(self, id: str) -> AsyncJob:
        """Return a job by its ID; see `Client.job`."""
        return AsyncJob(await self._run(find(self._calls, id)), self._run)

    async def jobs(
        self, *, states: Iterable[str] = (), limit: int | None = None
    ) -> AsyncIterator[AsyncJob]:
        """Yield the jobs of this key, the newest first; see `Client.jobs`."""
        pages = JobPages(self._calls, states, limit)
        while page := await self._run(pages.next_page()):
            for each in page:
                yield AsyncJob(each, self._run)

    async def health(self) -> Health:
        """Return the state of the service and its models; see `Client.health`."""
        return await self._run(self._calls.health())

    async def models(self) -> list[ModelInfo]:
        """Return the models that the service has; see `Client.models`."""
        return list((await self.health()).models)

    async def is_ready(self) -> bool:
        """Return whether the service takes requests now; see `Client.is_ready`."""
        return await self._run(self._calls.is_ready())

    async def wait_until_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the service takes requests; see `Client.wait_until_ready`."""
        await self._run(self._calls.wait_until_ready(timeout_s))

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        """Return this client."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close this client."""
        await self.aclose()

    def __repr__(self) -> str:
        """Name the service, and no key."""
        return f"AsyncClient({self._calls.url!r})"

    async def _try(self, value: object, options: ManyOptions, index: int) -> Outcome:
        try:
            return await self._run(self._calls.predict_one_of_many(value, options, index))
        except InferpoolError as error:
            error.index = index
            return error

    async def _run(self, steps: Steps[_T]) -> _T:
        outcome: StepOutcome = None
        with contextlib.closing(steps):
            while True:
                try:
                    step = steps.send(outcome)
                except StopIteration as done:
                    result: _T = done.value
                    return result
                outcome = None
                if isinstance(step, Send):
                    outcome = await self._send(step)
                elif isinstance(step, Draw):
                    await step.body.draw_async()
                else:
                    await asyncio.sleep(step.duration_s)

    async def _send(self, step: Send) -> StepOutcome:
        try:
            async with asyncio.timeout(step.left_s if self._free.locked() else None):
                await self._free.acquire()
        except TimeoutError:
            return httpx.PoolTimeout("", request=step.request)
        is_kept = False
        try:
            response = await self._http.send(step.request, stream=True)
            if step.is_stream and response.status_code == _OK:
                is_kept = True  # until the stream is over
                return Reply(status=_OK, headers=response.headers, content=b"", response=response)
            async with contextlib.aclosing(response):
                pieces = []
                async for piece in response.aiter_bytes():
                    step.check_time()
                    pieces.append(piece)
        except httpx.RequestError as error:
            return error
        except RuntimeError as error:
            if not self._http.is_closed:
                raise
            raise UnsendableError("this client is closed: make another one") from error
        finally:
            if not is_kept:
                self._free.release()
        return Reply(
            status=response.status_code, headers=response.headers, content=b"".join(pieces)
        )


async def _next_input(source: AsyncIterator[object]) -> tuple[object, ...]:
    """Return the next input alone in a tuple, or an empty tuple after the last."""
    async for value in source:
        return (value,)
    return ()
