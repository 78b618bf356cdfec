"""TLS handshakes: a connection counts, and is timed, from its accept on. Event loop.

A TLS server of the event loop's own tells nobody of a connection before its handshake is over, and
waits a minute for that: clients that say nothing could take all descriptors meanwhile.
"""

import asyncio
import os
import socket
import ssl
from functools import partial
from typing import Any

from inferpool.service.api.wire.protocol import PredictProtocol


class TlsHandshake(asyncio.Protocol):
    """Has a connection until its TLS handshake is over, and then hands it to HTTP's protocol.

    The loop begins a handshake only on a socket that it does not have yet, so the connection gets a
    second descriptor, and the first one is closed.
    """

    is_idle = True
    """It makes room for others, where there are too many connections."""
    num_unread_bytes = 0

    def __init__(
        self, http: type[PredictProtocol], tls: ssl.SSLContext, *, server_state: Any, **rest: Any
    ) -> None:
        """Expect a connection.

        Args:
            http: Has the connection after the handshake.
            tls: What to serve it with.
            server_state: uvicorn's, which has all connections.
            rest: What else uvicorn tells a protocol.
        """
        self.idle_since = 0.0
        self._http_class = http
        self._make_http = partial(http, server_state=server_state, **rest)
        self._everyone = server_state.connections
        self._tls = tls
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin the handshake, if there is room for one more connection."""
        loop = asyncio.get_running_loop()
        self.idle_since = loop.time()
        self._everyone.add(self)
        try:
            # Who is turned away now is not told why: it could not be read before the handshake.
            if self._http_class.others.have_room(self._everyone):
                taken = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
                self._task = loop.create_task(self._shake_hands(taken), name="handshake")
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
    """uvicorn calls this when the server goes."""

    async def _shake_hands(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        limit_s = self._http_class.others.limits.head_timeout_s
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
