"""`/predict` straight off the socket: a uvicorn protocol class that needs no ASGI for it.

`PredictProtocol` reads calls for `Exchange`, and `HttpConnection` is its wire: a call costs no
task, no scope, no events, and one write. Calls to other paths go to the application, as in uvicorn.
For all of them, the cost of a connection is bounded by `IncomingLimits` (heads, and calls in line),
`BodyTimer`, `AnswerWriter` (answers that nobody reads) and `ConnectionLimits` (the number of
connections).
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from types import SimpleNamespace
from typing import Any, TypeAlias
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl
from uvicorn.server import ServerState

from inferpool.models.attached import attached
from inferpool.service.api.codecs.body import BodyTimer
from inferpool.service.api.errors import LargeHeadError
from inferpool.service.api.exchange import (
    CLOSE_LINE,
    HEAD_END,
    MAX_KNOWN_HEAD_BYTES,
    PREFIX,
    Call,
    Exchange,
    KnownHead,
    KnownHeads,
    Predict,
    Reply,
    begin_call,
    is_job,
    is_long,
    refusal_of,
)
from inferpool.service.api.wire.budgets import EdgeLimits
from inferpool.service.api.wire.held import HeldBytes
from inferpool.service.api.wire.incoming import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    MAX_URL_BYTES,
    ChunkLimits,
    IncomingLimits,
    Lingering,
    QueueAwareFlow,
    check_head,
    error_of,
    head_without_upgrade,
)
from inferpool.service.api.wire.places import ConnectionLimits
from inferpool.service.api.wire.slot_reader import MIN_SLOT_BYTES, SlotReader
from inferpool.service.api.wire.writing import AnswerWriter
from inferpool.service.errors import BadRequestError, ServiceError, UnavailableError
from inferpool.service.queue.shares import owner_of_address

_COPIED_BODY_BYTES = 64 * 1024
"""Up to this size, head and body are written as one piece."""
_CLOSE_AND_END = CLOSE_LINE + b"\r\n"
_CLIENT_GONE = 499


_UNREAD = SimpleNamespace(response_complete=False)
"""Stands for an answer that is not read yet: the next calls wait in line."""
Cycle: TypeAlias = Exchange | RequestResponseCycle
"""A call: one of ours, or one that uvicorn hands to the application."""


class AnswerHeads(HttpToolsProtocol):
    """The heads of answers, and of answers that come in pieces."""

    flow: QueueAwareFlow
    on_writable: Callable[[], None] | None = None
    """Called when the client of a streamed answer reads on."""
    _writer: AnswerWriter
    _active: Exchange | None
    _default_headers: list[tuple[bytes, bytes]] | None = None
    _default_head = b""
    _default_head_closes = False

    def open_stream(self, exchange: Exchange, lines: bytes, on_writable: Callable[[], None]) -> Any:
        """Send the head of an answer that comes in pieces, and return what sends those."""
        self.on_writable = on_writable
        self._take_default_headers()
        if self._default_head_closes or exchange.call.is_old:
            exchange.keep_alive = False
        lines = self._default_head + lines + (b"" if exchange.keep_alive else CLOSE_LINE)
        return attached("stream by sockets")(self, exchange, lines)

    def end_stream(self, exchange: Exchange) -> None:
        """Go on after an answer that came in pieces."""
        self.on_writable = self._active = None
        if self.flow.write_paused:
            self._writer.pause()  # counts what the client has not read
        self._end(exchange)

    def _take_default_headers(self) -> None:
        """Render the lines that every answer begins with; uvicorn renews them each second."""
        self._default_headers = headers = self.server_state.default_headers
        self._default_head = b"".join([b"%b: %b\r\n" % header for header in headers])
        self._default_head_closes = (b"connection", b"close") in headers

    def _end(self, exchange: Exchange) -> None:
        """Go on after an answer is written."""
        raise NotImplementedError


class HttpConnection(AnswerHeads):
    """uvicorn's protocol as the wire of exchanges; `PredictProtocol` adds what the client sends."""

    predict: Predict
    connection_limits: ConnectionLimits

    _fields_of_server: Mapping[str, Any] = {"server_state": None}
    """The fields of uvicorn that all connections of a server share."""

    def __init__(self, *, server_state: ServerState, **rest: Any) -> None:
        """Begin with what the server's connections share; `rest` are uvicorn's other arguments."""
        # uvicorn's own takes a tenth of all that a call with a connection of its own costs.
        if self._fields_of_server["server_state"] is server_state:
            self.__dict__.update(self._fields_of_server)
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.pipeline = deque()
        else:
            super().__init__(server_state=server_state, **rest)
            own = ("parser", "pipeline")
            shared = {name: each for name, each in vars(self).items() if name not in own}
            type(self)._fields_of_server = shared
        self.cycle: Any  # an exchange, or uvicorn's own; both have what uvicorn uses
        self.idle_since = 0.0
        self.handshake: object = None
        """The TLS handshake that it replaces; see `service.api.wire.handshakes`."""
        self._active = None
        self._unended: Exchange | None = None
        """The call with a large answer that the client has not read."""
        self._incoming: IncomingLimits | None = None
        """Bounds heads that come in pieces and calls in line, once there are any."""
        self._idle_timer: asyncio.TimerHandle | None = None
        self._lingering: Lingering | None = None
        self._is_held = False
        """The client does not read its answers: the next call waits."""
        self._ignores_input = False
        """Anything more that comes is dropped."""
        self._is_in_head = False
        """A head has begun to come, and is not whole."""

    @property
    def is_idle(self) -> bool:
        """No call of it is being answered."""
        cycle = self.cycle
        return (cycle is None or cycle.response_complete) and self._unended is None

    @property
    def address(self) -> str:
        """The owner that its client's address stands for."""
        return owner_of_address(self._host)

    @property
    def _host(self) -> str | None:
        self._find_addresses()
        return self.client[0] if self.client else None

    @property
    def num_unread_bytes(self) -> int:
        """Bytes of its answers that the kernel has not taken yet."""
        return self._writer.num_unread_bytes

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin with a client that has as long for its first request as between two."""
        # Not uvicorn's own: it asks the kernel for addresses, which only calls to it need.
        self.transport = transport
        self.connections.add(self)
        self.connections.discard(self.handshake)
        shared = self.connection_limits
        self.flow = QueueAwareFlow(transport, self.pipeline)
        self._writer = AnswerWriter(
            transport, self.flow, shared.unread, shared.limits.write_timeout_s, self._owner
        )
        self._be_idle()
        everyone: Any = self.connections  # all of this class
        if self.handshake is None and not shared.have_room(self, everyone):
            self._turn_away()  # else it has the place of its handshake

    def connection_lost(self, exc: Exception | None) -> None:
        """End: the client hung up, or the connection was closed."""
        super().connection_lost(exc)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self._lingering is not None:
            self._lingering.stop()
        if self._active is not None:
            self._active.abandon()
            self._active = None
        self._clear_line()
        self._end_head()
        self._unended = self.on_writable = None
        self.cycle = None  # a call refers to its connection: freed at once, not by the collector
        self._writer.close()

    def send_continue(self) -> None:
        """Ask the client to send its body."""
        self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def owner_of(self, call: Call) -> str:
        """Return the owner of the memory that a call takes."""
        return self.predict.owner_of(call.headers, self._host)

    def _owner(self) -> str:
        """Return the owner of the memory that its newest call takes."""
        cycle, headers = self.cycle, {}
        if isinstance(cycle, Exchange):
            headers = cycle.call.headers
        elif isinstance(cycle, RequestResponseCycle):
            headers = dict(cycle.scope["headers"])
        return self.predict.owner_of(headers, self._host)

    def send_answer(self, exchange: Exchange, reply: Reply) -> int:
        """Send an answer. Then close, go on with pipelined calls, or wait for the next call."""
        transport = self.transport
        if transport.is_closing():
            return _CLIENT_GONE
        status, lines, body = reply
        if self.server_state.default_headers is not self._default_headers:
            self._take_default_headers()
        end = b"\r\n"
        if not exchange.is_complete and exchange.leaves_body:
            exchange.keep_alive = False
        if self._default_head_closes:
            exchange.keep_alive = False
        elif not exchange.keep_alive:
            end = _CLOSE_AND_END
        self._active = None
        if len(body) <= _COPIED_BODY_BYTES:
            transport.write(
                b"%b%b%b%b%b" % (STATUS_LINE[status], self._default_head, lines, end, body)
            )
            if (
                self.pipeline
                or not exchange.keep_alive
                or self._idle_timer is None
                or self.flow.write_paused
                or self.flow.read_paused
            ):
                self._end(exchange)
            else:  # the most frequent case, and so here; `_end` would do the same
                self.server_state.total_requests += 1
                self.idle_since = self.loop.time()
            return status
        self._writer.send(b"%b%b%b%b" % (STATUS_LINE[status], self._default_head, lines, end), body)
        if self._writer.has_answer:  # the client has not read all of it; see `resume_writing`
            self._unended = exchange
            self._hold()
        else:
            self._end(exchange)
        return status

    def on_response_complete(self) -> None:
        """Do what uvicorn does after the calls that it answers."""
        if self._lingering is not None:
            return
        super().on_response_complete()
        if not self._is_held and not self.transport.is_closing():
            self.flow.resume_reading()  # the last call in line may be gone
        self._unset_keepalive_if_required()  # each byte that comes would put its timer off
        self._be_idle()
        self._writer.watch_rest()

    def pause_writing(self) -> None:
        """Wait: the client reads more slowly than it is answered."""
        super().pause_writing()
        self._writer.pause()

    def resume_writing(self) -> None:
        """Go on: the client has read what was written."""
        super().resume_writing()
        if not self._writer.resume():
            return
        if self.on_writable is not None:
            self.on_writable()
            return
        if self._unended is not None:
            exchange, self._unended = self._unended, None
            self._is_held = False
            self._end(exchange)
        elif self._is_held:
            self._is_held = False
            self.on_response_complete()

    def close(self) -> None:
        """Close the connection; the client has only some time to read the rest."""
        if self._unended is not None:
            self._unended.keep_alive = False
            return
        self.transport.close()
        self._writer.watch_rest()

    def shed(self) -> None:
        """Close the connection at once: its place is needed."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was idle for too long."""
        if not self.transport.is_closing():
            self.close()

    def _end(self, exchange: Exchange) -> None:
        """Go on after an answer is written."""
        if not exchange.keep_alive:
            self._leave(is_more_to_come=self._ignores_input or not exchange.is_complete)
        elif self.flow.write_paused:  # no more calls until it reads its answers
            self._hold()
        elif self.pipeline:  # soon, not now: a thousand refusals in a row must not nest
            self.loop.call_soon(self.on_response_complete)
        elif self.flow.read_paused or self.transport.is_closing():
            self.on_response_complete()
        else:
            self.server_state.total_requests += 1
            self._be_idle()

    def _hold(self) -> None:
        """Read no more calls until the client has read its answers."""
        self._is_held = True
        if not self.transport.is_closing():
            self.flow.pause_reading()

    def _leave(self, *, is_more_to_come: bool) -> None:
        """Close the connection; a client that is still sending first gets time to read."""
        if not is_more_to_come:
            self.close()
        elif self._lingering is None and not self.transport.is_closing():
            self._ignores_input = True
            self._clear_line()
            self.flow.resume_reading()
            if self.transport.can_write_eof():  # not under TLS: there the client ends it
                with contextlib.suppress(OSError):  # asyncio's, if the client has just hung up
                    self.transport.write_eof()
            self._lingering = Lingering(self.close)

    def _refuse(self, error: ServiceError) -> None:
        """Refuse a head once the calls before it are answered, and drop everything after it."""
        self._ignores_input = True
        self._is_in_head = False
        self._end_head()
        path = self.url[:MAX_URL_BYTES].partition(b"?")[0].decode("ascii", "replace")
        exchange = Exchange.open(self, self.predict, "-", path, b"", self.headers)
        exchange.call.choose(None)
        exchange.fail(error)
        self._start_or_queue(exchange)

    def _start_or_queue(self, exchange: Exchange) -> None:
        """Start a call, or put it behind those that came before it."""
        before = self.cycle
        self.cycle = exchange
        if (before is None or before.response_complete) and not self._is_held:
            self._active = exchange
            exchange.start()
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((exchange, self.app))  # type: ignore[arg-type]  # as above

    def _take_back(self, cycle: RequestResponseCycle) -> None:
        """Stop uvicorn from answering a call; something else is answered in its place."""
        if self.pipeline and self.pipeline[0][0] is cycle:
            self.pipeline.popleft()
            return
        cycle.disconnected = cycle.response_complete = True
        cycle.message_event.set()

    def _hand_on(self) -> None:
        """Have the application answer the newest call, by way of uvicorn."""
        self._find_addresses()
        url, headers, expect = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expect
        self.headers.extend(headers)  # the scope holds this list
        if self._is_held and self.is_idle:
            self.cycle = _UNREAD  # uvicorn checks whether it is complete
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Start a call that the application answers; its connection ends like any other."""
        cycle.transport = SimpleNamespace(  # all that uvicorn's cycle uses of it
            write=self.transport.write,
            is_closing=self.transport.is_closing,
            close=lambda: self._leave(is_more_to_come=cycle.more_body),
        )

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            async def send_on(message: Any) -> None:
                if cycle.more_body and not cycle.response_started and _leaves_body(cycle):
                    cycle.keep_alive = False
                await send(message)

            await app(scope, receive, send_on)

        super()._start_asgi_task(cycle, self._writer.in_pieces(answer))

    def _clear_line(self) -> None:
        self.pipeline.clear()
        self._end_line()

    def _end_head(self) -> None:
        """Stop counting a head: it is whole, or nobody waits for it."""
        if self._incoming is not None:
            self._incoming.end_head()

    def _end_line(self) -> None:
        """Stop counting calls in line: none waits any more."""
        if self._incoming is not None:
            self._incoming.end_line()

    def _find_addresses(self) -> None:
        """Find both ends' addresses, for a call that uvicorn answers or that memory is kept for."""
        if self.scheme is None:
            transport = self.transport
            self.server, self.client = get_local_addr(transport), get_remote_addr(transport)
            self.scheme = "https" if is_ssl(transport) else "http"

    def _turn_away(self) -> None:
        """Refuse the client: there are too many connections."""
        error = UnavailableError("there are too many connections", retry_after_s=1)
        status, lines, body = refusal_of(begin_call("-", "/", b"", ()), error)
        self._take_default_headers()
        self.transport.write(
            b"%b%b%b%b%b" % (STATUS_LINE[status], self._default_head, lines, _CLOSE_AND_END, body)
        )
        self._ignores_input = True
        self.close()

    def _be_idle(self) -> None:
        """Set one timer per connection, which looks when it fires, rather than one per call."""
        self.idle_since = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._check_idle)

    def _check_idle(self) -> None:
        self._idle_timer = None
        if not self.is_idle or self._is_in_head:
            return  # the call's end sets the timer again; heads have their own
        left_s = self.idle_since + self.timeout_keep_alive - self.loop.time()
        if left_s <= 0:
            self.timeout_keep_alive_handler()
        else:
            self._idle_timer = self.loop.call_later(left_s, self._check_idle)


