"""The client for code in an event loop."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from types import TracebackType
from typing import Literal, Self, TypeVar, Unpack, overload

import httpx

from inferpool.service.client.calls import Calls, Came, Send, Steps
from inferpool.service.client.errors import InferpoolError, UnsendableError
from inferpool.service.client.health import Health, ModelInfo
from inferpool.service.client.options import ClientOptions, ManyOptions, PredictOptions
from inferpool.service.client.results import Prediction, Reply
from inferpool.service.client.window import Outcome, Window
from inferpool.service.settings.urls import DEFAULT_URL

_T = TypeVar("_T")


class AsyncClient:
    """Asks a service for predictions, as `Client` does. An async context manager.

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
        """Connect to nothing yet.

        Args:
            url: Of the service.
            transport: What carries requests instead of a socket; see httpx.
            **options: See `ClientOptions`.

        Raises:
            ValueError: The URL or the key cannot be.
        """
        self._calls = Calls(url, options)
        self._http = httpx.AsyncClient(
            transport=transport,
            limits=self._calls.limits,
            verify=self._calls.verify,
            proxy=self._calls.proxy or None,
            trust_env=self._calls.proxy != "",
        )
        # As many as there are connections: what waits for one in httpx, it looks at whenever any
        # request begins or ends, so that a thousand predictions at once cost five times as much.
        self._free = asyncio.Semaphore(self._calls.max_concurrency)

    async def predict(self, input: object, **options: Unpack[PredictOptions]) -> Prediction:
        """Ask for a prediction on one input; cancelled, it gives the request up.

        Args:
            input: See `Client.predict`.
            **options: See `PredictOptions`.

        Raises:
            InferpoolError: There is none; `service.client.errors` has the tree.
        """
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

        Results are handed out also while the next input is awaited. Leaving the loop for good
        cancels what runs, once the iterator is closed (`contextlib.aclosing` does that at once).

        Args:
            inputs: As `predict` takes them. Those that block belong into an async iterable.
            return_errors: Hand out errors in their places, instead of raising the first.
            **options: See `ManyOptions`.

        Raises:
            InferpoolError: Of the first input without a prediction, unless errors are handed out.
        """
        window = Window(options, self._calls.max_concurrency)
        source = aiter(inputs if isinstance(inputs, AsyncIterable) else _each(inputs))
        drawing: asyncio.Task[tuple[object, ...]] | None = None
        is_more = True
        running: dict[asyncio.Task[Outcome], int] = {}
        try:
            while True:
                if is_more and drawing is None and window.has_room:
                    drawing = asyncio.create_task(_draw(source))
                if outcome := window.take():
                    if isinstance(outcome, InferpoolError) and not return_errors:
                        raise outcome
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

    async def health(self) -> Health:
        """What the service says of itself and its models.

        Raises:
            InferpoolError: It does not say.
        """
        return await self._run(self._calls.health())

    async def models(self) -> list[ModelInfo]:
        """The models that it serves.

        Raises:
            InferpoolError: It does not say.
        """
        return list((await self.health()).models)

    async def is_ready(self) -> bool:
        """Whether predictions can be asked for now.

        Raises:
            InferpoolError: What answers is not inferpool.
        """
        return await self._run(self._calls.is_ready())

    async def wait_until_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until predictions can be asked for.

        Raises:
            InferpoolError: They could not in time; it says why.
        """
        await self._run(self._calls.wait_until_ready(timeout_s))

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        """Return this client."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        await self.aclose()

    def __repr__(self) -> str:
        """Name the service, and no key."""
        return f"AsyncClient({self._calls.url!r})"

    async def _try(self, value: object, options: ManyOptions, index: int) -> Outcome:
        try:
            return await self._run(self._calls.one_of_many(value, options, index))
        except InferpoolError as error:
            error.index = index
            return error

    async def _run(self, steps: Steps[_T]) -> _T:
        came: Came = None
        while True:
            try:
                step = steps.send(came)
            except StopIteration as done:
                result: _T = done.value
                return result
            came = None
            if isinstance(step, Send):
                came = await self._send(step)
            else:
                await asyncio.sleep(step.duration_s)

    async def _send(self, step: Send) -> Came:
        try:
            async with asyncio.timeout(step.left_s if self._free.locked() else None):
                await self._free.acquire()
        except TimeoutError:
            return httpx.PoolTimeout("", request=step.request)
        try:
            response = await self._http.send(step.request, stream=True)
            try:
                pieces = []
                async for piece in response.aiter_bytes():
                    step.check_time()
                    pieces.append(piece)
            finally:
                await response.aclose()
        except httpx.RequestError as error:
            return error
        except RuntimeError as error:
            if not self._http.is_closed:
                raise
            raise UnsendableError("this client is closed: make another one") from error
        finally:
            self._free.release()
        return Reply(
            status=response.status_code, headers=response.headers, content=b"".join(pieces)
        )


async def _each(inputs: Iterable[object]) -> AsyncIterator[object]:
    for value in inputs:
        yield value


async def _draw(source: AsyncIterator[object]) -> tuple[object, ...]:
    """The next input, or nothing after the last."""
    async for value in source:
        return (value,)
    return ()
