"""A connection's answers, waits and end. Event loop."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl
from uvicorn.server import ServerState

from inferpool.service.api.exchange import (
    CLOSE_LINE,
    Call,
    Exchange,
    Predict,
    Reply,
    begin_call,
    is_long,
    refusal_of,
)
from inferpool.service.api.wire.incoming import (
    MAX_URL_BYTES,
    IncomingLimits,
    Lingering,
    QueueAwareFlow,
)
from inferpool.service.api.wire.places import ConnectionLimits
from inferpool.service.api.wire.writing import AnswerWriter
from inferpool.service.errors import ServiceError, UnavailableError
from inferpool.service.queue.shares import owner_of_address

_COPIED_BODY_BYTES = 64 * 1024
"""Up to this size, head and body are written as one piece."""
_CLOSE_AND_END = CLOSE_LINE + b"\r\n"
_CLIENT_GONE = 499


class _UnreadAnswer:
    """Stands for an answer that is not read yet: the next calls wait for their turn."""

    response_complete = False


UNREAD = _UnreadAnswer()
Cycle: TypeAlias = Exchange | RequestResponseCycle
"""A call: one of ours, or one that uvicorn hands to the application."""


class CycleTransport:
    """The transport as uvicorn's cycle uses it, but for how it is closed."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class HttpConnection(HttpToolsProtocol):
    """uvicorn's protocol as the wire of exchanges; `PredictProtocol` adds what the client sends."""

    predict: Predict
    connection_limits: ConnectionLimits
    flow: QueueAwareFlow

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
        self._default_headers: list[tuple[bytes, bytes]] | None = None
        self._default_head = b""
        self._default_head_closes = False
        self._active: Exchange | None = None
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
        self._unended = None
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
        """Refuse a head when it is its turn, and drop everything after it."""
        self._ignores_input = True
        self._is_in_head = False
        self._end_head()
        path = self.url[:MAX_URL_BYTES].partition(b"?")[0].decode("ascii", "replace")
        exchange = Exchange.open(self, self.predict, "-", path, b"", self.headers)
        exchange.call.choose(None)
        exchange.fail(error)
        self._take_turn(exchange)

    def _take_turn(self, exchange: Exchange) -> None:
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
            self.cycle = UNREAD  # uvicorn checks whether it is complete
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Start a call that the application answers; its connection ends like any other."""
        cycle.transport = CycleTransport(
            self.transport, lambda: self._leave(is_more_to_come=cycle.more_body)
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

    def _take_default_headers(self) -> None:
        """Render the lines that every answer begins with; uvicorn renews them each second."""
        self._default_headers = headers = self.server_state.default_headers
        self._default_head = b"".join([b"%b: %b\r\n" % header for header in headers])
        self._default_head_closes = (b"connection", b"close") in headers

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
