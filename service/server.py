"""uvicorn, with our own order of shutting down.

uvicorn closes idle connections the moment that it is told to stop, and a client that has just sent
a request on one gets no answer. Here readiness goes red first; then every answer carries
`Connection: close` for a moment, which moves busy clients away; only then are connections closed.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import uvicorn

logger = logging.getLogger(__name__)

_LAME_DUCK_S = 0.5
"""How long connections that are in use may take to come round to an answer that closes them."""
_ECHO_S = 0.3
"""A signal so soon after the first is the same one: a stop of the whole group reaches us twice when
the command that started us passes it on."""
_CLOSE = (b"connection", b"close")


class Server(uvicorn.Server):
    """Serves until a signal, drains, and returns normally; a second signal hurries."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        shutdown_delay_s: float,
        on_listening: Callable[[], None],
        on_stopping: Callable[[str], None],
        drain: Callable[[], Awaitable[None]],
        cut_off: Callable[[], None],
        move_clients_away: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Prepare to serve.

        Args:
            config: uvicorn's.
            shutdown_delay_s: How long to go on serving with readiness red.
            on_listening: Told once it can be connected to.
            on_stopping: Told why, when the shutdown begins: readiness goes red.
            drain: Admits nothing more and returns when all that was accepted has its answer.
            cut_off: Answers at once what has no answer yet, when a second signal hurries.
            move_clients_away: Lets clients find another host, where others than this server have
                the connections.
        """
        super().__init__(config)
        self._shutdown_delay_s = shutdown_delay_s
        self._on_listening = on_listening
        self._on_stopping = on_stopping
        self._drain = drain
        self._cut_off = cut_off
        self._move_clients_away = move_clients_away or partial(see_clients_off, self)
        self._stopped_at = 0.0
        self._leaving: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Turn SIGTERM and SIGINT into a shutdown; the process then exits with its own code."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for signum in signals:
            loop.add_signal_handler(signum, self.stop, signal.Signals(signum).name)
        try:
            yield
        finally:
            for signum in signals:
                loop.remove_signal_handler(signum)

    @property
    def is_stopping(self) -> bool:
        """A shutdown has begun."""
        return self._leaving is not None

    def stop(self, reason: str) -> None:
        """Begin to shut down, or hurry a shutdown that has begun."""
        now = time.monotonic()
        if self._leaving is None:
            self._stopped_at = now
            self._on_stopping(reason)
            self._leaving = asyncio.create_task(self._leave(), name="leave")
        elif now - self._stopped_at > _ECHO_S:
            logger.warning("%s again: not waiting any longer", reason)
            self._cut_off()
            self.should_exit = self.force_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        if self.started:
            self._on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the connections and end the lifespan.

        uvicorn leaves the lifespan to be cancelled where it is hurried; but workers have to be seen
        out, and that takes no time once they were cut off.
        """
        await super().shutdown(sockets)
        if self.force_exit and not self.lifespan.shutdown_event.is_set():
            await self.lifespan.shutdown()

    def _log_started_message(self, listeners: object) -> None:
        """Our own announcement says it."""

    async def _leave(self) -> None:
        await asyncio.sleep(self._shutdown_delay_s)
        await self._move_clients_away()
        await self._drain()
        self.should_exit = True


async def see_clients_off(server: uvicorn.Server) -> None:
    """Take no more connections, and have each answer close its own; wait a moment for that."""
    for each in server.servers:
        each.close()
    server.config.encoded_headers.append(_CLOSE)
    server.server_state.default_headers = [*server.server_state.default_headers, _CLOSE]
    # uvicorn keeps a set of connections, and no event for when it is empty.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LAME_DUCK_S):
            while server.server_state.connections:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
