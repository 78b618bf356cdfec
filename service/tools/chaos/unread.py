"""Connections that ask for pages and read nothing, beside the clients that are counted."""

import asyncio
import contextlib
import socket
from dataclasses import dataclass

from inferpool.service.tools.trial.connection import Address

_NUM_REQUESTS = 500
"""Requests that each of them sends at once. None is for a prediction, so no instance is counted."""
_REQUEST = b"GET / HTTP/1.1\r\nHost: inferpool\r\n\r\n"
_RECEIVE_BYTES = 4096
_OTHER_PEER = "127.0.0.2"
"""Address that they come from: the service may limit what one address has open."""


@dataclass(slots=True, kw_only=True)
class UnreadConnections:
    """Opens connections that read nothing. Lives in the event loop."""

    address: Address
    num_connections: int = 24
    held_s: float = 3.0

    async def open(self) -> None:
        """Hold connections for a while, each as full of answers as the service allows."""
        asked = [asyncio.create_task(self._hold()) for _ in range(self.num_connections)]
        await asyncio.gather(*asked)

    async def _hold(self) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as unread:
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
            unread.setblocking(False)
            # It waits for room, as it should, or the service refuses it or ends it.
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(self.held_s):
                    unread.bind((_OTHER_PEER, 0))
                    await loop.sock_connect(unread, self.address)
                    await loop.sock_sendall(unread, _REQUEST * _NUM_REQUESTS)
                    await asyncio.sleep(self.held_s)
