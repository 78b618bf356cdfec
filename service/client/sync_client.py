"""The client for code without an event loop."""

import os
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
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


class Client:
    """Asks a service for predictions. A context manager; any thread may use it.

    So may a process that was forked with it, which connects anew.

    >>> with Client("http://127.0.0.1:8000") as client:
    ...     print(client.predict(Path("photo.jpg")).top.label)
    tiger cat
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        transport: httpx.BaseTransport | None = None,
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
        self._transport = transport
        self._open()

    def predict(self, input: object, **options: Unpack[PredictOptions]) -> Prediction:
        """Ask for a prediction on one input.

        Args:
            input: One of these. A `pathlib.Path`: the file, whatever it is (an image, .npy,
                .safetensors, .json, .txt). Bytes, or a file open for reading them: the same. A
                PIL image. An array of numpy's or a tensor of torch's: with a batch dimension it
                is as many instances. A dict of those: named inputs. Anything else: one instance
                as JSON; a str is a text for the model.
            **options: See `PredictOptions`.

        Raises:
            InferpoolError: There is none; `service.client.errors` has the tree.
        """
        return self._run(self._calls.predict(input, options))

    @overload
    def predict_many(
        self,
        inputs: Iterable[object],
        *,
        return_errors: Literal[False] = False,
        **options: Unpack[ManyOptions],
    ) -> Iterator[Prediction]: ...

    @overload
    def predict_many(
        self,
        inputs: Iterable[object],
        *,
        return_errors: Literal[True],
        **options: Unpack[ManyOptions],
    ) -> Iterator[Outcome]: ...

    def predict_many(
        self,
        inputs: Iterable[object],
        *,
        return_errors: bool = False,
        **options: Unpack[ManyOptions],
    ) -> Iterator[Outcome]:
        """Ask for predictions on many inputs, several at a time.

        Inputs are drawn as there is room for them, so that there may be any number, and no more
        than a few results wait to be taken. Leaving the loop gives up what has not been sent.

        Args:
            inputs: As `predict` takes them; drawn in the caller's thread.
            return_errors: Hand out errors in their places, instead of raising the first.
            **options: See `ManyOptions`.

        Raises:
            InferpoolError: Of the first input without a prediction, unless errors are handed out.
        """
        window = Window(options, self._calls.max_concurrency)
        source = iter(inputs)
        is_more = True
        running: dict[Future[Outcome], int] = {}
        stop = threading.Event()
        with ThreadPoolExecutor(window.limit, thread_name_prefix="inferpool-client") as pool:
            try:
                while True:
                    while is_more and window.has_room:
                        for value in source:
                            index = window.start()
                            task = pool.submit(self._try, value, options, index, stop)
                            running[task] = index
                            break
                        else:
                            is_more = False
                    if outcome := window.take():
                        if isinstance(outcome, InferpoolError) and not return_errors:
                            raise outcome
                        yield outcome
                        continue
                    if not running:
                        return
                    for task in wait(running, return_when=FIRST_COMPLETED).done:
                        window.finish(running.pop(task), task.result())
            finally:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)

    def health(self) -> Health:
        """What the service says of itself and its models.

        Raises:
            InferpoolError: It does not say.
        """
        return self._run(self._calls.health())

    def models(self) -> list[ModelInfo]:
        """The models that it serves.

        Raises:
            InferpoolError: It does not say.
        """
        return list(self.health().models)

    def is_ready(self) -> bool:
        """Whether predictions can be asked for now.

        Raises:
            InferpoolError: What answers is not inferpool.
        """
        return self._run(self._calls.is_ready())

    def wait_until_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until predictions can be asked for.

        Raises:
            InferpoolError: They could not in time; it says why.
        """
        self._run(self._calls.wait_until_ready(timeout_s))

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def __enter__(self) -> Self:
        """Return this client."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def __repr__(self) -> str:
        """Name the service, and no key."""
        return f"Client({self._calls.url!r})"

    def _try(
        self, value: object, options: ManyOptions, index: int, stop: threading.Event
    ) -> Outcome:
        try:
            return self._run(self._calls.one_of_many(value, options, index), stop)
        except InferpoolError as error:
            error.index = index
            return error

    def _run(self, steps: Steps[_T], stop: threading.Event | None = None) -> _T:
        came: Came = None
        while True:
            try:
                step = steps.send(came)
            except StopIteration as done:
                result: _T = done.value
                return result
            came = None
            if isinstance(step, Send):
                came = self._send(step)
            elif stop is None:
                time.sleep(step.duration_s)
            elif stop.wait(step.duration_s):
                steps.throw(InferpoolError("given up: the loop was left"))

    def _open(self) -> None:
        self._http = httpx.Client(
            transport=self._transport,
            limits=self._calls.limits,
            verify=self._calls.verify,
            proxy=self._calls.proxy or None,
            trust_env=self._calls.proxy != "",
        )
        self._process = os.getpid()

    def _send(self, step: Send) -> Came:
        if os.getpid() != self._process:
            self._open()  # a forked process has the connections too, and would read others' answers
        try:
            response = self._http.send(step.request, stream=True)
            try:
                pieces = []
                for piece in response.iter_bytes():
                    step.check_time()
                    pieces.append(piece)
            finally:
                response.close()
        except httpx.RequestError as error:
            return error
        except RuntimeError as error:
            if not self._http.is_closed:
                raise
            raise UnsendableError("this client is closed: make another one") from error
        return Reply(
            status=response.status_code, headers=response.headers, content=b"".join(pieces)
        )