def _leaves_body(cycle: RequestResponseCycle) -> bool:
    """Return what `Exchange.leaves_body` says, for an incomplete call to the application."""
    return cycle.waiting_for_100_continue or is_long(dict(cycle.scope["headers"]))


class BodyConnection(HttpConnection):
    """The body that comes: it is counted and timed, and a large one may go into the arena."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_body = False
        self._num_body_bytes = 0
        """Bytes that have come of the newest body."""
        self._is_job = False
        """The newest body is that of a job, which goes to a disk."""
        self._num_missing = 0
        """Missing bytes of the body of a call with a known head."""
        self._body_timer: BodyTimer | None = None
        """Times bodies that come in pieces, once there is one."""
        self._slot_reader: SlotReader | None = None
        """Reads large bodies into the arena, once there is one."""

    def connection_lost(self, exc: Exception | None) -> None:
        """End: the client hung up, or the connection was closed."""
        self._end_body()
        super().connection_lost(exc)
        # They refer to the connection.
        self._incoming = self._body_timer = self._slot_reader = None

    def _take_piece(self, data: bytes) -> None:
        """Pass on a piece of a body of known length, which needs no parser."""
        # A view takes five times the memory of a byte, and some clients send single bytes.
        piece = data if len(data) <= self._num_missing else memoryview(data)[: self._num_missing]
        exchange: Exchange = self.cycle
        if not exchange.response_complete:
            exchange.feed(piece)
        self._count_piece(exchange, len(piece))
        if len(piece) < len(data) and not self.transport.is_closing():
            self.data_received(data[len(piece) :])

    def _count_piece(self, exchange: Exchange, num_bytes: int) -> None:
        """Count a piece of a body of known length, which the exchange has already."""
        self._num_missing -= num_bytes
        self._num_body_bytes += num_bytes
        if self._num_missing:
            if not exchange.response_complete:
                exchange.count()
            return
        self._end_body()
        if not exchange.response_complete:
            exchange.complete()

    def _slot_reader_for(self, known: KnownHead) -> SlotReader | None:
        """Return what reads bodies with a known head, if they are large payloads as they come."""
        if known.num_body_bytes < MIN_SLOT_BYTES or known.call.form is None:
            return None
        if self._slot_reader is None and self.predict.slots is not None and self.handshake is None:
            self._slot_reader = SlotReader(self, self.transport, self._count_piece)
        return self._slot_reader

    def _watch_if_missing(self, exchange: Exchange) -> None:
        if self._is_in_body and self.cycle is exchange:
            self._watch_body()

    def _watch_body(self) -> None:
        """Count a body that did not come with its head, and time it.

        Every body is timed, even if uvicorn answers its call or the call has its answer already.
        """
        cycle: Cycle = self.cycle
        deadline = inf if self._is_job else self.loop.time() + self.predict.limits.max_timeout_s
        if isinstance(cycle, Exchange) and not cycle.response_complete:
            if not cycle.is_started:
                return
            cycle.count()
            deadline = cycle.call.ref.deadline
        if self._ignores_input:
            return
        if self._body_timer is None:
            limits, flow = self.predict.limits, self.flow
            self._body_timer = BodyTimer(
                limits, lambda: self._num_body_bytes, self._on_garbage, lambda: flow.read_paused
            )
        self._body_timer.start(deadline)

    def _end_body(self) -> None:
        """Stop timing: the body of the newest request has arrived, or nobody waits for it."""
        self._is_in_body = False
        if self._body_timer is not None and self._body_timer.is_on:
            self._body_timer.stop()

    def _on_garbage(self, error: ServiceError) -> None:
        """End a body that cannot be read."""
        raise NotImplementedError


class PredictProtocol(BodyConnection):
    """uvicorn's protocol with the calls to `/predict` taken out. Bind it with `bound_to`."""

    known_heads: KnownHeads

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_read = 0
        """Bytes of the newest data."""
        self._is_behind_others = False
        """The newest data has other bytes before the head that begins next."""
        self._head_has_others_before = False
        """The newest head began in the newest data, behind other bytes."""
        self._asks_for_upgrade = False
        self._chunk_limits: ChunkLimits | None = None
        """Counts the newest message, if its body is chunked."""
        self._last_head: KnownHead | None = None
        self._new_head = b""
        """Raw head of the first request in the newest data; empty once a second one began."""

    @classmethod
    def bound_to(
        cls, predict: Predict, limits: EdgeLimits | None = None, unread: HeldBytes | None = None
    ) -> type["PredictProtocol"]:
        """Return the class for one endpoint, for `uvicorn.Config(http=...)`."""
        shared = ConnectionLimits(limits or EdgeLimits(), predict.unfinished, unread)
        predict.unread = shared.unread
        bound = {"predict": predict, "connection_limits": shared, "known_heads": KnownHeads()}
        return type(cls.__name__, (cls,), bound)

    def shutdown(self) -> None:
        """Refuse half a request, since the server stops; whole ones are still answered."""
        if self._active is not None:
            self._active.give_up_body()
        elif self._is_in_body and not self.is_idle:
            self._on_garbage(UnavailableError("this server is shutting down", retry_after_s=1))
        if self._unended is not None:
            self.close()
        else:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        """Feed the parser, or read the body of a call with a known head."""
        if self._ignores_input:
            if self._lingering is not None:
                self._lingering.take(len(data))
            return
        cycle = self.cycle
        if (cycle is None or cycle.response_complete) and not (
            self._is_in_head or self._is_in_body or self._is_held
        ):
            known = self._last_head
            if known is None or not data.startswith(known.head):
                end = data.find(HEAD_END, 0, MAX_KNOWN_HEAD_BYTES) + len(HEAD_END)
                self._new_head = data[:end]
                known = self.known_heads.get(self._new_head)
            if known is not None and self._take_known(known, data):
                return
        elif self._num_missing:
            self._take_piece(data)
            return
        self._num_read = len(data)
        self._is_behind_others, self._head_has_others_before = self._is_in_body, False
        chunk_limits = self._chunk_limits
        try:
            rest: bytes | memoryview = data
            while rest:
                rest = self._feed(rest)
            if chunk_limits is not None and chunk_limits is self._chunk_limits:
                chunk_limits.take_read(len(data))
        except httptools.HttpParserError as error:  # no HTTP, or we failed on it
            if not self._ignores_input:
                self._on_garbage(error_of(error))
            return
        except ServiceError as error:
            self._on_garbage(error)
            return
        if self._is_in_body:
            self._watch_body()
        if self.pipeline:
            self._limit().take_line(len(self.pipeline), len(data))
        if self._is_in_head:
            # Behind other bytes, we only know that the head has begun.
            self._limit().take_head(1 if self._head_has_others_before else len(data))

    def on_message_begin(self) -> None:
        """Begin a request; uvicorn's scope is made only if it is needed.

        Raises:
            EOFError: Stops the parser, since everything more is dropped.
        """
        if self._ignores_input:
            raise EOFError
        self._is_in_head = True
        self._head_has_others_before = self._is_behind_others
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header, or drop a trailer: nothing here reads those.

        Raises:
            LargeHeadError: There are too many, or too long ones. It stops the parser at once.
        """
        if not self._is_in_head:
            if self._chunk_limits is not None:
                self._chunk_limits.take_trailer(len(name) + len(value))
            return
        if len(self.headers) >= MAX_HEADERS:
            raise LargeHeadError(f"there are more than {MAX_HEADERS} headers")
        name, value = name.lower(), value.rstrip(b" \t")  # the parser strips its beginning
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Begin the call here, or hand it to uvicorn."""
        self._is_in_head = False
        self._num_body_bytes = 0
        self._is_behind_others = True
        head, self._new_head = self._new_head, b""
        url, is_long = self.url, self._num_read > MAX_HEAD_BYTES
        if self._incoming is not None and self._incoming.num_head_bytes:
            is_long = True
            self._end_head()
        if len(self.pipeline) >= MAX_PIPELINED:
            # The newest call that was taken is the last one.
            self._ignores_input, self.pipeline[0][0].keep_alive = True, False
            return
        names = [name for name, _ in self.headers]
        self._chunk_limits = ChunkLimits() if b"transfer-encoding" in names else None
        parser = self.parser
        is_old = parser.get_http_version() == "1.0"
        num_hosts = names.count(b"host")
        if is_long or num_hosts != 1 or len(url) > MAX_URL_BYTES:
            try:
                check_head(url, self.headers, num_hosts, is_old=is_old)
            except ServiceError as error:
                self._refuse(error)
                return
        if parser.should_upgrade():
            self._asks_for_upgrade = True
            return
        self._is_in_body = True
        if self.predict.root_path:
            self.url = url = below(self.predict.root_path, url)
        path, query = target_of(url)
        takes = path == PREFIX or self.predict.takes(path)
        self._is_job = (not takes or b"prefer" in names) and is_job(
            path, self.headers, self.predict.own
        )
        if self._is_job or not takes:
            length = dict(self.headers).get(b"content-length", b"0")
            try:
                self.predict.limits.check_length(length, of_job=self._is_job)
            except ServiceError as error:
                self._refuse(error)
            else:
                self._hand_on()
            return
        method = parser.get_method().decode("ascii")
        exchange = Exchange.open(self, self.predict, method, path, query, self.headers)
        exchange.keep_alive = not is_old and parser.should_keep_alive()
        exchange.expects_continue = self.expect_100_continue
        exchange.call.is_old = is_old
        self._start_or_queue(exchange)
        if self._active is exchange and not exchange.response_complete:
            self.known_heads.remember(head, exchange.call, exchange.keep_alive)

    def on_body(self, body: bytes) -> None:
        """Pass on a piece of the newest request's body.

        Raises:
            BadRequestError: It has too many chunks. It stops the parser at once.
            TooLargeError: It has too many bytes. It stops the parser too.
            EOFError: Stops the parser, since everything more is dropped.
        """
        if self._ignores_input:
            raise EOFError
        if self._chunk_limits is not None:
            self._chunk_limits.take_chunk(len(body))
        self._num_body_bytes += len(body)
        cycle: Cycle = self.cycle
        if not isinstance(cycle, Exchange):
            limits = self.predict.limits
            if self._num_body_bytes > limits.most_bytes(of_job=self._is_job):
                raise limits.too_large(of_job=self._is_job)
            super().on_body(body)
        elif not cycle.response_complete:
            cycle.feed(body)

    def on_message_complete(self) -> None:
        """End the newest request."""
        if self._asks_for_upgrade or self._ignores_input:
            return
        self._end_body()
        self._chunk_limits = None
        cycle: Cycle = self.cycle
        if not isinstance(cycle, Exchange):
            super().on_message_complete()
        elif not cycle.response_complete:
            cycle.complete()

    def _take_known(self, known: KnownHead, data: bytes) -> bool:
        """Begin a call with a known head; return False if the parser must read what follows."""
        self._last_head = known
        earlier, length = known.call, len(known.head)
        num_missing = length + known.num_body_bytes - len(data)
        if num_missing < 0:
            self._new_head = known.head
            return False
        self._new_head = b""
        self.cycle = self._active = exchange = Exchange.from_known_head(self, self.predict, earlier)
        exchange.keep_alive = known.keep_alive
        body = data[length:] if earlier.form is None else memoryview(data)[length:]
        if not num_missing:
            exchange.take(body)
            if (reader := self._slot_reader_for(known)) is not None:
                reader.start()  # the next one is as large
            return True
        self._num_missing = num_missing
        self._num_body_bytes = len(body)
        self._is_in_body = True
        reader = self._slot_reader_for(known)
        if reader is not None and reader.open(exchange, known.num_body_bytes, body):
            self.loop.call_soon(self._watch_if_missing, exchange)  # mostly nothing is by then
            return True
        exchange.feed(body)
        self._watch_body()
        return True

    def _feed(self, data: bytes | memoryview) -> bytes | memoryview:
        """Feed the parser, and return what it has left."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._ignores_input:
                return b""
            self._read_again_without_upgrade()
            return memoryview(data)[upgrade.args[0] :]
        return b""

    def _read_again_without_upgrade(self) -> None:
        """Read the head again as if it did not ask for another protocol (RFC 9110, 7.8)."""
        self._asks_for_upgrade = False
        if self.parser.get_method() == b"CONNECT":  # it is nothing but an upgrade
            self._refuse(BadRequestError("CONNECT is not served here"))
            return
        head = head_without_upgrade(self.parser, self.url, self.headers)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(head)

    def _limit(self) -> IncomingLimits:
        """Begin to bound what comes, if that has not begun."""
        if self._incoming is None:
            self._incoming = IncomingLimits(
                self.flow,
                self.predict.unfinished,
                self.connection_limits.limits.head_timeout_s,
                refuse=self._refuse,
                clear_line=self._clear_line,
                on_late=lambda: self.close() if self._is_in_head else None,
                owner=self._owner,
            )
        return self._incoming

    def _on_garbage(self, error: ServiceError) -> None:
        if not self._is_in_body:
            if not self._is_in_head:
                self.url, self.headers = b"", []
            self._refuse(error)
            return
        self._ignores_input = True
        cycle: Cycle = self.cycle
        if isinstance(cycle, Exchange) and not cycle.response_complete:
            cycle.fail(error)
        elif isinstance(cycle, Exchange) or cycle.response_complete:
            self._leave(is_more_to_come=True)
        elif cycle.response_started:
            self.close()
        else:
            self._take_back(cycle)
            self._refuse(error)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Start a pipelined call of either kind."""
        if not self.pipeline:
            self._end_line()
        if isinstance(cycle, Exchange):
            self._active = cycle
            cycle.start()
            newest: Any = self.cycle
            if self._is_in_body and cycle is newest:
                self._watch_body()
        else:
            super()._start_asgi_task(cycle, app)


def below(root_path: bytes, url: bytes) -> bytes:
    """Return a URL without a path before ours, which a proxy may have left there.

    Raises:
        HttpParserError: It is no URL.
    """
    if not url.startswith(b"/"):
        parsed = httptools.parse_url(url)
        url = (parsed.path or b"/") + (b"?" + parsed.query if parsed.query else b"")
    path, mark, query = url.partition(b"?")
    if path == root_path:
        return b"/" + mark + query
    return url[len(root_path) :] if path.startswith(root_path + b"/") else url


def target_of(url: bytes) -> tuple[str, bytes]:
    """Split a URL into its decoded path and its query, like uvicorn.

    Raises:
        HttpParserError: It is no URL.
        UnicodeDecodeError: It has characters that a URL has not.
    """
    if not url.startswith(b"/") or b"%" in url or b"#" in url:
        parsed = httptools.parse_url(url)
        return unquote((parsed.path or b"").decode("ascii")), parsed.query or b""
    path, _, query = url.partition(b"?")
    return path.decode("ascii"), query
