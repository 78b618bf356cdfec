"""Bodies of jobs on the disk: whole, private, bounded, and gone at the end."""

import asyncio
import hashlib
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from inferpool.service.errors import TooLargeError, UnavailableError
from inferpool.service.parts.jobs.http.spool import Spool
from tests.descriptors import num_open
from tests.groups import with_mounts

MIB = 2**20


async def fill(spool: Spool, *pieces: bytes) -> None:
    for piece in pieces:
        await spool.write(piece)
    await spool.flush()


@pytest.mark.parametrize(
    "pieces",
    [
        (),
        (b"", b"a"),
        tuple(b"%d," % number for number in range(50_000)),
        (b"x" * 262_143, b"y", b"z" * 3 * MIB, b"end"),
    ],
)
async def test_all_pieces_lie_in_one_private_file(pieces: Sequence[bytes], tmp_path: Path) -> None:
    whole = b"".join(pieces)
    with closing(Spool(tmp_path, 4 * MIB)) as spool:
        await fill(spool, *pieces)
        assert list(tmp_path.iterdir()) == []  # it has no name
        assert spool.path.read_bytes() == whole
        assert stat.S_IMODE(spool.path.stat().st_mode) == 0o600
        assert spool.num_bytes == len(whole)
        assert spool.digest() == hashlib.sha256(whole).hexdigest()


async def test_a_body_over_the_limit_is_refused_with_the_name_of_the_setting(
    tmp_path: Path,
) -> None:
    with closing(Spool(tmp_path, 300_000)) as spool:
        await spool.write(b"x" * 300_000)
        with pytest.raises(TooLargeError, match="limit of 300000 bytes"):
            await spool.write(b"x")
        assert spool.num_bytes == 300_000
    assert list(tmp_path.iterdir()) == []


async def test_nothing_is_left_of_a_body_that_is_not_finished(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 4 * MIB)
    await spool.write(b"x" * MIB)
    assert spool.path.exists()
    spool.close()
    assert list(tmp_path.iterdir()) == []
    spool.close()
    Spool(tmp_path, 1).close()  # nothing was written


async def test_nothing_is_left_when_a_write_is_cancelled(tmp_path: Path) -> None:
    for num_turns in range(4):
        with closing(Spool(tmp_path, 64 * MIB)) as spool:
            writing = asyncio.create_task(fill(spool, b"x" * 32 * MIB))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            writing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await writing
        assert list(tmp_path.iterdir()) == []


async def test_who_has_opened_a_body_reads_on_after_its_end(tmp_path: Path) -> None:
    with closing(Spool(tmp_path, MIB)) as spool:
        await fill(spool, b"body")
        file = spool.path.open("rb")
    with file:
        assert file.read() == b"body"


async def test_the_room_of_a_large_body_is_given_back(tmp_path: Path) -> None:
    before = num_open()
    with closing(Spool(tmp_path, 64 * MIB)) as spool:
        await fill(spool, b"x" * 32 * MIB)
        assert num_open() > before
    assert list(tmp_path.iterdir()) == []
    deadline = time.monotonic() + 60
    while num_open() > before:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_a_folder_that_is_gone_is_no_mistake_of_the_caller(tmp_path: Path) -> None:
    with closing(Spool(tmp_path / "gone", MIB)) as spool:
        await spool.write(b"x")
        with pytest.raises(UnavailableError, match="No such file or directory"):
            await spool.flush()


FULL = """
import asyncio
from contextlib import closing
from pathlib import Path
from inferpool.service.errors import StoreFullError
from inferpool.service.parts.jobs.http.spool import Spool

async def main():
    folder = Path("/mnt")
    with closing(Spool(folder, 1 << 30)) as spool:
        try:
            while True:
                await spool.write(b"x" * 100_000)
        except StoreFullError as error:
            print(error.code, spool.num_bytes > 500_000)
    print(list(folder.iterdir()))
    with closing(Spool(folder, 1 << 30)) as spool:
        await spool.write(b"y" * 500_000)
        await spool.flush()
        print(spool.path.stat().st_size)

asyncio.run(main())
"""


def test_a_full_disk_refuses_a_body_and_has_room_for_the_next() -> None:
    command = [*with_mounts("-t tmpfs -o size=1m none /mnt"), sys.executable, "-c", FULL]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.splitlines() == ["store_full True", "[]", "500000"]
