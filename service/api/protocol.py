"""`POST /predict` straight off the socket: a uvicorn protocol class that needs no ASGI for it.

The ASGI endpoint is the reference, and the way under any other server; both run the steps of
`Predict` and give the same answers. Here a call costs no task, no scope, no events, and one write.
Everything else goes to the application as uvicorn has it.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from service.api.call import Call
from service.api.errors import SlowBodyError
from service.api.predict import Predict
from service.errors import TooLargeError, UnavailableError

_PATH = b"/predict"
_CLIENT_GONE = 499
_MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers; what comes in one read with their end is not counted."""
_COPIED_BODY_BYTES = 64 * 1024
"""Up to this, head and body go out as one piece of bytes."""
_CLOSE_LINE = b"connection: close\r\n"


class _NoEvent:
    """What uvicorn wakes its ASGI calls by; ours wait for nothing."""

    def set(self) -> None:
        return


class Exchange:
    """One call to `/predict` on a connection, in the place of uvicorn's RequestResponseCycle."""

    __slots__ = (
        "_chunks", "_future", "_is_complete", "_is_started", "_num_bytes", "_predict", "_protocol",
        "_timer", "call", "disconnected", "expects_continue", "keep_alive", "response_complete",
    )  # fmt: skip

    message_event = _NoEvent()

    def __init__(
        self, protocol: "PredictProtocol", call: Call, *, keep_alive: bool, expects_continue: bool
    ) -> None:
        self.call = call
        self.keep_alive = keep_alive
        self.expects_continue = expects_continue
        self.disconnected = False
        self.response_complete = False
        self._protocol = protocol
        self._predict = protocol.predict
        self._chunks: list[bytes] = []
        self._num_bytes = 0
        self._is_started = False
        self._is_complete = False
        self._future: asyncio.Future[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """It is this call's turn to be answered."""
        self._is_started = True
        try:
            self._predict.check(self.call)
            self._check_size()
        except Exception as error:
            self._refuse(error)
            return
        if self.expects_continue and not self._is_complete:
            self._protocol.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self._is_complete:
            self._submit()

    def feed(self, chunk: bytes) -> None:
        """Take a piece of the body."""
        self._chunks.append(chunk)
        self._num_bytes += len(chunk)
        if self._is_started:
            try:
                self._check_size()
            except TooLargeError as error:
                self._refuse(error)

    def complete(self) -> None:
        """The body has arrived."""
        self._is_complete = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_started:
            self._submit()

    def watch_body(self) -> None:
        """Begin to time a body that did not come with its head, unless that is being done."""
        if self._is_complete or not self._is_started or self._timer is not None:
            return
        self._timer = self._protocol.loop.call_at(self.call.deadline, self._on_slow_body)

    def give_up_body(self) -> None:
        """Answer now, if the body has not arrived: it is not waited for any longer."""
        if not self._is_complete and not self.response_complete:
            self.keep_alive = False
            self._refuse(UnavailableError("this server is shutting down", retry_after_s=1))

    def abandon(self) -> None:
        """The client is gone."""
        if self._timer is not None:
            self._timer.cancel()
        if not self.response_complete:
            self.response_complete = True
            self._predict.abandon(self.call)
            self._predict.close(self.call, _CLIENT_GONE)

    def _check_size(self) -> None:
        max_bytes = self._predict.limits.max_body_bytes
        if self._num_bytes > max_bytes:
            raise self._predict.too_large()

    def _on_slow_body(self) -> None:
        self._timer = None
        self._refuse(SlowBodyError("the body was not complete before the deadline"))

    def _submit(self) -> None:
        try:
            future = self._predict.submit(self.call, self._chunks or (b"",))
        except Exception as error:
            self._refuse(error)
            return
        self._chunks = []
        self._future = future
        future.add_done_callback(self._on_done)

    def _on_done(self, future: "asyncio.Future[Any]") -> None:
        if self.response_complete:
            return
        try:
            status, headers, body = self._predict.answer(self.call)
        except Exception as error:
            self._refuse(error)
            return
        self._write(status, headers, body)

    def _refuse(self, error: Exception) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._predict.abandon(self.call)
        self._chunks = []
        status, headers, body = self._predict.refuse(self.call, error)
        self._write(status, headers, body)

    def _write(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        protocol = self._protocol
        self.response_complete = True
        if protocol.transport.is_closing():
            self._predict.close(self.call, _CLIENT_GONE)
            return
        lines = [STATUS_LINE[status], protocol.default_head()]
        closes = protocol.default_head_closes
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
            closes = closes or name == b"connection"
        if closes:
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append(_CLOSE_LINE)
        lines.append(b"\r\n")
        if len(body) <= _COPIED_BODY_BYTES:
            lines.append(body)
            protocol.transport.write(b"".join(lines))
        else:
            protocol.transport.writelines((b"".join(lines), body))
        self._predict.close(self.call, status)
        protocol.on_exchange_complete(self)


class PredictProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with the calls to `/predict` taken out. Bind it with `bound_to`."""

    predict: Predict

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.default_head_closes = False
        self._default_headers: Sequence[tuple[bytes, bytes]] | None = None
        self._default_head = b""
        self._active: Exchange | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0
        self._is_held = False
        self._is_in_head = False
        self._head_bytes = 0
        self._asks_for_upgrade = False

    @classmethod
    def bound_to(cls, predict: Predict) -> type["PredictProtocol"]:
        """The class for one endpoint, as `uvicorn.Config(http=...)` takes it."""
        return type(cls.__name__, (cls,), {"predict": predict})

    def default_head(self) -> bytes:
        """The header lines that every answer begins with; uvicorn renews them each second."""
        headers = self.server_state.default_headers
        if headers is not self._default_headers:
            self._default_headers = headers
            self._default_head = b"".join([b"%b: %b\r\n" % header for header in headers])
            self.default_head_closes = any(
                name == b"connection" and value == b"close" for name, value in headers
            )
        return self._default_head

    def on_exchange_complete(self, exchange: Exchange) -> None:
        """An answer is written: close, go on with what is pipelined, or wait for the next call."""
        self._active = None
        if not exchange.keep_alive:
            self.transport.close()
        if self.flow.write_paused:  # it does not read its answers: take no more calls till it does
            self._is_held = True
            self.flow.pause_reading()
            return
        if self.pipeline:  # soon and not now: a thousand refusals in a row must not be nested
            self.loop.call_soon(self.on_response_complete)
            return
        if self.flow.read_paused or self.transport.is_closing():
            self.on_response_complete()
            return
        self.server_state.total_requests += 1
        self._be_idle()

    def on_response_complete(self) -> None:
        """As uvicorn has it, for the calls that it answers."""
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is here; it has as long to begin a request as between two."""
        super().connection_made(transport)
        self._be_idle()

    def shutdown(self) -> None:
        """The server is going: who has sent half a request is told so, the rest is answered."""
        if self._active is not None:
            self._active.give_up_body()
        super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client hung up, or all is said."""
        super().connection_lost(exc)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self._active is not None:
            self._active.abandon()
            self._active = None

    def resume_writing(self) -> None:
        """The client has read what was written."""
        super().resume_writing()
        if self._is_held:
            self._is_held = False
            self.on_response_complete()

    def data_received(self, data: bytes) -> None:
        """Feed the parser."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._active is not None:
            self._active.watch_body()
        elif self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(
                    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
                    b"connection: close\r\ncontent-length: 0\r\n\r\n"
                )
                self.transport.close()

    def on_message_begin(self) -> None:
        """Begin a request; uvicorn's scope is made when it turns out to be needed."""
        self._is_in_head = True
        self._head_bytes = 0
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_headers_complete(self) -> None:
        """Take the call, or hand it to uvicorn."""
        self._is_in_head = False
        path, _, query = self.url.partition(b"?")
        parser = self.parser
        if parser.should_upgrade():
            self._asks_for_upgrade = True
            return
        if (
            not path.startswith(_PATH)
            or path[8:9] not in (b"", b"/")
            or b"%" in path
            or b"#" in self.url
            or parser.get_method() != b"POST"
            or self.root_path
        ):
            self._hand_on()
            return
        call = self.predict.open("POST", path.decode("ascii"), query, self.headers)
        exchange = Exchange(
            self,
            call,
            keep_alive=parser.get_http_version() != "1.0" and parser.should_keep_alive(),
            expects_continue=self.expect_100_continue,
        )
        before = self.cycle
        self.cycle = exchange  # type: ignore[assignment]  # what uvicorn uses of a cycle, it has
        if before is None or before.response_complete:
            self._active = exchange
            exchange.start()
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((exchange, self.app))  # type: ignore[arg-type]  # as above

    def on_body(self, body: bytes) -> None:
        """A piece of the newest request's body."""
        cycle: Exchange | RequestResponseCycle = self.cycle
        if not isinstance(cycle, Exchange):
            super().on_body(body)
        elif not cycle.response_complete:
            cycle.feed(body)

    def on_message_complete(self) -> None:
        """The newest request has arrived."""
        if self._asks_for_upgrade:
            return
        cycle: Exchange | RequestResponseCycle = self.cycle
        if not isinstance(cycle, Exchange):
            super().on_message_complete()
        elif not cycle.response_complete:
            cycle.complete()

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Read the request again as if it did not ask for another protocol (RFC 9110, 7.8).

        The parser takes what follows such a head for the other protocol's; we speak none, and the
        request may have a body.
        """
        self._asks_for_upgrade = False
        method = self.parser.get_method()
        if method == b"CONNECT":  # which is nothing but an upgrade
            self.send_400_response("CONNECT is not served here.")
            return
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b\r\n" % (method, self.url, version)]
        lines += [
            b"%b: %b\r\n" % (name, value)
            for name, value in self.headers
            if name not in (b"connection", b"upgrade", b"http2-settings")
        ]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join([*lines, b"\r\n", rest]))

    def _be_idle(self) -> None:
        """One timer per connection that looks when it fires, rather than one per call."""
        self._idle_since = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._check_idle)

    def _hand_on(self) -> None:
        url, headers, expect = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expect
        self.headers.extend(headers)  # the scope holds this list
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Start what was pipelined, whichever kind it is."""
        if isinstance(cycle, Exchange):
            self._active = cycle
            cycle.start()
            cycle.watch_body()
        else:
            super()._start_asgi_task(cycle, app)

    def _check_idle(self) -> None:
        self._idle_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            return  # the end of that call sets the timer again
        left_s = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left_s <= 0:
            self.timeout_keep_alive_handler()
        else:
            self._idle_timer = self.loop.call_later(left_s, self._check_idle)
