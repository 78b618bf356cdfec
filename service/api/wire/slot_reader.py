"""Reads large bodies from the kernel straight into the arena. Event loop.

A body that is read like any other is copied twice on its way: from the event loop's buffer into
bytes, and from those into the arena.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from inferpool.service.api.exchange import MAX_KNOWN_HEAD_BYTES, Exchange
from inferpool.service.queue.instance import Buffer

MIN_SLOT_BYTES = 256_000
"""The most that uvloop reads at once. A shorter body mostly comes with its head; to read it in two
steps costs as much as the copies (`python -m tests.bench bodies`)."""


class SlotReader(asyncio.BufferedProtocol):
    """Takes the place of a connection at its transport while its bodies are large.

    It reads a head, and no more, which the connection receives as ever. If that call's body gets a
    slot, its rest is read into the slot. If not, the connection reads on itself.
    """

    __slots__ = ("_connection", "_exchange", "_head", "_on_stored", "_transport")

    def __init__(
        self,
        connection: asyncio.Protocol,
        transport: asyncio.Transport,
        on_stored: Callable[[Exchange, int], None],
    ) -> None:
        """Read nothing yet; `on_stored` gets the number of bytes that a slot has received."""
        self._connection = connection
        self._transport = transport
        self._on_stored = on_stored
        self._head = memoryview(bytearray(MAX_KNOWN_HEAD_BYTES))
        """Room for a head and the beginning of its body."""
        self._exchange: Exchange | None = None
        """The newest call whose body got a slot."""

    def open(self, exchange: Exchange, num_bytes: int, piece: Buffer) -> bool:
        """Read a body into the arena as it comes; return False if it gets no slot.

        Args:
            exchange: Its call, whose body as a whole is a payload.
            num_bytes: Its length.
            piece: The beginning, which has come already.
        """
        predict, caller = exchange.predict, exchange.call.ref.caller
        if predict.slots is None:
            return False
        give_up = partial(_keep_elsewhere, exchange)
        slot = predict.slots.open(num_bytes, give_up, caller, predict.unfinished.share)
        if slot is None:
            return False
        exchange.slot = slot
        exchange.num_bytes = len(piece)
        slot.view[: exchange.num_bytes] = piece
        self._exchange = exchange
        self.start()
        return True

    def start(self) -> None:
        """Read what comes next: the rest of a body that has a slot, or a head."""
        if self._transport.get_protocol() is not self:
            self._transport.set_protocol(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the rest of the slot, or room for a head."""
        exchange = self._exchange
        if exchange is None or exchange.slot is None:
            return self._head
        return exchange.slot.view[exchange.num_bytes :]

    def buffer_updated(self, nbytes: int) -> None:
        """Count what has come into the slot, or pass on a head."""
        exchange = self._exchange
        if exchange is not None and exchange.slot is not None:
            exchange.num_bytes += nbytes
            self._on_stored(exchange, nbytes)
            return
        self._exchange = None
        self._connection.data_received(bytes(self._head[:nbytes]))
        if self._exchange is None:
            self._transport.set_protocol(self._connection)

    def eof_received(self) -> bool | None:
        """Pass it on."""
        return self._connection.eof_received()

    def pause_writing(self) -> None:
        """Pass it on."""
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        self._connection.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass it on."""
        self._connection.connection_lost(exc)


def _keep_elsewhere(exchange: Exchange) -> None:
    """Leave the slot; what has come and what is still to come is kept like any other body."""
    slot = exchange.slot
    assert slot is not None
    piece = bytes(slot.view[: exchange.num_bytes])
    slot.close()
    exchange.slot, exchange.num_bytes = None, 0
    exchange.feed(piece)
