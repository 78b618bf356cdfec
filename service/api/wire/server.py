"""uvicorn with our own order of shutting down.

uvicorn closes idle connections the moment it is told to stop, so a client that has just sent a
request on one gets no answer. Here readiness goes red first. Then the server accepts all clients
that have connected, and no others, and for a moment every answer carries `Connection: close`, which
moves busy clients away. Only then are connections closed; clients that read slowly get time.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from inferpool.service.api.wire.backlog import take_last
from inferpool.service.api.wire.handshakes import TlsHandshake
from inferpool.service.api.wire.protocol import PredictProtocol
from inferpool.service.signals import early_signal, stop_signals

logger = logging.getLogger(__name__)

_LAME_DUCK_S = 0.5
"""How long busy connections may take to get to an answer that closes them."""
_ECHO_S = 0.3
"""A signal so soon after the first is the same one: stopping the whole process group reaches us
twice when the command that started us passes the signal on."""
_CLOSE = (b"connection", b"close")
_MAX_ACCEPTED = 4096
"""Connections at once; more than a backlog holds, unless somebody has raised somaxconn."""
NUM_HANDLES = 16
"""Handles of one listening socket. In each iteration of the loop, uvloop accepts one connection of
each handle, so with a single one, new clients would wait for an iteration each while busy ones fill
them, and their calls would come to the queue one by one. An idle handle costs a microsecond in
iterations that have somebody to accept; to accept in Python costs 20 for each connection."""
_LAST_WORDS_S = 2.0
"""How long a connection may hold up the end after all is answered and read."""
_LOOK_EVERY_S = 0.02


class DrainingServer(uvicorn.Server):
    """A server that sees its clients off before it ends."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.flush_until = 0.0
        """The moment until which answers may be read after all is answered; `time.monotonic`."""
        self._listeners: Sequence[socket.socket] = ()
        self._arrivals: set[asyncio.Task[None]] = set()

    def take(self, connection: socket.socket) -> None:
        """Serve a connection that something else than uvicorn accepted."""
        connection.setblocking(False)
        task = asyncio.create_task(self._take_in(connection), name="arrival")
        self._arrivals.add(task)
        task.add_done_callback(self._arrivals.discard)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen: on sockets with several handles each, or else where uvicorn's settings say."""
        self._listeners = listeners = sockets or ()
        further = [each.dup() for each in listeners for _ in range(NUM_HANDLES - 1)]
        await super().startup(sockets and [*sockets, *further])

    async def move_clients_away(self) -> None:
        """Accept the last connections, and wait a moment for answers to close them."""
        self.config.encoded_headers.append(_CLOSE)
        self.server_state.default_headers = [*self.server_state.default_headers, _CLOSE]
        for listener in self._listeners:
            await take_last(listener, partial(self._accept_all, listener))
        for server in self.servers:
            server.close()
        # uvicorn keeps a set of connections, and no event for when it is empty.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAME_DUCK_S):
                while self.server_state.connections or self._arrivals:  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_EVERY_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close each connection when its client has read its answer, and end the lifespan."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await self._flush()
        for task in self.server_state.tasks:
            task.cancel()
        await self.lifespan.shutdown()

    async def _flush(self) -> None:
        """Wait for answers to be read; log how many are cut off if that takes too long."""
        state = self.server_state
        until = time.monotonic() + _LAST_WORDS_S
        while (state.connections or state.tasks) and not self.force_exit:
            now = time.monotonic()
            if self._unread():
                until = max(until, min(now + _LAST_WORDS_S, self.flush_until))
            if now >= until:
                break
            await asyncio.sleep(_LOOK_EVERY_S)
        if unread := self._unread():
            logger.warning(
                "%d clients have not read their answers to the end: %d bytes are cut off",
                len(unread),
                sum(unread),
            )

    def _unread(self) -> list[int]:
        """Return the unread bytes of each connection that has any."""
        return [num for each in self.server_state.connections if (num := _num_unread(each))]

    def _accept_all(self, listener: socket.socket) -> None:
        """Accept connections from the backlog before uvicorn's own server does."""
        for _ in range(_MAX_ACCEPTED):
            try:
                connection, _ = listener.accept()
            except ConnectionAbortedError:
                continue
            except OSError:  # none is left, or no descriptor
                return
            self.take(connection)

    async def _take_in(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError:  # the client has left
            connection.close()

    def _make_protocol(self) -> asyncio.Protocol:
        make = self.config.http_protocol_class
        return make(  # type: ignore[call-arg]  # as uvicorn calls it
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            _loop=None,
        )


class Server(DrainingServer):
    """Serves until a signal, drains, and returns normally; a second signal hurries it."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        shutdown_delay_s: float,
        drain_timeout_s: float,
        on_listening: Callable[[], None],
        on_stopping: Callable[[str], None],
        drain: Callable[[], Awaitable[None]],
        cut_off: Callable[[], None],
        move_clients_away: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Prepare to serve.

        Args:
            config: uvicorn's.
            shutdown_delay_s: How long to serve on with readiness red.
            drain_timeout_s: How long clients may take to read their answers, from the drain on.
            on_listening: Called once clients can connect.
            on_stopping: Called with the reason when the shutdown begins: readiness goes red.
            drain: Admits nothing more, and returns when everything accepted has its answer.
            cut_off: Answers everything at once, when a second signal hurries.
            move_clients_away: Moves clients to another host, if other processes have the
                connections.
        """
        super().__init__(config)
        self._shutdown_delay_s = shutdown_delay_s
        self._drain_timeout_s = drain_timeout_s
        self._on_listening = on_listening
        self._on_stopping = on_stopping
        self._drain = drain
        self._cut_off = cut_off
        self._move_clients_away = move_clients_away or self.move_clients_away
        self._stopped_at = 0.0
        self._is_listening = asyncio.Event()
        self._leaving: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Turn signals into a shutdown; the process then exits with its own code."""
        loop = asyncio.get_running_loop()
        signals = stop_signals()
        early = early_signal()
        for signum in signals:
            loop.add_signal_handler(signum, self.stop, signum.name)
        if early:
            self.stop(signal.Signals(early).name)
        try:
            yield
        finally:
            # Everything is stopped: a signal that comes now must not change the exit code.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
            for signum in signals:
                loop.remove_signal_handler(signum)
                signal.signal(signum, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

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
            self._is_listening.set()
            self._on_listening()

    def _log_started_message(self, listeners: object) -> None:
        """Say nothing: our own announcement does."""

    async def _leave(self) -> None:
        await self._is_listening.wait()
        await asyncio.sleep(self._shutdown_delay_s)
        await self._move_clients_away()
        self.flush_until = time.monotonic() + self._drain_timeout_s
        await self._drain()
        self.should_exit = True


def _num_unread(connection: object) -> int:
    if isinstance(connection, PredictProtocol | TlsHandshake):
        return connection.num_unread_bytes
    assert isinstance(connection, HttpToolsProtocol)
    return connection.transport.get_write_buffer_size()
