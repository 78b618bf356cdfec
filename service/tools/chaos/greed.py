"""Clients that take more than their share for a while, beside the clients that are counted."""

import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from inferpool.service.tools.chaos.load import ChaosTally, NumberedLoad
from inferpool.service.tools.chaos.protocols import Open
from inferpool.service.tools.chaos.questions import Question
from inferpool.service.tools.chaos.stores import StoreFaults
from inferpool.service.tools.trial.connection import Address, NoAnswerError, connect

_MORE = 8
"""Number of greedy clients for each client that counts."""
_GREEDY_S = 3.0
_FIRST = 10**12
_NUM_REQUESTS = 500
"""Requests that each of them sends at once. None is for a prediction, so no instance is counted."""
_REQUEST = b"GET / HTTP/1.1\r\nHost: inferpool\r\n\r\n"
_RECEIVE_BYTES = 4096
_OTHER_PEER = "127.0.0.2"
"""Their address: the service may limit the open connections of one address."""
_NUM_BYTES = 10_000_000
"""Announced length of each upload; only its first lines are sent."""


@dataclass(slots=True, kw_only=True)
class Greed:
    """Asks with another key than the watched clients. Lives in the event loop."""

    address: Address
    questions: Sequence[Question]
    key: str
    """Empty if nobody is greedy."""
    num_clients: int
    """Clients that are watched."""
    timeout_s: float
    open: Open = connect
    tally: ChaosTally = field(default_factory=ChaosTally)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(_FIRST))

    async def ask(self) -> None:
        """Ask for a while, in many connections."""
        until = time.monotonic() + _GREEDY_S
        load = NumberedLoad(
            address=self.address,
            questions=self.questions,
            tally=self.tally,
            timeout_s=self.timeout_s,
            is_over=lambda: time.monotonic() > until,
            key=self.key,
            open=self.open,
        )
        try:
            await load.run(self._numbers, _MORE * self.num_clients)
        except* OSError as error:
            self.tally.lost += self.tally.num_sent - self.tally.num_settled
            self.tally.note(f"a greedy client has no connection: {error.exceptions[0]}")


@dataclass(slots=True, kw_only=True)
class UnreadConnections:
    """Opens connections that read nothing. Lives in the event loop."""

    address: Address
    num_connections: int = 24
    held_s: float = 3.0

    async def open(self) -> None:
        """Hold connections for a while, each as full of answers as the service allows."""
        asked = [asyncio.create_task(self._hold()) for _ in range(self.num_connections)]
        await asyncio.gather(*asked)

    async def _hold(self) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as unread:
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
            unread.setblocking(False)
            # It waits for room, as it should, or the service refuses or ends it.
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(self.held_s):
                    unread.bind((_OTHER_PEER, 0))
                    await loop.sock_connect(unread, self.address)
                    await loop.sock_sendall(unread, _REQUEST * _NUM_REQUESTS)
                    await asyncio.sleep(self.held_s)


@dataclass(slots=True, kw_only=True)
class SlowUploads:
    """Holds uploads open. Lives in the event loop."""

    address: Address
    stores: StoreFaults
    """Makes the job of the first key, and records broken promises."""
    key: str
    """The second key."""
    num_uploads: int = 64

    async def hold(self) -> None:
        """Begin uploads, have a job of the first key computed meanwhile, and hang up."""
        with contextlib.ExitStack() as stack:
            begun = [stack.enter_context(socket.socket()) for _ in range(self.num_uploads)]
            await asyncio.gather(*map(self._begin, begun))
            try:
                made = await self.stores.submit()
                if made.status == 202:
                    await self.stores.compute(made)
                    return
                text = f"{made.status} {made.body[:200]!r}"
            except (OSError, NoAnswerError) as error:
                text = str(error)
            self.stores.failed.append(f"no job was made beside slow uploads of another key: {text}")

    async def _begin(self, upload: socket.socket) -> None:
        head = (
            f"POST /jobs HTTP/1.1\r\nHost: inferpool\r\nX-API-Key: {self.key}\r\n"
            f"Content-Type: application/jsonl\r\nContent-Length: {_NUM_BYTES}\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        upload.setblocking(False)
        with contextlib.suppress(OSError):  # it was refused, as it may be
            upload.bind((_OTHER_PEER, 0))
            await loop.sock_connect(upload, self.address)
            await loop.sock_sendall(upload, head.encode("latin-1") + b'"one"\n' * 100)
