"""Nobody's greed is another one's refusal: two keys, one of them greedy, at all that they share."""

import asyncio
import contextlib
import itertools
import re
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

import inferpool.service
from inferpool.service.api.codecs.body import BodyContext
from inferpool.service.errors import OverloadedError, OverShareError
from inferpool.service.parts.jobs.http import reading
from inferpool.service.parts.jobs.http.reading import JobBody, read_body
from inferpool.service.parts.jobs.http.routes import MAX_STREAMS as MAX_JOB_STREAMS
from inferpool.service.parts.jobs.http.uploads import MAX_UPLOADS
from inferpool.service.parts.jobs.records import Job
from inferpool.service.parts.jobs.store.store import JobStore
from inferpool.service.queue.pool import Pool
from inferpool.service.queue.shares import Shares, owner_of_address
from inferpool.service.settings.keys import digest_of
from inferpool.workers.shared.arena import Arena
from tests.fakes import FakeEngine
from tests.service.parts.jobs.http.test_routes import ANN, BEN, JSONL, idle, serving

SHARE = 0.75
MOST_S = 60


@dataclass
class Bench:
    """A service with jobs for two keys: Ann, who takes what she can get, and Ben."""

    client: httpx.AsyncClient
    engine: FakeEngine
    pool: Pool
    patch: pytest.MonkeyPatch
    ends: contextlib.AsyncExitStack

    async def make(
        self, key: str, id: str, num: int = 1, *, webhook: str | None = None, **headers: str
    ) -> httpx.Response:
        return await self.client.put(
            f"/jobs/{id}",
            content=b"1\n" * num,
            headers={**JSONL, **bearer(key), **headers},
            params={} if webhook is None else {"webhook": webhook},
        )

    async def answer_until(self, done: Callable[[], Awaitable[bool]]) -> None:
        """Have the workers answer batch by batch until something is true."""
        async with asyncio.timeout(MOST_S):
            while not await done():
                for worker in self.engine.started:
                    if worker.batches:
                        worker.answer([b'"yes"'] * worker.sizes[0])
                await asyncio.sleep(0.001)

    async def keep_open(self, request: httpx.Request) -> int:
        """Send a request whose answer is not read, and return its status."""
        answer = await self.client.send(request, stream=True)
        self.ends.push_async_callback(answer.aclose)
        return answer.status_code

    async def is_over(self, key: str, id: str) -> bool:
        job = await self.client.get(f"/jobs/{id}", headers=bearer(key))
        return job.json()["ended_at"] is not None


class Receiver:
    """A host that answers calls of webhooks."""

    def __init__(self) -> None:
        self.told = asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.told.set()
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()
        await writer.wait_closed()


def url_of(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}/"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def greedy_until_refused(open_one: Callable[[], Awaitable[int]], most: int) -> int:
    """Open one after the other until a refusal; return how many were opened."""
    for number in range(most + 1):
        if await open_one() == 429:
            return number
    raise AssertionError("nothing was refused")


async def uploads(bench: Bench) -> None:
    head = f"POST /jobs HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ANN}\r\n"
    head += "content-type: application/jsonl\r\ncontent-length: 100\r\n\r\n1\n"
    url = bench.client.base_url

    async def upload() -> bytes:
        reader, writer = await asyncio.open_connection(url.host, url.port)
        bench.ends.callback(writer.close)
        writer.write(head.encode())
        return await reader.readline()  # of a refusal: the body is never whole

    tasks = [asyncio.create_task(upload()) for _ in range(MAX_UPLOADS)]
    bench.ends.callback(lambda: [task.cancel() for task in tasks])
    num_refused = MAX_UPLOADS - int(SHARE * MAX_UPLOADS)
    async with asyncio.timeout(MOST_S):
        for answered in itertools.islice(asyncio.as_completed(tasks), num_refused):
            assert (await answered).startswith(b"HTTP/1.1 429 ")
    assert (await bench.make(BEN, "his")).status_code == 202


async def streams_of_jobs(bench: Bench) -> None:
    for key in (ANN, BEN):
        await bench.make(key, "cats")

    async def follow(key: str) -> int:
        request = bench.client.build_request("GET", "/jobs/cats/events", headers=bearer(key))
        return await bench.keep_open(request)

    num = await greedy_until_refused(lambda: follow(ANN), MAX_JOB_STREAMS)
    assert num == SHARE * MAX_JOB_STREAMS
    assert await follow(BEN) == 200


