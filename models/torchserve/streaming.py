"""Serves archives whose handlers send parts before they return. Worker processes only.

A handler sends parts from within its call, while a model yields them: so the call runs in a thread
of its own, one call after the other, and its parts come over a queue of few places. If nobody reads
them any more, the next part that it sends ends the call. But a handler with threads of its own runs
to its end, as in TorchServe: what they still make would reach the next call, and another client.
"""

import contextvars
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from inferpool.models.errors import BadReturnError, PassesThrough
from inferpool.models.item import Features
from inferpool.models.spec import Placement
from inferpool.models.torchserve.answers import HandlerAnswer
from inferpool.models.torchserve.archive import Archived
from inferpool.models.torchserve.context import STREAM_NEXT
from inferpool.models.torchserve.loading import names_any
from inferpool.models.torchserve.requests import HandlerRequest
from inferpool.models.torchserve.running import REQUESTS, ArchiveModel, shown

_MAX_STEPS = 16
"""Steps that a handler may be ahead of those who read them."""
_LOOK_S = 0.5
"""Seconds between looks whether anybody still reads."""
_THREADS = (b"hread", b"concurrent.futures", b"multiprocessing")
"""Words in the code of handlers that have threads or processes of their own."""
_Step = Mapping[int, HandlerAnswer]


class NobodyReadsError(PassesThrough):
    """Ends a handler's call: nobody reads what it sends. No `Exception`: handlers catch those."""


class StreamingArchive(ArchiveModel):
    """An archive that answers in parts."""

    def __init__(self, facts: Archived, folder: Path, *, envelope: str | None = None) -> None:
        """Store what an `ArchiveModel` stores."""
        super().__init__(facts, folder, envelope=envelope)
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._runs_to_end = names_any(folder, _THREADS)

    def load(self, placement: Placement) -> None:
        """Load the handler, and start the thread that calls it."""
        super().load(placement)
        state = contextvars.copy_context()
        threading.Thread(
            target=state.run, args=(self._serve_calls,), name="handler", daemon=True
        ).start()

    def stream(self, batch: Features) -> Iterator[_Step]:
        """Have the handler called with a batch; yield what it sends, and then what it returns."""
        requests: Any = batch[REQUESTS]
        call = _Call(requests)
        self._calls.put(call)
        try:
            while (step := call.next()) is not None:
                yield step
        finally:
            call.leave()

    def render(self, outputs: Any, parameters: Mapping[str, object]) -> object:
        """Turn a part into what its call asked for."""
        found = shown(outputs, parameters)
        if isinstance(found, Exception):
            raise found
        return found

    def _serve_calls(self) -> None:
        while True:
            call = self._calls.get()
            try:
                if not call.is_left:
                    self._call(call)
            except NobodyReadsError:
                pass
            except BaseException as error:  # the thread that reads raises it
                call.fail(error)
            call.end()

    def _call(self, call: "_Call") -> None:
        context = self._context

        def send(returned: Any, ids: Mapping[int, str]) -> None:
            if returned is None:
                raise BadReturnError("a handler sends None as intermediate answers")
            ours = context.request_ids or {}
            places = {id: place for place, id in ours.items()}
            step = {}
            for key, id in ids.items():
                # TorchServe sends to the request of that id. One of an earlier call has ended.
                place = key if ours.get(key) == id else places.get(id)
                if place is None:
                    raise BadReturnError(f"a handler sends to the request {id!r}, which has ended")
                context.set_response_header(place, STREAM_NEXT, "true")
                step[place] = context.answer(place, returned[key], more=True)
            with suppress(*([NobodyReadsError] if self._runs_to_end else [])):
                call.put(step)

        context.send_parts = send
        try:
            call.put(dict(enumerate(self.answers(call.requests, more=False))))
        finally:
            context.send_parts = None


class _Call:
    """One call of a handler, between its thread and the one that reads what it sends."""

    def __init__(self, requests: Sequence[HandlerRequest]) -> None:
        self.requests = requests
        self.is_left = False
        """Nobody reads its steps any more."""
        self._steps: queue.Queue[_Step | None] = queue.Queue(_MAX_STEPS)
        self._error: BaseException | None = None

    def put(self, step: _Step | None) -> None:
        """Add a step, as soon as there is room.

        Raises:
            NobodyReadsError: Nobody reads it.
        """
        while not self.is_left:
            try:
                self._steps.put(step, timeout=_LOOK_S)
                return
            except queue.Full:
                continue
        raise NobodyReadsError

    def fail(self, error: BaseException) -> None:
        """Have the reader raise an error after all steps."""
        self._error = error

    def end(self) -> None:
        """Have the reader's steps end."""
        with suppress(NobodyReadsError):
            self.put(None)

    def next(self) -> _Step | None:
        """Wait for the next step; return None after the last one.

        The handler's thread ends each call, whatever happens in it.

        Raises:
            Exception: The handler has raised it.
        """
        step = self._steps.get()
        if step is None and self._error is not None:
            raise self._error
        return step

    def leave(self) -> None:
        """Read no more."""
        self.is_left = True
