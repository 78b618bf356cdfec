"""Sketches of our service: plain ASGI, with or without a queue to a worker, in FastAPI or not.

They have no admission, deadlines, metrics, ids, errors or limits.
python -m tests.bench.servers.sketch_server PORT [--queue] [--fastapi]
"""

import asyncio
import sys
from collections import deque
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory

import msgspec
import uvicorn
import uvloop
from fastapi import FastAPI
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

SLOT_BYTES = 256 * 1024
NUM_SLOTS = 512
MAX_BATCH_SIZE = 64
CREDIT = 2

Waiting = tuple[int, int, "asyncio.Future[bytes]"]
"""Slot, number of bytes, and the future of the answer."""


class WorkerProcess:
    """Answers through a worker: bodies in shared memory, one message per batch and one back."""

    def __init__(self) -> None:
        self._memory = SharedMemory(create=True, size=SLOT_BYTES * NUM_SLOTS)
        self._free = deque(range(NUM_SLOTS))
        self._waiting: deque[Waiting] = deque()
        self._held: deque[Sequence[Waiting]] = deque()
        self._is_due = False
        context = get_context("spawn")
        orders, self._sender = context.Pipe(duplex=False)
        self._receiver, answers = context.Pipe(duplex=False)
        self._worker = context.Process(target=_work, args=(self._memory.name, orders, answers))
        self._worker.start()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._receiver.fileno(), self._on_batch)

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


def _work(name: str, orders: Connection, answers: Connection) -> None:
    """Run the worker process."""
    memory = SharedMemory(name=name)
    assert memory.buf is not None
    while message := orders.recv_bytes():
        refs = msgspec.msgpack.decode(message, type=list[tuple[int, int]])
        views = [memory.buf[slot * SLOT_BYTES :][:num_bytes] for slot, num_bytes in refs]
        answers.send_bytes(msgspec.msgpack.encode([_rendered(len(view)) for view in views]))
        del views


def _rendered(num_bytes: int) -> bytes:
    return b'{"bytes": %d}' % num_bytes


class EchoEndpoint:
    """Plain ASGI: reads the body, answers with its length."""

    def __init__(self, worker: WorkerProcess | None) -> None:
        self._worker = worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, is_whole = b"", False
        while not is_whole:
            message = await receive()
            body, is_whole = body + message["body"], not message["more_body"]
        content = await self._worker.answer(body) if self._worker else _rendered(len(body))
        length = str(len(content)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})


async def main(port: int, flags: Sequence[str]) -> None:
    app: ASGIApp = EchoEndpoint(WorkerProcess() if "--queue" in flags else None)
    if "--fastapi" in flags:
        app = FastAPI(routes=[Route("/predict", app, methods=["POST"])])
    config = uvicorn.Config(
        app, port=port, http="httptools", lifespan="off", log_level="warning", access_log=False
    )
    await uvicorn.Server(config).serve()  # whoever ends it ends the worker too


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2:]))
