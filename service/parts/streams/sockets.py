"""Sends a streamed answer on a connection of our own server. Event loop."""

from inferpool.service.api.exchange import Exchange
from inferpool.service.api.wire.protocol import HttpConnection


class SocketStream:
    """An answer in chunks; for HTTP/1.0 the end of the connection is its end."""

    def __init__(self, connection: HttpConnection, exchange: Exchange, lines: bytes) -> None:
        """Send the head, given all its lines but those about its length."""
        self._connection = connection
        self._exchange = exchange
        self._is_chunked = not exchange.call.is_old
        framing = b"transfer-encoding: chunked\r\n" if self._is_chunked else b""
        self._write(b"HTTP/1.1 200 OK\r\n%b%b\r\n" % (lines, framing))

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

    def _write(self, data: bytes) -> None:
        if not self._connection.transport.is_closing():
            self._connection.transport.write(data)
