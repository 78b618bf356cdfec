"""Sends the pieces of streamed answers: on our own connections, or by ASGI. Event loop."""

import asyncio
import contextlib
from collections.abc import Callable

from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from inferpool.service.api.exchange import Exchange, pairs_of
from inferpool.service.api.wire.protocol import HttpConnection

_HIGH_WATER_BYTES = 64 * 1024
"""Bytes that may wait for a server: as much as its own connections keep before they pause."""


class SocketStream:
    """An answer in chunks; for HTTP/1.0 the end of the connection is its end."""

    def __init__(self, connection: HttpConnection, exchange: Exchange, lines: bytes) -> None:
        """Send the head, given all its lines but those about its length."""
        self._connection = connection
        self._exchange = exchange
        self._is_chunked = not exchange.call.is_old
        framing = b"transfer-encoding: chunked\r\n" if self._is_chunked else b""
        self._write(b"%b%b%b\r\n" % (STATUS_LINE[exchange.call.status], lines, framing))

    @property
    def is_writable(self) -> bool:
        """The client reads what is sent."""
        return not self._connection.flow.write_paused

    def send(self, piece: bytes) -> None:
        """Send one more piece, which is not empty."""
        self._write(b"%x\r\n%b\r\n" % (len(piece), piece) if self._is_chunked else piece)

    def end(self) -> None:
        """End the answer, and go on as after any other."""
        if self._is_chunked:
            self._write(b"0\r\n\r\n")
        if not self._connection.transport.is_closing():
            self._connection.end_stream(self._exchange)

    def cut(self) -> None:
        """Close the connection: but for HTTP/1.0, clients know that the answer is not whole."""
        transport = self._connection.transport
        if self.is_writable:
            transport.close()
        else:  # it would wait for the client
            transport.abort()

    def _write(self, data: bytes) -> None:
        if not self._connection.transport.is_closing():
            self._connection.transport.write(data)


class AsgiStream:
    """The pieces of one answer that the server has not taken."""

    def __init__(self, status: int, lines: bytes, on_writable: Callable[[], None]) -> None:
        """Send nothing yet; `on_writable` is called when the server has taken everything."""
        self._status = status
        self._lines = lines
        self._on_writable = on_writable
        self._pieces: list[bytes] = []
        self._has_more = asyncio.Event()
        self._num_bytes = 0
        """Bytes that the server has not taken, also those that it is given now."""
        self._is_ended = False
        self._is_whole = True
        self._sender: asyncio.Task[object] | None = None

    @property
    def is_writable(self) -> bool:
        """The server has taken nearly everything."""
        return self._num_bytes <= _HIGH_WATER_BYTES

    def send(self, piece: bytes) -> None:
        """Send one more piece."""
        self._pieces.append(piece)
        self._num_bytes += len(piece)
        self._has_more.set()

    def end(self) -> None:
        """End the answer behind what was added."""
        self._is_ended = True
        self._has_more.set()

    def cut(self) -> None:
        """End without an end, on which servers close the connection."""
        self._is_whole = False
        self.end()

    def leave(self) -> None:
        """Send nothing more: the client is gone."""
        self._pieces.clear()
        self.end()
        if self._sender is not None:
            self._sender.cancel()  # no more is taken, however long the server waits

    async def run(self, send: Send) -> None:
        """Send the head, and then each piece as it comes, until the end or the client's."""
        self._sender = sender = asyncio.ensure_future(self._send_all(send))
        try:
            await asyncio.wait([sender])
        finally:
            sender.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):  # both: the client has gone
            sender.result()

    async def _send_all(self, send: Send) -> None:
        headers = pairs_of(self._lines)
        await send({"type": "http.response.start", "status": self._status, "headers": headers})
        while self._pieces or not self._is_ended:
            if not self._pieces:
                self._has_more.clear()
                await self._has_more.wait()
                continue
            body, self._pieces = b"".join(self._pieces), []
            await send({"type": "http.response.body", "body": body, "more_body": True})
            self._num_bytes -= len(body)
            if not self._pieces and not self._is_ended:
                self._on_writable()
        if self._is_whole:
            await send({"type": "http.response.body", "body": b""})
