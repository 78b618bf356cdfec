"""`/predict` straight off the socket: a uvicorn protocol class that needs no ASGI for it.

It reads calls for `Exchange`, and is its wire: a call costs no task, no scope, no events, and one
write. Calls to other paths go to the application, as in uvicorn. For all of them, the cost of a
connection is bounded by `IncomingLimits` (heads, and calls in line), `BodyTimer`, `AnswerWriter`
(answers that nobody reads) and `ConnectionLimits` (the number of connections).
"""

from math import inf
from typing import Any

import httptools

from inferpool.service.api.codecs.body import BodyTimer
from inferpool.service.api.errors import LargeHeadError
from inferpool.service.api.exchange import (
    HEAD_END,
    MAX_KNOWN_HEAD_BYTES,
    PREFIX,
    Exchange,
    KnownHead,
    KnownHeads,
    Predict,
    is_job,
    is_predict,
)
from inferpool.service.api.wire.budgets import EdgeLimits
from inferpool.service.api.wire.connection import Cycle, HttpConnection
from inferpool.service.api.wire.held import HeldBytes
from inferpool.service.api.wire.incoming import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    MAX_URL_BYTES,
    ChunkLimits,
    IncomingLimits,
    below,
    check_head,
    error_of,
    head_without_upgrade,
    target_of,
)
from inferpool.service.api.wire.places import ConnectionLimits
from inferpool.service.errors import BadRequestError, ServiceError, UnavailableError


class PredictProtocol(HttpConnection):
    """uvicorn's protocol with the calls to `/predict` taken out. Bind it with `bound_to`."""

    known_heads: KnownHeads

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_body = False
        self._num_body_bytes = 0
        """Bytes that have come of the newest body."""
        self._is_job = False
        """The newest body is that of a job, which goes to a disk."""
        self._num_missing = 0
        """Missing bytes of the body of a call with a known head."""
        self._num_read = 0
        """Bytes of the newest data."""
        self._is_behind_others = False
        """The newest data has other bytes before the head that begins next."""
        self._head_has_others_before = False
        """The newest head began in the newest data, behind other bytes."""
        self._asks_for_upgrade = False
        self._chunk_limits: ChunkLimits | None = None
        """Counts the newest message, if its body is chunked."""
        self._body_timer: BodyTimer | None = None
        """Times bodies that come in pieces, once there is one."""
        self._last_head: KnownHead | None = None
        self._new_head = b""
        """Raw head of the first request in the newest data; empty once a second one began."""

    @classmethod
    def bound_to(
        cls, predict: Predict, limits: EdgeLimits | None = None, unread: HeldBytes | None = None
    ) -> type["PredictProtocol"]:
        """Return the class for one endpoint, for `uvicorn.Config(http=...)`."""
        shared = ConnectionLimits(limits or EdgeLimits(), predict.unfinished, unread)
        bound = {"predict": predict, "connection_limits": shared, "known_heads": KnownHeads()}
        return type(cls.__name__, (cls,), bound)

    def connection_lost(self, exc: Exception | None) -> None:
        """End: the client hung up, or the connection was closed."""
        self._end_body()
        super().connection_lost(exc)
        self._incoming = self._body_timer = None  # they refer to the connection

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
        self._is_job = (path != PREFIX or b"prefer" in names) and is_job(path, self.headers)
        if self._is_job or (path != PREFIX and not is_predict(path)):
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
        self._take_turn(exchange)
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
        if num_missing < 0 or (num_missing and earlier.form is None):
            self._new_head = known.head
            return False
        self._new_head = b""
        self.cycle = self._active = exchange = Exchange.from_known_head(self, self.predict, earlier)
        exchange.keep_alive = known.keep_alive
        body = data[length:] if earlier.form is None else memoryview(data)[length:]
        if not num_missing:
            exchange.take(body)
            return True
        self._num_missing = num_missing
        self._num_body_bytes = len(body)
        self._is_in_body = True
        exchange.feed(body)
        self._watch_body()
        return True

    def _take_piece(self, data: bytes) -> None:
        """Pass on a piece of a body of known length, which needs no parser."""
        # A view takes five times the memory of a byte, and some clients send single bytes.
        piece = data if len(data) <= self._num_missing else memoryview(data)[: self._num_missing]
        self._num_missing -= len(piece)
        self._num_body_bytes += len(piece)
        exchange: Exchange = self.cycle
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
