import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from inferpool.service.tools.chaos.greed import SlowUploads
from inferpool.service.tools.chaos.questions import EchoQuestion
from inferpool.service.tools.chaos.stores import StoreFaults
from tests.service.tools.fake_service import serving

Answer = tuple[int, dict[str, str]]
GONE: Answer = (503, {"detail": "the job store /jobs is not there"})
MADE: Answer = (202, {"id": "one"})


@asynccontextmanager
async def service(folder: Path, make: Callable[[bool], Answer]) -> AsyncIterator[StoreFaults]:
    """A service whose answer to a new job depends on whether the folder of its store is there."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        status, document = 200, {"id": "one", "state": "succeeded"}
        if not head.startswith(b"GET /jobs/one?wait="):
            assert head.startswith(b"POST /jobs?model=echo HTTP")
            status, document = make(folder.exists())
            if status == 202 and folder.exists():
                (folder / "jobs.db").touch()
        body = msgspec.json.encode(document)
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
        await writer.drain()

    folder.mkdir()
    async with serving(serve) as address:
        yield StoreFaults(
            address=address,
            folder=folder,
            questions=[EchoQuestion("/predict/echo", 1)],
            back_s=0.0,
        )


@pytest.mark.parametrize(
    ("without", "problem"),
    [
        (GONE, ""),
        (MADE, "accepted though the folder of its store is gone"),
        ((500, {"detail": "unable to open database file"}), "should get 503 that says so: 500"),
        ((503, {"detail": "try again"}), "should get 503 that says so: 503"),
    ],
)
async def test_without_its_store_a_service_says_so_and_it_makes_jobs_again_once_that_is_back(
    tmp_path: Path, without: Answer, problem: str
):
    async with service(tmp_path / "jobs", lambda is_there: MADE if is_there else without) as faults:
        faults.back_s = 60.0
        await faults.lose()
    assert len(faults.failed) == bool(problem)
    assert problem in "".join(faults.failed)
    assert faults.most_computed >= 8


async def test_store_that_is_not_opened_again_breaks_the_promise(tmp_path: Path):
    was_there: list[bool] = []

    def make(is_there: bool) -> Answer:
        was_there.append(is_there)
        return MADE if all(was_there) else GONE

    async with service(tmp_path / "jobs", make) as faults:
        await faults.lose()
    (problem,) = faults.failed
    assert "the job store is not back after 0 s: 503" in problem


@pytest.mark.parametrize(("status", "num_problems"), [(202, 0), (503, 1)])
async def test_job_is_made_while_uploads_of_another_key_are_open(
    tmp_path: Path, status: int, num_problems: int
):
    async with service(tmp_path / "jobs", lambda _: (status, {"id": "one"})) as faults:
        held: list[bytes] = []
        is_over = asyncio.Event()

        async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            held.append(await reader.readuntil(b"\r\n\r\n"))
            await reader.read()  # until it hangs up
            if len(held) == 3:
                is_over.set()

        async with serving(stall) as address:
            await SlowUploads(address=address, stores=faults, key="k2", num_uploads=3).hold()
            await asyncio.wait_for(is_over.wait(), 60)
    assert [b"X-API-Key: k2\r\n" in head for head in held] == [True] * 3
    assert len(faults.failed) == num_problems
