"""Notices clients that hang up while their call waits. Runs in the event loop."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
"""ASGI's."""

CHECK_EVERY_S = 0.05


class Waiting:
    """A call whose body is complete and whose answer is not."""

    __slots__ = ("future", "is_gone", "listener", "receive")

    def __init__(self, future: "asyncio.Future[Any]", receive: Receive) -> None:
        self.future = future
        """Cancelled when the client hangs up."""
        self.receive = receive
        self.is_gone = False
        self.listener: asyncio.Task[None] | None = None


class HangupWatch:
    """Cancels the futures of calls whose clients are gone.

    To listen for `http.disconnect` takes a task of its own, which is most of what an answer of the
    echo model costs. So one timer for all calls wakes every 50 ms, and only while there are any:
    those that it finds waiting for the second time get a listener. A call that is answered within
    50 ms pays for an insertion into a set and a removal, and for no timer.
    """

    def __init__(self) -> None:
        self._young: set[Waiting] = set()
        self._seen: set[Waiting] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, waiting: Waiting) -> None:
        """Begin to watch a call."""
        self._young.add(waiting)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CHECK_EVERY_S, self._check)

    def discard(self, waiting: Waiting) -> None:
        """Stop watching a call: it has its answer."""
        self._young.discard(waiting)
        self._seen.discard(waiting)
        if waiting.listener is not None:
            waiting.listener.cancel()

    def _check(self) -> None:
        for waiting in self._seen:
            waiting.listener = asyncio.create_task(_listen(waiting), name="hangup")
        self._seen, self._young = self._young, set()
        self._timer = None
        if self._seen:
            self._timer = asyncio.get_running_loop().call_later(CHECK_EVERY_S, self._check)


async def _listen(waiting: Waiting) -> None:
    """Wait for the client to hang up. The call itself ends this, at the latest with its answer."""
    while (await waiting.receive())["type"] != "http.disconnect":
        pass
    waiting.is_gone = True
    waiting.future.cancel()
