"""Writes the bodies of new jobs to a disk, up to a limit."""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.requests import Request

from inferpool.service.api.codecs.body import Limits
from inferpool.service.errors import (
    OverQuotaError,
    SlowBodyError,
    StoreFullError,
    UnavailableError,
)
from inferpool.service.parts.jobs.http.spool import Spool
from inferpool.service.queue.shares import Shares

MAX_UPLOADS = 64
"""Bodies on their way at once. Each costs a connection, a file and some 300 KiB."""
_MOST_S = 3600.0
"""A body that takes longer is refused."""
_GAP_S = 60.0
"""So long nothing may come. The server's own limits are stricter; other servers may have none."""
_CHECK_BYTES = 8 * 2**20
"""How often the room on the disk is looked at."""
_RESERVE_BYTES = 64 * 2**20
_RESERVE_SHARE = 0.05


class Uploads:
    """The bodies that are on their way. In the event loop."""

    def __init__(self, limits: Limits, share: float = 1.0) -> None:
        """Allow each caller at most a `share` of what others leave of all uploads."""
        self._limits = limits
        self._places = Shares(MAX_UPLOADS, share, "uploads of jobs")
        self._bytes: Counter[str] = Counter()
        """Bytes on the disk by owner."""

    @asynccontextmanager
    async def take(
        self, request: Request, caller: str, owner: str, folder: Path
    ) -> AsyncIterator[Spool]:
        """Write the whole body to a file, and remove it at the end.

        Args:
            request: The call.
            caller: Counts the upload in its share.
            owner: Will own the job.
            folder: The folder of its file.

        Raises:
            ClientDisconnect: The client is gone, and the body is not complete.
            OverShareError: The caller has its share of uploads, or there are too many.
            OverQuotaError: The owner's bodies on their way would take more than its jobs may.
            SlowBodyError: It does not arrive in time.
            StoreFullError: The disk has no room for it.
            TooLargeError: It is larger than bodies of its type may be.
        """
        from inferpool.service.parts.jobs.http.reading import most_bytes  # only once a job comes

        content_type = request.headers.get("content-type", "").encode("latin-1")
        with self._places.place(caller):
            spool = Spool(folder, most_bytes(content_type, self._limits))
            try:
                await self._fill(spool, request, owner, folder)
                yield spool
            finally:
                self._bytes[owner] -= spool.num_bytes
                if not self._bytes[owner]:
                    del self._bytes[owner]
                spool.close()

    async def _fill(self, spool: Spool, request: Request, owner: str, folder: Path) -> None:
        pieces = request.stream()
        unchecked = _CHECK_BYTES
        try:
            async with asyncio.timeout(_MOST_S):
                while True:
                    async with asyncio.timeout(_GAP_S):
                        piece = await anext(pieces, None)
                    if piece is None:
                        break
                    before = spool.num_bytes
                    unchecked += len(piece)
                    if unchecked >= _CHECK_BYTES:
                        unchecked = 0
                        _check_room(folder)
                    await self._write(spool, piece, owner, before)
                await spool.flush()
        except TimeoutError:
            raise SlowBodyError(
                f"the body came too slowly: nothing for {_GAP_S:g} s, or not whole after "
                f"{_MOST_S:g} s"
            ) from None

    async def _write(self, spool: Spool, piece: bytes, owner: str, before: int) -> None:
        try:
            await spool.write(piece)
        finally:
            self._bytes[owner] += spool.num_bytes - before
        if self._bytes[owner] > self._limits.max_job_bytes:
            raise OverQuotaError(
                "the jobs that are being sent would take more than "
                f"{self._limits.max_job_bytes} bytes, which is max_job_bytes; send them one after "
                "another",
                retry_after_s=10,
            )


def _check_room(folder: Path) -> None:
    """Refuse bodies before they leave no room for results.

    Raises:
        StoreFullError: The disk is nearly full.
        UnavailableError: It is not there.
    """
    try:
        disk = os.statvfs(folder)
    except OSError as error:
        raise UnavailableError(
            f"the store of jobs (job_store) cannot take bodies: {error.strerror}", retry_after_s=5
        ) from error
    reserve = min(_RESERVE_BYTES, int(disk.f_blocks * disk.f_frsize * _RESERVE_SHARE))
    if disk.f_bavail * disk.f_frsize < reserve + _CHECK_BYTES:
        raise StoreFullError(
            "the disk for the bodies of jobs is nearly full; delete jobs that are over, or try "
            "again later",
            retry_after_s=10,
        )
