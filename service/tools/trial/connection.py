"""A keep-alive HTTP/1.1 connection for clients that share a machine with the service they ask.

Answers are split by their Content-Length alone, which takes a tenth of the time of a full parser.
Errors:
    TrialError
    NoAnswerError
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

import httptools
import msgspec

from inferpool.service.client.health import ServiceHealth

Address = tuple[str, int]
_HEAD_END = b"\r\n\r\n"
_MAX_HEAD_BYTES = 1 << 16
_NO_BODY = (204, 304)
_HEALTH_S = 10.0
_decode = msgspec.json.Decoder(ServiceHealth).decode


class TrialError(Exception):
    """Nothing can be tried or measured; the message says why, and what to do about it."""


class NoAnswerError(Exception):
    """The connection or the time ended without an answer to a request."""


@dataclass(slots=True)
class TrialAnswer:
    """A whole answer."""

    status: int
    head: bytes
    """The status line and the headers, without the empty line."""
    body: bytes

    def header(self, name: bytes) -> bytes:
        """Return the value of a header; empty without one. The name is in lower case."""
        return _header(self.head, self.head.lower(), name)

    @property
    def request_id(self) -> bytes:
        """The header X-Request-ID."""
        return self.header(b"x-request-id")


OnEnd = Callable[["TrialConnection", TrialAnswer | str], None]
"""Receives the answer to a request, or the reason why there is none."""


class TrialConnection(asyncio.Protocol):
    """One connection with one request at a time. Lives in the event loop."""

    def __init__(self, on_stray: Callable[[], None] = lambda: None, key: str = "") -> None:
        """Store what to call and send; the connection is not open.

        Args:
            on_stray: Called for each answer, or piece of one, without a request.
            key: API key for `read`; empty for none.
        """
        self.is_open = False
        self._key = key
        self._on_stray = on_stray
        self._on_end: OnEnd | None = None
        self._transport: asyncio.Transport | None = None
        self._asked_id = b""
        self._answered_id = b""
        self._pieces: list[bytes] = []
        self._num_missing = 0
        """Bytes that must arrive before the pieces are parsed again."""

    def send(
        self, request: bytes, on_end: OnEnd = lambda *_: None, request_id: bytes = b""
    ) -> None:
        """Send a whole request, head and body; `on_end` is called once.

        With its X-Request-ID, a second answer to the request before is not mistaken for its own.
        """
        assert self._on_end is None, "one request at a time"
        assert self._transport is not None
        self._on_end = on_end
        self._asked_id = request_id
        self._transport.write(request)

    async def ask(self, request: bytes, timeout_s: float, request_id: bytes = b"") -> TrialAnswer:
        """Send a whole request and await its answer.

        Raises:
            NoAnswerError: There was none. The connection cannot be used any more.
        """
        if not self.is_open:
            raise NoAnswerError("the connection was closed before the request")
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[TrialAnswer | str] = loop.create_future()

        def on_end(_: TrialConnection, result: TrialAnswer | str) -> None:
            if not ended.done():
                ended.set_result(result)

        timer = loop.call_later(timeout_s, self.give_up, f"no answer in {timeout_s:.3g} s")
        self.send(request, on_end, request_id)
        try:
            result = await ended
        finally:
            timer.cancel()
        if isinstance(result, str):
            raise NoAnswerError(result)
        return result

    async def read_health(self) -> ServiceHealth:
        """Return the state of the service and all its workers."""
        return _decode(await self.read("/health", _HEALTH_S))

    async def read(self, path: str, timeout_s: float) -> bytes:
        """Return the body of a page.

        Raises:
            NoAnswerError: There is no answer, or it is not 200.
        """
        key = f"X-API-Key: {self._key}\r\n" if self._key else ""
        request = f"GET {path} HTTP/1.1\r\nHost: inferpool\r\n{key}\r\n".encode("latin-1")
        answer = await self.ask(request, timeout_s)
        if answer.status != 200:
            raise NoAnswerError(f"{path} answers with {answer.status}")
        return answer.body

    def give_up(self, reason: str) -> None:
        """End the request under way, and the connection."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()
        if self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            on_end(self, reason)

    def close(self) -> None:
        """Close the connection."""
        self.is_open = False
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass of it
        self.is_open = True

    def connection_lost(self, error: Exception | None) -> None:
        """End the request under way."""
        self.is_open = False
        if self._pieces and (answer := self._answer_until_close(b"".join(self._pieces))):
            self._finish(answer)
        self.give_up("the connection was closed" + (f": {error}" if error else ""))

    def data_received(self, data: bytes) -> None:
        """Read answers."""
        self._num_missing -= len(data)
        if self._pieces:
            self._pieces.append(data)
            if self._num_missing > 0:
                return
            data = b"".join(self._pieces)
            self._pieces.clear()
        while data:
            if self._on_end is None:
                self._on_stray()
                self.close()
                return
            try:
                answer, num_bytes = self._parse(data)
            except (ValueError, httptools.HttpParserError) as error:
                self.give_up(f"what came is no HTTP answer: {error}")
                return
            if answer is None:
                self._pieces.append(data)
                self._num_missing = num_bytes - len(data)
                return
            data = data[num_bytes:]
            if self._asked_id != self._answered_id == answer.request_id:  # of the last request
                self._on_stray()
                continue
            if data:
                self._on_stray()
            self._finish(answer)
            return

    def _finish(self, answer: TrialAnswer) -> None:
        assert self._on_end is not None
        on_end, self._on_end = self._on_end, None
        self._answered_id = self._asked_id
        on_end(self, answer)

    def _parse(self, data: bytes) -> tuple[TrialAnswer | None, int]:
        """Return an answer and its length; or None and its least length."""
        end = data.find(_HEAD_END)
        if end < 0:
            if len(data) > _MAX_HEAD_BYTES or not data.startswith(b"HTTP/1."[: len(data)]):
                raise ValueError(data[:80])
            return None, len(data) + 1
        head = data[:end]
        if not head.startswith(b"HTTP/1."):
            raise ValueError(data[:80])
        status, lower = int(head[9:12]), head.lower()
        begin = end + len(_HEAD_END)
        length = _header(head, lower, b"content-length")
        if length or status in _NO_BODY:
            whole = begin + int(length or 0)
            if len(data) < whole:
                return None, whole
            body = data[begin:whole]
        elif _header(head, lower, b"transfer-encoding"):
            found = _dechunked(data)
            if found is None:
                return None, len(data) + 1
            body, whole = found, len(data)
        else:  # it ends with the connection
            return None, len(data) + 1
        if b"connection: close" in lower or head.startswith(b"HTTP/1.0"):
            self.close()
        return TrialAnswer(status, head, body), whole

    def _answer_until_close(self, data: bytes) -> TrialAnswer | None:
        """Return an answer without a length, which ends with its connection."""
        head, end, body = data.partition(_HEAD_END)
        lower = head.lower()
        if not end or self._on_end is None or b"\r\ncontent-length:" in lower:
            return None
        if b"\r\ntransfer-encoding:" in lower:
            return None
        return TrialAnswer(int(head[9:12]), head, body)


