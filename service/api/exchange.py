"""One call to `/predict` on a connection, from its head to the answer on the socket."""

from asyncio import Future
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from service.api.body import add_piece
from service.api.call import Call
from service.api.predict import Predict
from service.api.replies import CLOSE_LINE, refusal_of, reply_to
from service.errors import OverloadedError, ServiceError, TooLargeError, UnavailableError
from service.request import Buffer

if TYPE_CHECKING:
    from service.api.protocol import PredictProtocol

_CLIENT_GONE = 499
_COPIED_BODY_BYTES = 64 * 1024
"""Up to this, head and body go out as one piece of bytes."""
_CLOSE_AND_END = CLOSE_LINE + b"\r\n"
_OK = 200


class _NoEvent:
    """What uvicorn wakes its ASGI calls by; ours wait for nothing."""

    def set(self) -> None:
        return


class Exchange(msgspec.Struct, eq=False):
    """One call to `/predict` on a connection, in the place of uvicorn's RequestResponseCycle.

    A struct, because that fills its defaults in C.
    """

    _protocol: "PredictProtocol"
    _predict: Predict
    call: Call
    keep_alive: bool
    is_complete: bool = False
    """The whole call has arrived."""
    expects_continue: bool = False
    disconnected: bool = False
    response_complete: bool = False
    _refusal: ServiceError | None = None
    _chunks: list[Buffer] = []
    _num_bytes: int = 0
    _is_counted: bool = False
    """`UnfinishedRequests` counts these."""
    is_started: bool = False

    message_event: ClassVar = _NoEvent()

    def start(self) -> None:
        """It is this call's turn to be answered."""
        self.is_started = True
        if self._refusal is not None:
            self._refuse(self._refusal)
            return
        try:
            self._predict.check(self.call)
            self._check_size()
        except Exception as error:
            self._refuse(error)
            return
        if self.expects_continue and not self.is_complete:
            self._protocol.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self.is_complete:
            self._submit(self._chunks or (b"",))

    def begin(self, piece: Buffer) -> None:
        """Begin a call that was checked, with the first piece of its body."""
        self.is_started = True
        self._chunks.append(piece)
        self._num_bytes = len(piece)
        self.count()

    def take(self, body: Buffer) -> None:
        """Submit a call that was checked and is all there."""
        self.is_started = self.is_complete = True
        self._submit((body,))

    def feed(self, chunk: Buffer) -> None:
        """Take a piece of the body."""
        if self._refusal is not None:
            return
        add_piece(self._chunks, chunk)
        self._num_bytes += len(chunk)
        if self.is_started:
            try:
                self._check_size()
            except TooLargeError as error:
                self._refuse(error)

    def complete(self) -> None:
        """The body has arrived."""
        self.is_complete = True
        if self.is_started:
            self._submit(self._chunks or (b"",))

    def count(self) -> None:
        """Count what has come of a body that is not whole."""
        if self._num_bytes and self._refusal is None:
            try:
                self._predict.unfinished.hold(self, self._num_bytes)
            except OverloadedError as error:
                self.fail(error)
            else:
                self._is_counted = True

    def let_go(self) -> None:
        """Drop the body."""
        self._chunks = []
        if self._is_counted:
            self._is_counted = False
            self._predict.unfinished.give_back(self)

    def give_way(self, error: ServiceError) -> None:
        """Refuse the call, since its body came more slowly than those that need the room."""
        self.fail(error)

    def fail(self, error: ServiceError) -> None:
        """What arrives is no body: refuse the call, when it is its turn."""
        self.keep_alive = False
        self._refusal = error
        self.let_go()
        if self.is_started and not self.response_complete:
            self._refuse(error)

    def give_up_body(self) -> None:
        """Answer now, if the body has not arrived: it is not waited for any longer."""
        if not self.is_complete and not self.response_complete:
            self.keep_alive = False
            self._refuse(UnavailableError("this server is shutting down", retry_after_s=1))

    def abandon(self) -> None:
        """The client is gone."""
        self.let_go()
        if not self.response_complete:
            self.response_complete = True
            self._predict.abandon(self.call)
            self._predict.close(self.call, _CLIENT_GONE)

    def _check_size(self) -> None:
        max_bytes = self._predict.limits.max_body_bytes
        if self._num_bytes > max_bytes:
            raise self._predict.too_large()

    def _submit(self, chunks: Sequence[Buffer]) -> None:
        try:
            future = self._predict.submit(self.call, chunks)
        except Exception as error:
            self._refuse(error)
            return
        self.let_go()
        future.add_done_callback(self._on_done)

    def _on_done(self, future: Future[Any]) -> None:
        if self.response_complete:
            return
        try:
            reply = reply_to(self.call)
        except Exception as error:
            self._refuse(error)
            return
        self._write(*reply)

    def _refuse(self, error: Exception) -> None:
        self._predict.abandon(self.call)
        self.let_go()
        self._write(*refusal_of(self.call, error))

    def _write(self, status: int, lines: bytes, body: bytes) -> None:
        protocol = self._protocol
        self.response_complete = True
        if protocol.transport.is_closing():
            self._predict.close(self.call, _CLIENT_GONE)
            return
        end = b"\r\n"
        if protocol.default_head_closes or (status != _OK and CLOSE_LINE in lines):
            self.keep_alive = False
        elif not self.keep_alive:
            end = _CLOSE_AND_END
        head = b"%b%b%b%b" % (STATUS_LINE[status], protocol.default_head(), lines, end)
        if len(body) <= _COPIED_BODY_BYTES:
            protocol.transport.write(head + body)
        else:
            protocol.send(head, body)
        self._predict.close(self.call, status)
        protocol.on_exchange_complete(self)
