"""TLS handshakes: a connection counts, and is timed, from its accept on. Event loop.

The event loop's own TLS server does not report a connection before its handshake is over, and waits
a minute for that: silent clients could use up all descriptors meanwhile.
"""

import asyncio
import os
import socket
import ssl
from functools import partial
from typing import Any

from uvicorn.protocols.utils import get_remote_addr

from inferpool.service.api.wire.protocol import PredictProtocol
from inferpool.service.queue.shares import owner_of_address


class TlsHandshake(asyncio.Protocol):
    """Does the TLS handshake of a connection, and then hands it to HTTP's protocol.

    The loop can begin a handshake only on a socket that it does not have yet, so the connection
    gets a second descriptor, and the first one is closed.
    """

    is_idle = True
    """It makes room for others if there are too many connections."""
    num_unread_bytes = 0

    def __init__(
        self, http: type[PredictProtocol], tls: ssl.SSLContext, *, server_state: Any, **rest: Any
    ) -> None:
        """Expect a connection; `rest` are uvicorn's other arguments for a protocol."""
        self.idle_since = 0.0
        self.address = ""
        """The owner that its client's address stands for."""
        self._http_class = http
        self._make_http = partial(http, server_state=server_state, **rest)
        self._everyone = server_state.connections
        self._tls = tls
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin the handshake if there is room for one more connection."""
        loop = asyncio.get_running_loop()
        self.idle_since = loop.time()
        address = get_remote_addr(transport)
        self.address = owner_of_address(address[0] if address else None)
        self._everyone.add(self)
        try:
            # A client refused now gets no reason: it could not read that before the handshake.
            if self._http_class.connection_limits.have_room(self, self._everyone):
                taken = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
                self._task = loop.create_task(self._shake_hands(taken), name="handshake")
                self._task.add_done_callback(partial(_close_if_cancelled, taken))
        except OSError:  # no descriptor is left
            pass
        finally:
            transport.abort()
            if self._task is None:
                self._everyone.discard(self)

    def shed(self) -> None:
        """Close the connection at once: its place is needed."""
        self._everyone.discard(self)
        if self._task is not None:
            self._task.cancel()

    shutdown = shed
    """uvicorn calls this when the server stops."""

    async def _shake_hands(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        limit_s = self._http_class.connection_limits.limits.head_timeout_s
        try:
            connection.setblocking(False)
            await loop.connect_accepted_socket(
                self._begin_http, connection, ssl=self._tls, ssl_handshake_timeout=limit_s
            )
        except OSError:  # the client speaks no TLS that we do, takes too long, or has left
            connection.close()
        finally:
            self._everyone.discard(self)

    def _begin_http(self) -> PredictProtocol:
        http = self._make_http()
        http.handshake = self
        return http


def _close_if_cancelled(connection: socket.socket, task: "asyncio.Task[None]") -> None:
    """Close the connection of a handshake that was cancelled, maybe before it began."""
    if task.cancelled():
        connection.close()
