"""The client for code without an event loop."""

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Literal, Self, TypeVar, Unpack, overload

import httpx

from .calls import Calls, Draw, Send, StepOutcome, Steps
from .connecting import open_client
from .errors import InferpoolError, UnsendableError
from .jobs.calls import JobPages, find, submit
from .jobs.handles import Job
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


class Client:
    """Client of a service, and a context manager. Any thread may use it.

    A forked process may use it too; it opens connections of its own.

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
        """Check the options; the first call connects.

        Args:
            url: URL of the service.
            transport: Replacement for the network; see httpx.
            **options: See `ClientOptions`.

        Raises:
            ValueError: The URL, the key, the proxy or another option is invalid.
        """
        self._calls = Calls(url, options)
        self._transport = transport
        self._open()

    def predict(self, input: object, **options: Unpack[PredictOptions]) -> Prediction:
        """Ask for a prediction on one input.

        >>> client.predict({"text": "a cat?", "image": Path("cat.jpg")})  # a form

        Args:
            input: One of these. A `pathlib.Path`: a file of any kind (an image, .npy,
                .safetensors, .json, .txt). Bytes, or a file open for reading bytes: the same. A
                PIL image. A numpy array or a torch tensor; a batch dimension makes it several
                instances. A dict of tensors: named inputs. A dict with files in it: a form, with
                all else as its fields. Anything else: one instance as JSON; a str is a text for
                the model.
            **options: See `PredictOptions`.

        Raises:
            InferpoolError: There is no prediction; `service.client.errors` has the tree.
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

        Takes an input only when there is room for it, so there may be any number of them. Only a
        few results wait to be taken. Leaving the loop cancels the inputs that were not sent.

        Args:
            inputs: Inputs as `predict` takes them; read in the caller's thread.
            return_errors: Yield errors in their places, instead of raising the first one.
            **options: See `ManyOptions`.

        Raises:
            InferpoolError: Error of the first input without a prediction, unless `return_errors`.
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
                    if outcome := window.take(return_errors=return_errors):
                        yield outcome
                        continue
                    if not running:
                        return
                    for task in wait(running, return_when=FIRST_COMPLETED).done:
                        window.finish(running.pop(task), task.result())
            finally:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)

    def stream(self, input: object, **options: Unpack[PredictOptions]) -> Iterator[Json]:
        """Ask for a prediction that comes in parts, and yield each as it comes.

        Leaving the loop closes the connection, and the service ends the stream.

        Args:
            input: One instance, as `predict` takes it.
            **options: See `PredictOptions`. The timeout bounds the wait for each part.

        Raises:
            InferpoolError: The stream did not begin, or ended with an error; the parts before
                it were yielded.
        """
        reply = self._run(self._calls.open_stream(input, options))
        response = reply.response
        assert response is not None, "a stream that was opened is open"
        with contextlib.closing(response):
            reader = self._calls.reader_of(reply)
            try:
                for piece in response.iter_bytes():
                    yield from reader.read(piece)
            except httpx.RequestError as error:
                raise reader.broken(str(error) or type(error).__name__) from error
            reader.check_end()

    def submit(self, inputs: object, **options: Unpack[SubmitOptions]) -> Job:
        """Hand inputs to the service as a job, which it computes when interactive calls leave room.

        The job is safe in the service's store when this returns: no crash loses it. A retry after
        a lost answer makes no second one.

        Args:
            inputs: Many inputs: a list or any other iterable of what `predict` takes, each one
                instance. They are drawn while they are sent, so there may be a million. A generator
                is kept in a temporary file for a retry. Or a `pathlib.Path` of a .jsonl file (an
                instance a line) or a .tar file (an instance a file). Or one input as `predict`
                takes it, such as an array with a batch dimension.
            **options: See `SubmitOptions`.

        Raises:
            InferpoolError: There is no job; `service.client.errors` has the tree.
        """
        return Job(self._run(submit(self._calls, inputs, options)), self._run)

    def job(self, id: str) -> Job:
        """Return a job by its ID.

        Raises:
            UnknownJobError: The service has no such job, or it belongs to another key.
            InferpoolError: The service does not answer.
        """
        return Job(self._run(find(self._calls, id)), self._run)

    def jobs(self, *, states: Iterable[str] = (), limit: int | None = None) -> Iterator[Job]:
        """Yield the jobs of this key, the newest first.

        Args:
            states: States such as `running`; none for all.
            limit: Most jobs; None for all.

        Raises:
            InferpoolError: The service does not answer.
        """
        pages = JobPages(self._calls, states, limit)
        while page := self._run(pages.next_page()):
            for each in page:
                yield Job(each, self._run)

    def health(self) -> Health:
        """Return the state of the service and its models.

        Raises:
            InferpoolError: The service does not answer.
        """
        return self._run(self._calls.health())

    def models(self) -> list[ModelInfo]:
        """Return the models that the service has.

        Raises:
            InferpoolError: The service does not answer.
        """
        return list(self.health().models)

    def is_ready(self) -> bool:
        """Return whether the service takes requests now.

        Raises:
            InferpoolError: Something other than inferpool answers.
        """
        return self._run(self._calls.is_ready())

    def wait_until_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the service takes requests.

        Raises:
            InferpoolError: It was not ready in time; the error says why.
        """
        self._run(self._calls.wait_until_ready(timeout_s))

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def __enter__(self) -> Self:
        """Return this client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close this client."""
        self.close()

    def __repr__(self) -> str:
        """Name the service, and no key."""
        return f"Client({self._calls.url!r})"

    def _try(
        self, value: object, options: ManyOptions, index: int, stop: threading.Event
    ) -> Outcome:
        try:
            return self._run(self._calls.predict_one_of_many(value, options, index), stop)
        except InferpoolError as error:
            error.index = index
            return error

    def _run(self, steps: Steps[_T], stop: threading.Event | None = None) -> _T:
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
                    outcome = self._send(step)
                elif isinstance(step, Draw):
                    step.body.draw()
                elif stop is None:
                    time.sleep(step.duration_s)
                elif stop.wait(step.duration_s):
                    steps.throw(InferpoolError("cancelled: the caller left the loop"))

    def _open(self) -> None:
        self._http = open_client(
            self._calls.way,
            transport=self._transport,
            limits=self._calls.limits,
            verify=self._calls.verify,
        )
        self._process = os.getpid()

    def _send(self, step: Send) -> StepOutcome:
        if os.getpid() != self._process:
            self._open()  # a forked process shares the connections, and would read others' answers
        try:
            response = self._http.send(step.request, stream=True)
            if step.is_stream and response.status_code == _OK:
                return Reply(status=_OK, headers=response.headers, content=b"", response=response)
            with contextlib.closing(response):
                pieces = []
                for piece in response.iter_bytes():
                    step.check_time()
                    pieces.append(piece)
        except httpx.RequestError as error:
            return error
        except RuntimeError as error:
            if not self._http.is_closed:
                raise
            raise UnsendableError("this client is closed: make another one") from error
        return Reply(
            status=response.status_code, headers=response.headers, content=b"".join(pieces)
        )
