"""Uploads of jobs with a second key that hardly go on, while the first key makes a job."""

import asyncio
import contextlib
import socket
from dataclasses import dataclass

from inferpool.service.tools.chaos.stores import StoreFaults
from inferpool.service.tools.trial.connection import Address, NoAnswerError

_NUM_BYTES = 10_000_000
"""Announced length of each upload; nothing but its first lines ever comes."""
_OTHER_PEER = "127.0.0.2"


@dataclass(slots=True, kw_only=True)
class SlowUploads:
    """Holds uploads open. Lives in the event loop."""

    address: Address
    stores: StoreFaults
    """Makes the job of the first key, and records what breaks the promise."""
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