def _header(head: bytes, lower: bytes, name: bytes) -> bytes:
    start = lower.find(b"\r\n" + name + b":")
    if start < 0:
        return b""
    start += len(name) + 3
    end = head.find(b"\r\n", start)
    return head[start : end if end >= 0 else len(head)].strip()


class _Chunks:
    def __init__(self) -> None:
        self.body = bytearray()
        self.is_whole = False

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.is_whole = True


def _dechunked(data: bytes) -> bytes | None:
    """Return the body of an answer in chunks; None while some are missing."""
    if not data.endswith(b"\r\n\r\n"):
        return None
    chunks = _Chunks()
    httptools.HttpResponseParser(chunks).feed_data(data)
    return bytes(chunks.body) if chunks.is_whole else None


async def connect(
    address: Address,
    on_stray: Callable[[], None] = lambda: None,
    tls: ssl.SSLContext | None = None,
    key: str = "",
) -> TrialConnection:
    """Open a connection; the key is for `read`.

    Raises:
        OSError: No process listens there, or the certificate is not trusted.
    """
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(
        lambda: TrialConnection(on_stray, key), *address, ssl=tls
    )
    return connection


@asynccontextmanager
async def connected(
    address: Address, on_stray: Callable[[], None] = lambda: None, key: str = ""
) -> AsyncIterator[TrialConnection]:
    """Open a connection for the block; the key is for `read`."""
    connection = await connect(address, on_stray, key=key)
    try:
        yield connection
    finally:
        connection.close()


def post_request(
    path: str, body: bytes, content_type: str, headers: Mapping[str, str] | None = None
) -> bytes:
    """Return a whole POST request; `headers` replace the default ones."""
    own = {"Host": "inferpool", "Content-Length": str(len(body)), "Content-Type": content_type}
    lines = [f"{name}: {value}\r\n" for name, value in {**own, **(headers or {})}.items()]
    head = f"POST {path} HTTP/1.1\r\n{''.join(lines)}\r\n"
    return head.encode("latin-1") + body
