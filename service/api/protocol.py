"""`POST /predict` straight off the socket: a uvicorn protocol class that needs no ASGI for it.

The ASGI endpoint is the reference, and the way under any other server; both run the steps of
`Predict` and give the same answers. Here a call costs no task, no scope, no events, and one write.
Everything else goes to the application as uvicorn has it. What a connection may cost is bounded
here for all calls: the size and time of heads, the calls that wait in line, the time that a client
takes to read its answers, and (in `service.api.connections`) the number of connections.
"""

import asyncio
import contextlib
import logging
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from service.api.body import BodyPace
from service.api.connections import Connections, EdgeLimits
from service.api.errors import LargeHeadError, LongUrlError
from service.api.exchange import Exchange
from service.api.flow import UNREAD, Flow
from service.api.framing import Framing
from service.api.known_heads import KnownHead, KnownHeads
from service.api.predict import Predict
from service.api.replies import lines_of, refusal_of
from service.errors import (
    BadRequestError,
    InternalError,
    OverloadedError,
    ServiceError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

_PATH = b"/predict"
_MAX_HEAD_BYTES = 64 * 1024
"""Of request line and headers."""
_MAX_HEADERS = 100
_MAX_URL_BYTES = 8 * 1024
"""More than the 8,000 that RFC 9110 (4.1) asks for at least."""
_MAX_PIPELINED = 1024
"""Calls of one connection that wait for their turn; one read may bring thousands."""
_CALL_BYTES = 4096
"""What a call that waits for its turn takes besides its bytes."""
_MIN_WRITTEN_BYTES = 4096
"""What a slow reader must take in each `write_timeout_s`, or else all that is left."""
_HIGH_WATER_BYTES = 64 * 1024
_PIECE_BYTES = 256 * 1024
"""Large answers are written in such pieces: uvloop's TLS takes whatever is written to it first, and
does not tell that the client has not read it."""
_LINGER_S = 2.0
"""How long a client that is still sending may take to read that it was refused.

A socket that is closed while data arrives is reset, and what the client has not read is lost."""


class PredictProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with the calls to `/predict` taken out. Bind it with `bound_to`."""

    predict: Predict
    others: Connections
    known_heads: KnownHeads

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.default_head_closes = False
        self.idle_since = 0.0
        self.handshake: object = None
        """What had the connection's place before; see `service.api.handshakes`."""
        self._default_headers: list[tuple[bytes, bytes]] | None = None
        self._default_head = b""
        self._active: Exchange | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._num_unwritten = 0
        self._answer: bytes | None = None
        """The body of a large answer, until the client has read it."""
        self._num_sent = 0
        """Bytes of that that were written."""
        self._asgi_bytes = 0
        """Length of an application's large answer, until its last piece is to be written."""
        self._unended: Exchange | None = None
        """The call with that answer."""
        self._num_in_line = 0
        """Bytes that calls which wait for their turn are taken to need."""
        self._num_in_head = 0
        """Bytes of a head that is not whole, as they were counted."""
        self._is_held = False
        """The client does not read its answers: the next call waits until it does."""
        self._is_deaf = False
        """Nothing that still comes is looked at."""
        self._is_in_head = False
        self._is_in_body = False
        self._body_timer: asyncio.TimerHandle | None = None
        self._num_body_bytes = 0
        """Bytes that have come of the newest body."""
        self._num_missing = 0
        """Bytes of the body of a call with a known head."""
        self._head_bytes = 0
        self._chunk_bytes = 0
        self._is_behind_others = False
        """The newest data has more before what begins next."""
        self._head_has_others_before = False
        """The newest head began in the newest data, and something else came before it there."""
        self._asks_for_upgrade = False
        self._framing: Framing | None = None
        """Counts the newest message, if its body is chunked."""
        self._last_head: KnownHead | None = None
        self._new_head = b""
        """Raw head of the first request in the newest data, if no other has begun since."""

    @classmethod
    def bound_to(
        cls, predict: Predict, limits: EdgeLimits | None = None
    ) -> type["PredictProtocol"]:
        """The class for one endpoint, as `uvicorn.Config(http=...)` takes it."""
        others = Connections(limits or EdgeLimits(), predict.unfinished)
        bound = {"predict": predict, "others": others, "known_heads": KnownHeads()}
        return type(cls.__name__, (cls,), bound)

    @property
    def is_idle(self) -> bool:
        """No call of it is being answered."""
        return (self.cycle is None or self.cycle.response_complete) and self._answer is None

    @property
    def num_unread_bytes(self) -> int:
        """Bytes of its answers that the kernel has not taken yet."""
        num_bytes = self.transport.get_write_buffer_size()
        return num_bytes if self._answer is None else num_bytes + len(self._answer) - self._num_sent

    def default_head(self) -> bytes:
        """The header lines that every answer begins with; uvicorn renews them each second."""
        headers = self.server_state.default_headers
        if headers is not self._default_headers:
            self._default_headers = headers
            self._default_head = lines_of(headers)
            self.default_head_closes = any(
                name == b"connection" and value == b"close" for name, value in headers
            )
        return self._default_head

    def on_exchange_complete(self, exchange: Exchange) -> None:
        """An answer is written: close, go on with what is pipelined, or wait for the next call."""
        self._active = None
        if self._answer is not None:  # all but what the client has not read; see `resume_writing`
            self._unended = exchange
            self._hold()
            return
        if not exchange.keep_alive:
            self._leave(is_more_to_come=self._is_deaf or not exchange.is_complete)
            return
        if self.flow.write_paused:  # it does not read its answers: take no more calls till it does
            self._hold()
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
        if self._linger_timer is not None:
            return
        super().on_response_complete()
        if not self._is_held and not self.transport.is_closing():
            self.flow.resume_reading()  # the last in line may have been taken out
        self._unset_keepalive_if_required()  # its timer would be put off by each byte that comes
        self._be_idle()
        if self.transport.get_write_buffer_size():
            self._watch_writing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is here; it has as long to begin a request as between two."""
        super().connection_made(transport)
        self.connections.discard(self.handshake)
        self.flow = Flow(transport, self.pipeline)
        transport.set_write_buffer_limits(
            _HIGH_WATER_BYTES, 0
        )  # an answer is kept to its last byte
        self._be_idle()
        everyone: Any = self.connections  # which are all of this class
        if not self.others.have_room(everyone):
            self._turn_away()

    def shutdown(self) -> None:
        """The server is going: who has sent half a request is told so, the rest is answered."""
        if self._active is not None:
            self._active.give_up_body()
        elif self._is_in_body and not self.is_idle:
            self._on_garbage(UnavailableError("this server is shutting down", retry_after_s=1))
        if self._unended is not None:
            self.close()
        else:
            super().shutdown()

    def close(self) -> None:
        """Close the connection, and do not wait for ever for the client to read the rest."""
        if self._unended is not None:
            self._unended.keep_alive = False
            return
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self._watch_writing()

    def send(self, head: bytes, body: bytes) -> None:
        """Write a large answer as far as the client takes it; the rest follows as it reads."""
        self.transport.write(head)
        self._answer, self._num_sent = body, 0
        self._send_on()
        if self._answer is not None:
            self._count_unread()

    def cut_off(self) -> None:
        """Close the connection at once, and forget what the client has not read."""
        self._answer = None
        self.transport.abort()

    def give_way(self, error: ServiceError) -> None:
        """Refuse a head that is not whole, and the calls that wait for their turn."""
        self._clear_line()
        self._refuse(error)

    def shed(self) -> None:
        """Close the connection at once: its place is needed."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client hung up, or all is said."""
        super().connection_lost(exc)
        for timer in (
            self._idle_timer,
            self._head_timer,
            self._body_timer,
            self._write_timer,
            self._linger_timer,
        ):
            if timer is not None:
                timer.cancel()
        if self._active is not None:
            self._active.abandon()
            self._active = None
        self._clear_line()
        self._uncount_head()
        self._answer = self._unended = None
        self.others.unread.give_back(self)

    def pause_writing(self) -> None:
        """The client does not read as fast as it is answered."""
        super().pause_writing()
        self._watch_writing()
        self._count_unread()

    def resume_writing(self) -> None:
        """The client has read what was written."""
        super().resume_writing()
        self._send_on()
        if self.flow.write_paused:
            return
        self.others.unread.give_back(self)
        if self._unended is not None:
            exchange, self._unended = self._unended, None
            self._is_held = False
            self.on_exchange_complete(exchange)
        elif self._is_held:
            self._is_held = False
            self.on_response_complete()

    def data_received(self, data: bytes) -> None:
        """Feed the parser."""
        if self._is_deaf:
            return
        if self.is_idle and not (self._is_in_head or self._is_in_body or self._is_held):
            known, length = self.known_heads.find(data, self._last_head)
            if known is not None and self._take_known(known, data, length):
                return
            self._new_head = data[:length]
        elif self._num_missing:
            self._take_piece(data)
            return
        self._chunk_bytes = len(data)
        self._is_behind_others, self._head_has_others_before = self._is_in_body, False
        framing = self._framing
        try:
            rest: bytes | memoryview = data
            while rest:
                rest = self._feed(rest)
            if framing is not None and framing is self._framing:
                framing.take_read(len(data))
        except httptools.HttpParserError as error:
            self._on_parser_error(error)
            return
        except ServiceError as error:
            self._on_garbage(error)
            return
        if self._is_in_body:
            self._watch_body()
        if self.pipeline:
            self._count_line(len(data))
        if self._is_in_head and not self._is_deaf:
            # Of a head behind others we know only that it has begun.
            self._watch_head(1 if self._head_has_others_before else len(data))

    def on_message_begin(self) -> None:
        """Begin a request; uvicorn's scope is made when it turns out to be needed.

        Raises:
            EOFError: Nothing more is looked at, so the parser need not go on.
        """
        if self._is_deaf:
            raise EOFError
        self._is_in_head = True
        self._head_bytes = 0
        self._head_has_others_before = self._is_behind_others
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or drop a trailer: nothing here reads those.

        Raises:
            LargeHeadError: There are too many, or too long ones. It ends the parsing at once.
        """
        if not self._is_in_head:
            if self._framing is not None:
                self._framing.take_trailer(len(name) + len(value))
            return
        if len(self.headers) >= _MAX_HEADERS:
            raise LargeHeadError(f"there are more than {_MAX_HEADERS} headers")
        name, value = name.lower(), value.rstrip(b" \t")  # the parser strips its beginning
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Take the call, or hand it to uvicorn."""
        self._is_in_head = False
        self._num_body_bytes = 0
        self._is_behind_others = True
        head, self._new_head = self._new_head, b""
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
            self._uncount_head()
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._stop_listening()
            return
        names = [name for name, _ in self.headers]
        self._framing = Framing() if b"transfer-encoding" in names else None
        refusal = self._refusal_of_head(names.count(b"host"))
        if refusal is not None:
            self._refuse(refusal)
            return
        path, _, query = self.url.partition(b"?")
        parser = self.parser
        if parser.should_upgrade():
            self._asks_for_upgrade = True
            return
        self._is_in_body = True
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
        keep_alive = parser.get_http_version() != "1.0" and parser.should_keep_alive()
        exchange = Exchange(self, self.predict, call, keep_alive)
        exchange.expects_continue = self.expect_100_continue
        self._take_turn(exchange)
        if self._active is exchange and keep_alive and not exchange.response_complete:
            self.known_heads.remember(head, self.predict.again(call))

    def on_body(self, body: bytes) -> None:
        """Take a piece of the newest request's body.

        Raises:
            BadRequestError: It has too many chunks. It ends the parsing at once.
            TooLargeError: It has too many bytes. So does this.
            EOFError: Nothing more is looked at, so the parser need not go on.
        """
        if self._is_deaf:
            raise EOFError
        if self._framing is not None:
            self._framing.take_chunk(len(body))
        self._num_body_bytes += len(body)
        cycle: Exchange | RequestResponseCycle = self.cycle
        if not isinstance(cycle, Exchange):
            if self._num_body_bytes > self.predict.limits.max_body_bytes:
                raise self.predict.too_large()
            super().on_body(body)
        elif not cycle.response_complete:
            cycle.feed(body)

    def on_message_complete(self) -> None:
        """The newest request has arrived."""
        if self._asks_for_upgrade or self._is_deaf:
            return
        self._end_body()
        self._framing = None
        cycle: Exchange | RequestResponseCycle = self.cycle
        if not isinstance(cycle, Exchange):
            super().on_message_complete()
        elif not cycle.response_complete:
            cycle.complete()

    def timeout_keep_alive_handler(self) -> None:
        """It was idle for too long."""
        if not self.transport.is_closing():
            self.close()

    def _take_known(self, known: KnownHead, data: bytes, length: int) -> bool:
        """Begin a call with a head that is known; False if its body wants the parser."""
        predict = self.predict
        self._last_head = known
        earlier = known.call
        num_missing = length + known.num_body_bytes - len(data)
        if num_missing and earlier.form is None:
            return False
        exchange = Exchange(self, predict, predict.again(earlier), True)
        self.cycle = self._active = exchange  # type: ignore[assignment]  # see `_take_turn`
        body = data[length:] if earlier.form is None else memoryview(data)[length:]
        if not num_missing:
            exchange.take(body)
            return True
        self._num_missing = num_missing
        self._num_body_bytes = len(body)
        self._is_in_body = True
        exchange.begin(body)
        self._watch_body()
        return True

    def _take_piece(self, data: bytes) -> None:
        """Take more of a body that needs no parser, since its length is known."""
        # A view is five times as large as a byte, and some clients send bytes one by one.
        piece = data if len(data) <= self._num_missing else memoryview(data)[: self._num_missing]
        self._num_missing -= len(piece)
        self._num_body_bytes += len(piece)
        exchange: Exchange = self.cycle  # type: ignore[assignment]  # see `_take_turn`
        if not exchange.response_complete:
            exchange.feed(piece)
            if self._num_missing:
                exchange.count()
        if self._num_missing:
            return
        self._end_body()
        if not exchange.response_complete:
            exchange.complete()
        if len(piece) < len(data) and not self.transport.is_closing():
            self.data_received(data[len(piece) :])

    def _take_turn(self, exchange: Exchange) -> None:
        """Start a call, or put it behind those that came before it."""
        before = self.cycle
        self.cycle = exchange  # type: ignore[assignment]  # what uvicorn uses of a cycle, it has
        if (before is None or before.response_complete) and not self._is_held:
            self._active = exchange
            exchange.start()
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((exchange, self.app))  # type: ignore[arg-type]  # as above

    def _feed(self, data: bytes | memoryview) -> bytes | memoryview:
        """Feed the parser, and return what it has left.

        Raises:
            httptools.HttpParserError: This is no HTTP that we speak.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._is_deaf:
                return b""
            self._read_again_without_upgrade()
            return memoryview(data)[upgrade.args[0] :]
        return b""

    def _read_again_without_upgrade(self) -> None:
        """Read the head again as if it did not ask for another protocol (RFC 9110, 7.8).

        The parser takes what follows such a head for the other protocol's; we speak none, and the
        request may have a body.
        """
        self._asks_for_upgrade = False
        method = self.parser.get_method()
        if method == b"CONNECT":  # which is nothing but an upgrade
            self._refuse(BadRequestError("CONNECT is not served here"))
            return
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b\r\n" % (method, self.url, version)]
        lines += [
            b"%b: %b\r\n" % (name, value)
            for name, value in self.headers
            if name not in (b"connection", b"upgrade", b"http2-settings")
        ]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"".join([*lines, b"\r\n"]))

    def _refusal_of_head(self, num_hosts: int) -> ServiceError | None:
        if len(self.url) > _MAX_URL_BYTES:
            return LongUrlError(f"the URL has more than {_MAX_URL_BYTES} bytes")
        if num_hosts != 1 and (num_hosts or self.parser.get_http_version() != "1.0"):
            return BadRequestError(f"there must be one Host header, and there are {num_hosts}")
        # A head that came in one short read needs no count.
        if self._head_bytes or self._chunk_bytes > _MAX_HEAD_BYTES:
            num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if num_bytes > _MAX_HEAD_BYTES:
                return _too_large_head()
        return None

    def _watch_head(self, num_bytes: int) -> None:
        """Bound what a head that has not come in one piece may take."""
        self._head_bytes += num_bytes
        if self._head_bytes > _MAX_HEAD_BYTES:
            self._refuse(_too_large_head())
            return
        try:
            self._count(self._num_in_head + num_bytes, self._num_in_line)
        except OverloadedError as error:
            self._refuse(error)
            return
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(
                self.others.limits.head_timeout_s, self._on_slow_head
            )

    def _uncount_head(self) -> None:
        if self._num_in_head:
            self._count(0, self._num_in_line)

    def _on_slow_head(self) -> None:
        self._head_timer = None
        if self.flow.read_paused:  # it is us who do not read on
            self._watch_head(0)
        elif self._is_in_head:
            self.close()

    def _watch_body(self) -> None:
        """Count a body that did not come with its head, and time it, unless that is being done.

        All bodies are timed, whatever answers their calls, and whether it has answered already.
        """
        cycle: Exchange | RequestResponseCycle = self.cycle
        limits, now = self.predict.limits, self.loop.time()
        deadline = now + limits.max_timeout_s
        if isinstance(cycle, Exchange) and not cycle.response_complete:
            if not cycle.is_started:
                return
            cycle.count()
            deadline = cycle.call.deadline
        if self._body_timer is None and not self._is_deaf:
            self._time_body(BodyPace(deadline, now, limits, self._num_body_bytes))

    def _time_body(self, pace: BodyPace) -> None:
        self._body_timer = self.loop.call_at(pace.next_check, self._check_body, pace)

    def _check_body(self, pace: BodyPace) -> None:
        self._body_timer = None
        if self._is_deaf or self.transport.is_closing():
            return
        if self.flow.read_paused:  # it is us who do not read on
            self._watch_body()
        elif pace.has_moved_on(self._num_body_bytes):
            self._time_body(pace)
        else:
            self._on_garbage(pace.error())

    def _end_body(self) -> None:
        """The body of the newest request has arrived."""
        self._is_in_body = False
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _on_parser_error(self, error: httptools.HttpParserError) -> None:
        """What came is no HTTP, or we failed on it: say so, after the answers that are due."""
        if self._is_deaf:
            return
        cause = error.__context__
        if isinstance(cause, ServiceError):
            self._on_garbage(cause)
            return
        if cause is None or isinstance(cause, (httptools.HttpParserError, UnicodeDecodeError)):
            self._on_garbage(BadRequestError(f"this is no HTTP that can be read: {error}"))
            return
        logger.error("a request could not be taken: %r", cause, exc_info=cause)
        self._on_garbage(InternalError("this is a mistake of the service; its log has more"))

    def _on_garbage(self, error: ServiceError) -> None:
        if not self._is_in_body:
            if not self._is_in_head:
                self.url, self.headers = b"", []
            self._refuse(error)
            return
        self._is_deaf = True
        cycle: Exchange | RequestResponseCycle = self.cycle
        if isinstance(cycle, Exchange) and not cycle.response_complete:
            cycle.fail(error)
        elif isinstance(cycle, Exchange) or cycle.response_started:
            self.close()
        else:
            self._take_back(cycle)
            self._refuse(error)

    def _take_back(self, cycle: RequestResponseCycle) -> None:
        """Let uvicorn answer a call no more; something else is answered in its place."""
        if self.pipeline and self.pipeline[0][0] is cycle:
            self.pipeline.popleft()
            return
        cycle.disconnected = cycle.response_complete = True
        cycle.message_event.set()

    def _refuse(self, error: ServiceError) -> None:
        """Answer a head that is not taken, when it is its turn, and listen to nothing after it."""
        self._is_deaf = True
        self._is_in_head = False
        self._uncount_head()
        path = self.url[:_MAX_URL_BYTES].partition(b"?")[0].decode("ascii", "replace")
        call = self.predict.open("-", path, b"", self.headers)
        call.entry = None
        self._take_turn(Exchange(self, self.predict, call, False, _refusal=error))

    def _stop_listening(self) -> None:
        """Let the newest call that was taken be the last one."""
        if not self._is_deaf:
            self._is_deaf = True
            self.pipeline[0][0].keep_alive = False

    def _turn_away(self) -> None:
        """There are too many connections: say so and go."""
        error = UnavailableError("there are too many connections", retry_after_s=1)
        status, lines, body = refusal_of(self.predict.open("-", "/", b"", ()), error)
        self.transport.write(
            b"%b%b%bconnection: close\r\n\r\n%b"
            % (STATUS_LINE[status], self.default_head(), lines, body)
        )
        self._is_deaf = True
        self.close()

    def _leave(self, *, is_more_to_come: bool) -> None:
        """Close the connection; where the client is still sending, only once it may have read."""
        if not is_more_to_come or not self.transport.can_write_eof():
            self.close()
        elif self._linger_timer is None and not self.transport.is_closing():
            self._is_deaf = True
            self._clear_line()
            self.flow.resume_reading()
            with contextlib.suppress(OSError):  # of asyncio's loop, if it hung up this moment
                self.transport.write_eof()
            self._linger_timer = self.loop.call_later(_LINGER_S, self.close)

    def _count_line(self, num_bytes: int) -> None:
        """Count the calls that wait for their turn, and what was read to make them."""
        num_bytes += len(self.pipeline) * _CALL_BYTES
        try:
            self._count(self._num_in_head, self._num_in_line + num_bytes)
        except OverloadedError as error:
            self.give_way(error)

    def _count(self, num_in_head: int, num_in_line: int) -> None:
        unfinished = self.predict.unfinished
        if num_in_head or num_in_line:
            unfinished.hold(self, num_in_head + num_in_line)
        else:
            unfinished.give_back(self)
        self._num_in_head, self._num_in_line = num_in_head, num_in_line

    def _clear_line(self) -> None:
        """Forget the calls that wait for their turn."""
        self.pipeline.clear()
        self._uncount_line()

    def _uncount_line(self) -> None:
        if self._num_in_line:
            self._count(self._num_in_head, 0)

    def _hold(self) -> None:
        """Take no more calls until the client has read its answers."""
        self._is_held = True
        if not self.transport.is_closing():
            self.flow.pause_reading()

    def _send_on(self) -> None:
        """Write as much of a large answer as the client takes now."""
        while self._answer is not None and not self.flow.write_paused:
            piece = memoryview(self._answer)[self._num_sent : self._num_sent + _PIECE_BYTES]
            if not piece:
                self._answer = None
                return
            self._num_sent += len(piece)
            self.transport.write(piece)

    def _count_unread(self) -> None:
        """Count what our answers take while the client does not read them."""
        if self._answer is not None:
            num_bytes = len(self._answer)
        else:
            num_bytes = max(self._asgi_bytes, self.transport.get_write_buffer_size())
        self.others.unread.take(self, num_bytes)

    def _watch_writing(self) -> None:
        """Begin to time a client that does not read, unless that is being done."""
        if self._write_timer is None:
            self._num_unwritten = self.num_unread_bytes
            self._write_timer = self.loop.call_later(
                self.others.limits.write_timeout_s, self._check_writing
            )

    def _check_writing(self) -> None:
        self._write_timer = None
        num_left = self.num_unread_bytes
        if num_left and num_left > self._num_unwritten - _MIN_WRITTEN_BYTES:
            self.transport.abort()
        elif num_left:
            self._watch_writing()

    def _be_idle(self) -> None:
        """One timer per connection that looks when it fires, rather than one per call."""
        self.idle_since = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._check_idle)

    def _hand_on(self) -> None:
        url, headers, expect = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expect
        self.headers.extend(headers)  # the scope holds this list
        if self._is_held and self.is_idle:
            self.cycle = UNREAD  # type: ignore[assignment]  # uvicorn looks whether it is complete
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Start what was pipelined, whichever kind it is."""
        if self._num_in_line and not self.pipeline:
            self._uncount_line()
        if isinstance(cycle, Exchange):
            self._active = cycle
            cycle.start()
            newest: Any = self.cycle
            if self._is_in_body and cycle is newest:
                self._watch_body()
        else:
            super()._start_asgi_task(cycle, self._in_pieces(app))

    def _in_pieces(self, app: Any) -> Any:
        """Have an application's large answers written in pieces too, and counted as a whole."""

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            async def send_pieces(message: Any) -> None:
                body = message.get("body", b"")
                if len(body) <= _PIECE_BYTES:
                    await send(message)
                    return
                self._asgi_bytes = len(body)
                last = (len(body) - 1) // _PIECE_BYTES * _PIECE_BYTES
                try:
                    for place in range(0, last, _PIECE_BYTES):
                        piece = body[place : place + _PIECE_BYTES]
                        await send({**message, "body": piece, "more_body": True})
                finally:
                    self._asgi_bytes = 0
                await send({**message, "body": body[last:]})

            await app(scope, receive, send_pieces)

        return answer

    def _check_idle(self) -> None:
        self._idle_timer = None
        if not self.is_idle or self._is_in_head:
            return  # the end of that call sets the timer again; heads have one of their own
        left_s = self.idle_since + self.timeout_keep_alive - self.loop.time()
        if left_s <= 0:
            self.timeout_keep_alive_handler()
        else:
            self._idle_timer = self.loop.call_later(left_s, self._check_idle)


def _too_large_head() -> LargeHeadError:
    return LargeHeadError(f"the request line and headers have more than {_MAX_HEAD_BYTES} bytes")