async def readers_of_bodies(bench: Bench) -> None:
    go_on = threading.Event()
    bench.ends.callback(go_on.set)

    def read_slowly(content_type: bytes, path: Path, head: BodyContext) -> JobBody:
        if head.headers[b"authorization"].endswith(ANN.encode()):
            go_on.wait(MOST_S)
        return read_body(content_type, path, head)

    bench.patch.setattr(reading, "read_body", read_slowly)
    hers = [asyncio.create_task(bench.make(ANN, f"{number}")) for number in range(8)]
    his = [asyncio.create_task(bench.make(BEN, f"{number}")) for number in range(8)]
    async with asyncio.timeout(MOST_S):
        assert {each.status_code for each in await asyncio.gather(*his)} == {202}
    assert not any(each.done() for each in hers)
    go_on.set()
    assert {each.status_code for each in await asyncio.gather(*hers)} == {202}


async def threads_of_the_store(bench: Bench) -> None:
    go_on, read = threading.Event(), JobStore.job
    bench.ends.callback(go_on.set)
    for key in (ANN, BEN):
        await bench.make(key, "cats")

    def read_slowly(store: JobStore, id: str, owner: str = "") -> Job | None:
        if owner == digest_of(ANN.encode()).hex():
            go_on.wait(MOST_S)
        return read(store, id, owner)

    bench.patch.setattr(JobStore, "job", read_slowly)
    waiting = [asyncio.create_task(bench.is_over(ANN, "cats")) for _ in range(40)]
    async with asyncio.timeout(MOST_S):
        for _ in range(8):
            await bench.is_over(BEN, "cats")
    assert not any(each.done() for each in waiting)
    go_on.set()
    await asyncio.gather(*waiting)


async def turns_of_jobs(bench: Bench) -> None:
    for number in range(20):
        await bench.make(ANN, f"{number}", 100, **{"x-priority": "1"})
    await bench.make(BEN, "his", 3, **{"x-priority": "9"})
    await bench.answer_until(lambda: bench.is_over(BEN, "his"))
    hers = [await bench.is_over(ANN, f"{number}") for number in range(20)]
    assert not all(hers)
    answers = await bench.client.get("/jobs/0", headers=bearer(ANN))
    assert answers.json()["num_instances"] == 100


async def ids_of_jobs(bench: Bench) -> None:
    assert (await bench.make(ANN, "cats", 1)).status_code == 202
    assert (await bench.make(BEN, "cats", 2)).status_code == 202
    assert (await bench.make(BEN, "cats", 3)).status_code == 422
    await bench.client.delete("/jobs/cats", headers=bearer(ANN))
    his = await bench.client.get("/jobs/cats", headers=bearer(BEN))
    assert his.json()["num_instances"] == 2


async def numbers_of_jobs(bench: Bench) -> None:
    async def make() -> int:
        return (await bench.make(ANN, f"{next(numbers)}")).status_code

    numbers = iter(range(100))
    assert await greedy_until_refused(make, 50) == 50
    assert (await bench.make(BEN, "his")).status_code == 202


async def calls_to_webhooks(bench: Bench) -> None:
    silent = [bench.ends.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(40)]
    receiver = Receiver()
    server = await bench.ends.enter_async_context(
        await asyncio.start_server(receiver.handle, "127.0.0.1", 0)
    )
    for number, each in enumerate(silent):
        await bench.make(ANN, f"{number}", webhook=url_of(each))
        await bench.client.delete(f"/jobs/{number}", headers=bearer(ANN))
    await bench.make(BEN, "his", webhook=url_of(server.sockets[0]))
    await bench.client.delete("/jobs/his", headers=bearer(BEN))
    await asyncio.wait_for(receiver.told.wait(), MOST_S)  # hers, by eights, would take longer


@dataclass(frozen=True)
class Shared:
    """One thing that clients share, and what shows that it has shares."""

    where: str
    """Its file below `service`."""
    by: str
    walk: Callable[[Bench], Awaitable[None]] | str
    """A greedy key and another one; or the file of the test that has them."""


