"""The steps below the service: plain ASGI, with a queue to a worker or without, in FastAPI or not.

Each step does no more than its name says: no admission, deadlines, metrics, ids, errors or limits.
python -m tests.bench.servers.ladder_server PORT [--queue] [--fastapi]
"""

import argparse
import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory

import msgspec
import uvicorn
from fastapi import FastAPI
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

SLOT_BYTES = 256 * 1024
NUM_SLOTS = 512
MAX_BATCH_SIZE = 64
CREDIT = 2


class Direct:
    """Answers in the process itself."""

    async def answer(self, body: bytes) -> bytes:
        return _rendered(len(body))


class Queue:
    """Answers through a worker: bodies in shared memory, one message per batch and one back."""

    def __init__(self) -> None:
        self._memory = SharedMemory(create=True, size=SLOT_BYTES * NUM_SLOTS)
        self._free = deque(range(NUM_SLOTS))
        self._waiting: deque[tuple[int, int, asyncio.Future[bytes]]] = deque()
        self._held: deque[Sequence[tuple[int, int, asyncio.Future[bytes]]]] = deque()
        self._is_due = False
        context = get_context("spawn")
        far_in, self._sender = context.Pipe(duplex=False)
        self._receiver, far_out = context.Pipe(duplex=False)
        # Not a fork: this process has threads by then, and so has the real service.
        self._worker = context.Process(target=_work, args=(self._memory.name, far_in, far_out))
        self._worker.start()
        far_in.close()
        far_out.close()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._receiver.fileno(), self._on_batch)

    def stop(self) -> None:
        self._loop.remove_reader(self._receiver.fileno())
        self._sender.send_bytes(b"")
        self._worker.join(5)
        self._memory.close()
        self._memory.unlink()

    async def answer(self, body: bytes) -> bytes:
        slot = self._free.popleft()
        start = slot * SLOT_BYTES
        assert self._memory.buf is not None
        self._memory.buf[start : start + len(body)] = body
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._waiting.append((slot, len(body), future))
        if not self._is_due and len(self._held) < CREDIT:
            # Once per turn of the loop, so that what arrives together travels together.
            self._is_due = True
            self._loop.call_soon(self._send)
        return await future

    def _send(self) -> None:
        self._is_due = False
        while self._waiting and len(self._held) < CREDIT:
            num = min(MAX_BATCH_SIZE, len(self._waiting))
            batch = [self._waiting.popleft() for _ in range(num)]
            self._held.append(batch)
            refs = [(slot, num_bytes) for slot, num_bytes, _ in batch]
            self._sender.send_bytes(msgspec.msgpack.encode(refs))

    def _on_batch(self) -> None:
        answers = msgspec.msgpack.decode(self._receiver.recv_bytes(), type=list[bytes])
        for (slot, _, future), answer in zip(self._held.popleft(), answers, strict=True):
            self._free.append(slot)
            if not future.done():
                future.set_result(answer)
        self._send()


def _work(name: str, messages: Connection, answers: Connection) -> None:
    """The worker process."""
    memory = SharedMemory(name=name)
    assert memory.buf is not None
    while message := messages.recv_bytes():
        refs = msgspec.msgpack.decode(message, type=list[tuple[int, int]])
        views = [memory.buf[slot * SLOT_BYTES :][:num_bytes] for slot, num_bytes in refs]
        answers.send_bytes(msgspec.msgpack.encode([_rendered(len(view)) for view in views]))
        del views
    memory.close()


def _rendered(num_bytes: int) -> bytes:
    return b'{"bytes": %d}' % num_bytes


class Endpoint:
    """Plain ASGI: reads the body, answers."""

    def __init__(self, way: Direct | Queue) -> None:
        self._way = way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        body = message["body"]
        while message["more_body"]:
            message = await receive()
            body += message["body"]
        content = await self._way.answer(body)
        length = str(len(content)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})


def _bare(endpoint: Endpoint, way: Direct | Queue) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await endpoint(scope, receive, send)
            return
        await receive()
        if isinstance(way, Queue):
            way.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if isinstance(way, Queue):
            way.stop()
        await send({"type": "lifespan.shutdown.complete"})

    return app


def _in_fastapi(endpoint: Endpoint, way: Direct | Queue) -> ASGIApp:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if isinstance(way, Queue):
            way.start()
        yield
        if isinstance(way, Queue):
            way.stop()

    return FastAPI(lifespan=lifespan, routes=[Route("/predict", endpoint, methods=["POST"])])


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--queue", action="store_true")
    parser.add_argument("--fastapi", action="store_true")
    told = parser.parse_args(arguments)
    way = Queue() if told.queue else Direct()
    endpoint = Endpoint(way)
    app = _in_fastapi(endpoint, way) if told.fastapi else _bare(endpoint, way)
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=told.port,
        loop="uvloop",
        http="httptools",
        log_level="warning",
        access_log=False,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
