"""The way of a batch alone, between two processes that do nothing else, in clear text or over TLS.

The other process imports this file, which imports no torch.
"""

import asyncio
import multiprocessing
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop

from inferpool.workers.remote.joining import secured
from inferpool.workers.remote.link import HostLink
from inferpool.workers.remote.wire import BatchOutcomes, RunBatch, ToAgent, ToFrontEnd
from inferpool.workers.shared.messages import BatchDone, ItemRef
from tests.bench.server import HOST
from tests.certificates import make_certificate

NUM_ITEMS, ITEM_BYTES = 8, 100 << 10
_PLACES = range(0, NUM_ITEMS * ITEM_BYTES, ITEM_BYTES)


def go_the_way(name: str, num: int) -> dict[str, float]:
    """Send batches to a process that takes them and answers; return what one costs."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server((HOST, 0)) as listener:
        files = make_certificate(Path(folder)) if name == "tls" else ()
        process = multiprocessing.get_context("spawn").Process(
            target=_take_batches, args=(listener.getsockname()[1], files), daemon=True
        )
        process.start()
        cpu_s, wall_s = uvloop.run(_send_batches(listener, files, num))
        process.join(10)
    return {"front_cpu_us": cpu_s / num * 1e6, "wall_us": wall_s / num * 1e6}


class _End:
    """One end of the way: its memory has room for a batch."""

    def __init__(self, on_message: Callable[["_End"], None]) -> None:
        self.link: Any = None
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        memory = memoryview(bytearray(range(256)) * (NUM_ITEMS * ITEM_BYTES // 256))
        self.parts = [memory[place : place + ITEM_BYTES] for place in _PLACES]
        self._on_message = on_message

    def room_for(self, _: object, num_bytes: int) -> Sequence[memoryview]:
        return self.parts[: -(-num_bytes // ITEM_BYTES)]

    def on_message(self, *_: object) -> None:
        self._on_message(self)

    def on_closed(self, reason: str) -> None:
        self.over.set_result(reason)

    async def open(
        self, sock: socket.socket, messages: Any, files: Sequence[Path], host: str
    ) -> None:
        """Open it on a socket; `host` is the name of the front end, for an agent."""
        context = None
        if files:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if host else ssl.PROTOCOL_TLS_SERVER)
            certificate, key = files
            context.load_cert_chain(certificate, key)
            context.load_verify_locations(certificate)
            context.verify_mode = ssl.CERT_REQUIRED
        sock = await secured(sock, context, host or None)
        self.link = HostLink(sock, messages, self, max_body_bytes=1 << 30)


async def _send_batches(
    listener: socket.socket, files: Sequence[Path], num: int
) -> tuple[float, float]:
    """Be the front end; return the CPU seconds of this process, and the seconds that passed."""
    numbers = iter(range(num))

    def send_next(end: _End) -> None:
        if (number := next(numbers, None)) is None:
            end.link.close()
            return
        now = time.monotonic()
        items = [ItemRef("image", place, ITEM_BYTES, now, request_id="1") for place in _PLACES]
        end.link.send(RunBatch(1, number, now, items), end.parts)

    listener.setblocking(False)
    sock, _ = await asyncio.get_running_loop().sock_accept(listener)
    end = _End(send_next)
    await end.open(sock, ToFrontEnd, files, "")
    began, cpu_s = time.perf_counter(), time.process_time()
    send_next(end)
    await end.over
    return time.process_time() - cpu_s, time.perf_counter() - began


def _take_batches(port: int, files: Sequence[Path]) -> None:
    """Be the agent."""

    def answer(end: _End) -> None:
        done = BatchDone(1, [b'{"label": "cat"}'] * NUM_ITEMS, 0.0, 0.0)
        end.link.send(BatchOutcomes(1, done))

    async def take() -> None:
        sock = socket.create_connection((HOST, port))
        sock.setblocking(False)
        end = _End(answer)
        await end.open(sock, ToAgent, files, HOST)
        await end.over

    uvloop.run(take())