SHARED: Mapping[str, Shared] = {
    "uploads of jobs": Shared("parts/jobs/http/uploads.py", "key or address", uploads),
    "streams of events of jobs": Shared(
        "parts/jobs/http/routes.py", "key or address", streams_of_jobs
    ),
    "readers of bodies": Shared("parts/jobs/http/making.py", "key or address", readers_of_bodies),
    "writers of bodies": Shared("parts/jobs/jobs.py", "as their readers", readers_of_bodies),
    "threads that use the store": Shared("parts/jobs/threads.py", "key", threads_of_the_store),
    "turns of jobs": Shared("parts/jobs/runner.py", "key", turns_of_jobs),
    "queues of models for jobs": Shared("queue/scheduling/background.py", "key", turns_of_jobs),
    "ids of jobs": Shared("parts/jobs/store/tables.py", "key", ids_of_jobs),
    "jobs and their bytes": Shared("parts/jobs/store/writer.py", "key", numbers_of_jobs),
    "the disk of jobs": Shared(
        "parts/jobs/store/database.py", "key", "parts/jobs/store/test_store.py"
    ),
    "calls to webhooks": Shared("parts/jobs/webhooks.py", "key and host", calls_to_webhooks),
    "streams of events": Shared(
        "parts/live/sampler.py", "key or address", "parts/live/test_events.py"
    ),
    "places in a queue, time to a deadline": Shared(
        "queue/admission.py", "key", "queue/test_admission.py"
    ),
    "the arena": Shared("queue/admission.py", "key", "queue/test_admission.py"),
    "threads that inflate bodies": Shared(
        "parts/open_inference", "key or address, by bytes", "parts/open_inference/test_calls.py"
    ),
    "the arena of front ends": Shared(
        "parts/fronts/front_side.py", "key", "parts/fronts/test_sides.py"
    ),
}
"""All pools, places, queues and name spaces of the main process that clients share."""
NOT_SHARED: Mapping[str, str] = {
    "api/web.py": "once for each protocol",
    "parts/live/page.py": "for each file of the page",
    "batch": "of one user's own command",
    "parts/swap": "of operators",
    "parts/platforms/models.py": "of the platform, which alone has models loaded",
    "parts/torchserve/management.py": "of operators",
    "client": "of one user's own process",
    "parts/fronts/front.py": "of no client",
    "queue/replacer.py": "of operators",
    "settings/state.py": "of operators",
    "parts/speed.py": "of no client",
    "telemetry/logs.py": "of no client",
    "tools": "of one user's own command",
    "parts/watched": "of operators",
    "parts/jobs/keeper.py": "of no client",
    "parts/jobs/watches.py": "for each job",
}
"""Pools and locks of others."""
_POOL = re.compile(
    r"\b(?:ThreadPoolExecutor|run_in_executor|to_thread|Semaphore|BoundedSemaphore|Shares|"
    r"asyncio\.Lock|Condition|\w*Queue)\("
)


@pytest.mark.parametrize(
    "what", [what for what, shared in SHARED.items() if not isinstance(shared.walk, str)]
)
async def test_a_greedy_key_costs_another_one_nothing(
    what: str, arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = SHARED[what].walk
    assert not isinstance(walk, str)
    async with (
        idle(arena) as (engine, pool),
        serving(
            pool, tmp_path / "jobs", keys=f"{ANN},{BEN}", share=SHARE, hosts=["127.0.0.1"]
        ) as client,
        contextlib.AsyncExitStack() as ends,
    ):
        client._transport = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=None))
        await walk(Bench(client, engine, pool, monkeypatch, ends))


def test_all_pools_are_listed() -> None:
    root = Path(inferpool.service.__file__).parent
    listed = {shared.where for shared in SHARED.values()} | set(NOT_SHARED)
    for path in root.rglob("*.py"):
        name = str(path.relative_to(root))
        if _POOL.search(path.read_text()):
            places = {name, *(str(each) for each in Path(name).parents)}
            assert places & listed, f"{name}: say who shares its pool"
    for each in listed:
        assert (root / each).exists(), each
    for shared in SHARED.values():
        if isinstance(shared.walk, str):
            assert (Path(__file__).parent / shared.walk).exists(), shared.walk


def test_an_owner_leaves_a_part_for_others() -> None:
    shares = Shares(8, SHARE, "things")
    for owner, num in (("ann", 6), ("ben", 1), ("eve", 1)):
        for _ in range(num):
            assert shares.may_take(owner)
            shares.take(owner)
        assert not shares.may_take(owner)
    with pytest.raises(OverloadedError, match="all 8 places for things"), shares.place("dan"):
        pass
    shares.give_back("ben")
    with pytest.raises(OverShareError, match="the 6 things of this key"), shares.place("ann"):
        pass
    with shares.place("dan"):
        assert shares.num == 8


async def test_who_has_least_is_served_first() -> None:
    shares, order = Shares(2, 1.0, "things"), list[str]()

    async def work(owner: str) -> None:
        async with shares.place_in_line(owner):
            order.append(owner)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(work(owner)) for owner in ("ann", "ann", "ann", "ann", "ben")]
    await asyncio.sleep(0)
    tasks[3].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["ann", "ann", "ben", "ann"]
    assert shares.num == 0
    async with asyncio.timeout(MOST_S), shares.place_in_line("ann"), shares.place_in_line("ann"):
        pass


@pytest.mark.parametrize(
    ("address", "owner"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:0:1:2:3:4:5", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("testclient", "testclient"),
        (None, ""),
    ],
)
def test_a_client_is_known_by_what_it_cannot_choose(address: str | None, owner: str) -> None:
    assert owner_of_address(address) == owner
