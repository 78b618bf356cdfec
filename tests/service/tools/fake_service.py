"""A small HTTP server that answers numbered requests, and misbehaves on demand."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from inferpool.service.tools.trial.connection import Address

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Act = str
"""ok, wrong, swapped, lost, silent, twice, late_twice, wrong_id, refused, expired or failed."""


def answer(number: int, body: object, status: int = 200) -> bytes:
    text = json.dumps(body, separators=(",", ":")).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(text)}\r\nx-request-id: {number}\r\n\r\n"
    return head.encode() + text


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Return the X-Request-ID and the body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    fields = dict(line.split(": ", 1) for line in head.splitlines()[1:] if line)
    return fields["X-Request-ID"], await reader.readexactly(int(fields["Content-Length"]))


@contextlib.asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[Address]:
    """Serve each connection, and leave none open."""
    served: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        served[task] = writer
        with contextlib.suppress(
            asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError
        ):
            await serve(reader, writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[:2]
        for task in served:
            task.cancel()
        await asyncio.gather(*served)
        for writer in served.values():
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def echoing(act: Callable[[int], Act]) -> AsyncIterator[Address]:
    """Answer what `EchoQuestion` asks as the echo model does, or as `act` says of a number."""
    refused = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request_id, body = await read_request(reader)
            number, name = int(request_id), act(int(request_id))
            right = answer(number, {"predictions": json.loads(body)["instances"]})
            if name == "lost":
                return
            if name == "silent":
                await asyncio.sleep(3600)
            if name == "refused" and number not in refused:
                refused.add(number)
                writer.write(answer(number, {"code": "overloaded"}, 429))
                continue
            others = {
                "wrong": answer(number, {"predictions": [{"n": number, "text": "!"}]}),
                "swapped": answer(number, {"predictions": [{"n": number + 1, "text": "a"}]}),
                "twice": 2 * right,
                "wrong_id": right.replace(b"x-request-id: ", b"x-request-id: 9"),
                "expired": answer(number, {"code": "deadline_exceeded"}, 504),
                "failed": answer(number, {"code": "worker_crashed"}, 500),
            }
            writer.write(others.get(name, right))
            if name == "late_twice":  # while the same client waits for its next answer
                await asyncio.sleep(0.01)
                writer.write(right)

    async with serving(serve) as address:
        yield address


@contextlib.asynccontextmanager
async def answering(bodies: Sequence[object], status: int = 200) -> AsyncIterator[Address]:
    """Give these answers, one after the other."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for body in bodies:
            await read_request(reader)
            writer.write(answer(0, body, status))

    async with serving(serve) as address:
        yield address
