"""Jobs over HTTP: a real server, a real store, and workers that answer at once or when told."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvicorn

from inferpool.service.api.auth import Guard
from inferpool.service.api.codecs.body import Limits
from inferpool.service.api.web import App
from inferpool.service.api.wire.protocol import PredictProtocol
from inferpool.service.catalog.catalog import ModelVersion
from inferpool.service.parts.jobs.http.routes import jobs_router
from inferpool.service.parts.jobs.jobs import Jobs
from inferpool.service.parts.jobs.keeper import StoreKeeper
from inferpool.service.parts.jobs.records import StoreLimits
from inferpool.service.parts.jobs.webhooks import Webhooks
from inferpool.service.queue.pool import Pool
from inferpool.service.settings.draft import read_keys
from inferpool.service.settings.model import ModelSettings
from inferpool.workers.shared.arena import Arena
from tests.fakes import FakeEngine
from tests.service.api.fakes import endpoint
from tests.service.api.server import until
from tests.service.parts.jobs.http.test_archive import archive_of
from tests.service.parts.jobs.test_jobs import answering
from tests.service.pools import ready_pool

JSON = {"content-type": "application/json"}
JSONL = {"content-type": "application/jsonl"}
STORE_LIMITS = StoreLimits(retention_s=100.0, max_jobs=50, max_bytes=2**28)
ANN, BEN = "ann-has-a-key-of-her-own", "ben-has-a-key-of-his-own"


@contextlib.asynccontextmanager
async def serving(
    pool: Pool,
    place: Path | str,
    *,
    keys: str = "",
    share: float = 1.0,
    hosts: Sequence[str] = ("hooks.example",),
    **limits: float,
) -> AsyncIterator[httpx.AsyncClient]:
    """Serve the jobs of one model on a real socket, and yield a client."""
    guard = Guard(predict=read_keys(keys) if keys else None, share=share)
    store_limits = msgspec.structs.replace(STORE_LIMITS, share=share)
    hooks = Webhooks(hosts, b"k" * 24, share)
    jobs = Jobs(StoreKeeper(str(place), store_limits), {"m": pool}, "m", hooks)
    version = ModelVersion(ModelSettings(source="echo"), pool)
    version.is_serving = True
    predict = endpoint(
        version,
        guard=guard,
        limits=Limits(**{"max_job_bytes": STORE_LIMITS.max_bytes, **limits}),  # type: ignore[arg-type]  # bytes are whole numbers
    )
    app = App(version="0", routers=[jobs_router(jobs, guard, predict.limits)], guard=guard)
    app.predict, app.has_jobs = predict, True
    http: Any = PredictProtocol.bound_to(predict)
    config = uvicorn.Config(app, port=0, log_config=None, lifespan="off", http=http)
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    jobs.start()
    await jobs.keeper._settled.wait()  # calls wait for ten seconds alone
    await server.startup()
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            yield client
    finally:
        jobs.end()
        server.force_exit = True
        await server.shutdown()
        await jobs.stop()


@contextlib.asynccontextmanager
async def served(arena: Arena, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with answering(arena) as pool, serving(pool, tmp_path / "jobs") as client:
        yield client


@contextlib.asynccontextmanager
async def idle(arena: Arena) -> AsyncIterator[tuple[FakeEngine, Pool]]:
    """A pool whose worker answers when told."""
    engine = FakeEngine()
    pool = await ready_pool(engine, arena)
    yield engine, pool
    await pool.stop(0)


async def over(client: httpx.AsyncClient, location: str) -> Any:
    return (await client.get(location, params={"wait": 60})).json()


def spooled(folder: Path) -> list[int]:
    """Return the sizes of the files below a folder that have no name and that we have open."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(each)
            if target.startswith(f"{folder}/") and target.endswith("(deleted)"):
                found.append(each.stat().st_size)
    return found


def body(*instances: object) -> dict[str, object]:
    return {"instances": list(instances)}


async def test_a_job_outlives_the_call_that_makes_it(arena: Arena, tmp_path: Path) -> None:
    async with served(arena, tmp_path) as client:
        made = await client.post("/jobs", json=body(1, 2), headers={"x-request-id": "mine"})
        assert made.status_code == 202
        assert made.headers["retry-after"] == "1"
        location = made.headers["location"]
        assert location == f"./jobs/{made.json()['id']}"
        assert (made.json()["state"], made.json()["num_instances"]) == ("queued", 2)
        job = await over(client, location)
        assert (job["state"], job["num_done"], job["num_failed"]) == ("succeeded", 2, 0)
        assert (job["model"], job["versions"], job["request_id"]) == ("m", [1], "mine")
        assert job["created_at"] <= job["started_at"] <= job["ended_at"] < job["expires_at"]
        result = await client.get(f"{location}/result")
        assert result.json() == {"predictions": ["yes", "yes"]}
        assert result.headers["x-model-version"] == "1"
        lines = await client.get(f"{location}/result", headers={"accept": "application/jsonl"})
        assert lines.headers["content-type"].startswith("application/jsonl")
        assert lines.text == (
            '{"index":0,"version":1,"prediction":"yes"}\n{"index":1,"version":1,"prediction":"yes"}\n'
        )


async def test_a_line_that_is_no_json_is_an_error_in_its_place(
    arena: Arena, tmp_path: Path
) -> None:
    async with served(arena, tmp_path) as client:
        made = await client.post("/jobs", content=b"1\n{\n3\n", headers=JSONL)
        job = await over(client, made.headers["location"])
        assert (job["state"], job["num_done"], job["num_failed"]) == ("succeeded", 3, 1)
        first, second, third = (await client.get(f"/jobs/{job['id']}/result")).json()["predictions"]
        assert (first, third) == ("yes", "yes")
        assert second["error"]["code"] == "bad_request"
        assert second["error"]["status"] == 400
        assert "line 2" in second["error"]["message"]


async def test_a_body_that_cannot_be_read_leaves_nothing(arena: Arena, tmp_path: Path) -> None:
    async with served(arena, tmp_path) as client:
        cut = archive_of(("a", b"x" * 2000))[:1500]
        for content_type, content, status in (
            ("application/x-tar", cut, 400),
            ("application/json", b"{", 400),
            ("application/jsonl", b"", 422),
            ("application/zip", b"x", 415),
        ):
            made = await client.post(
                "/jobs", content=content, headers={"content-type": content_type}
            )
            assert made.status_code == status, made.text
            assert made.headers["content-type"] == "application/problem+json"
        assert (await client.get("/jobs")).json() == {"jobs": [], "next": None}


async def test_a_client_that_hangs_up_leaves_nothing(arena: Arena, tmp_path: Path) -> None:
    async with served(arena, tmp_path) as client:
        host, port = client.base_url.host, client.base_url.port
        _, writer = await asyncio.open_connection(host, port)
        head = b"POST /jobs HTTP/1.1\r\nhost: h\r\ncontent-type: application/jsonl\r\n"
        writer.write(head + b"content-length: 1000000\r\n\r\n" + b"1\n" * 200_000)
        await writer.drain()
        await until(lambda: spooled(tmp_path))
        writer.close()
        await writer.wait_closed()
        await until(lambda: not spooled(tmp_path))
        assert (await client.get("/jobs")).json()["jobs"] == []


async def test_a_repeat_with_its_key_or_id_is_the_same_job(arena: Arena, tmp_path: Path) -> None:
    async with served(arena, tmp_path) as client:
        key = {"idempotency-key": "k1"}
        first = await client.post("/jobs", json=body(1), headers=key)
        await over(client, first.headers["location"])
        again = await client.post("/jobs", json=body(1), headers=key)
        assert (again.status_code, again.headers["location"]) == (202, first.headers["location"])
        assert again.json()["state"] == "succeeded"
        assert "retry-after" not in again.headers
        for other in (
            await client.post("/jobs", json=body(2), headers=key),
            await client.post("/jobs", json=body(1), headers={**key, "x-priority": "1"}),
            await client.post("/jobs?top_k=3", json=body(1), headers=key),
        ):
            assert (other.status_code, other.json()["code"]) == (422, "idempotency_mismatch")
        put = await client.put("/jobs/mine.1", json=body(1))
        assert (put.status_code, put.headers["location"]) == (202, "../jobs/mine.1")
        assert (await client.put("/jobs/mine.1", json=body(1))).status_code == 202
        assert (await client.put("/jobs/mine.1", json=body(2))).status_code == 422
        assert (await client.put("/jobs/.mine", json=body(2))).status_code == 400
        assert len((await client.get("/jobs")).json()["jobs"]) == 2


async def test_a_prediction_may_be_wanted_later(arena: Arena, tmp_path: Path) -> None:
    async with served(arena, tmp_path) as client:
        for path in ("/predict", "/predict/m"):
            later = await client.post(path, json=body(1), headers={"prefer": "respond-async"})
            assert later.status_code == 202
            assert later.headers["preference-applied"] == "respond-async"
            assert (await over(client, later.headers["location"]))["state"] == "succeeded"
        waited = {"prefer": "wait=20, respond-async"}
        now = await client.post("/predict", json=body(1, 2), headers=waited)
        assert (now.status_code, now.json()) == (200, {"predictions": ["yes", "yes"]})
        assert now.headers["preference-applied"] == "respond-async, wait=20"
        tensors = {"prefer": "respond-async", "accept": "application/x-npy"}
        assert (await client.post("/predict", json=body(1), headers=tensors)).status_code == 406
        nobody = await client.post("/predict/no", json=body(1), headers={"prefer": "respond-async"})
        assert (nobody.status_code, nobody.json()["code"]) == (404, "unknown_model")
        version = await client.post("/predict/m/versions/1", json=body(1), headers=waited)
        assert version.status_code == 400
        plain = await client.post("/predict", json=body(1), headers={"prefer": "return=minimal"})
        assert plain.status_code == 200


async def test_answers_are_shown_as_they_come(arena: Arena, tmp_path: Path) -> None:
    async with idle(arena) as (engine, pool), serving(pool, tmp_path / "jobs") as client:
        made = await client.post("/jobs", content=b"1\n" * 130, headers=JSONL)
        path = made.headers["location"] + "/result"
        early = await client.get(path)
        assert (early.status_code, early.json()["code"]) == (409, "conflict")
        none = await client.get(path, params={"first": 0})
        assert none.json() == {"predictions": [], "first": 0, "next": 0}
        while (known := (await client.get(path, params={"first": 0})).json())["next"] < 64:
            await until(lambda: engine.started[0].batches)
            worker = engine.started[0]
            worker.answer([b'"yes"'] * worker.sizes[0])
            await asyncio.sleep(0)
        assert known["predictions"] == ["yes"] * known["next"]
        some = await client.get(path, params={"first": 10, "count": 2})
        assert some.json() == {"predictions": ["yes", "yes"], "first": 10, "next": 12}
        lines = await client.get(
            path, params={"first": 63}, headers={"accept": "application/jsonl"}
        )
        assert [json.loads(line)["index"] for line in lines.text.splitlines()][:1] == [63]
        cancelled = await client.delete(made.headers["location"])
        assert (cancelled.status_code, cancelled.json()["state"]) == (200, "cancelled")
        rest = (await client.get(path)).json()["predictions"]
        assert len(rest) == 130
        assert rest[-1]["error"]["code"] == "cancelled"


async def test_events_tell_of_progress_until_the_end(arena: Arena, tmp_path: Path) -> None:
    async with served(arena, tmp_path) as client:
        made = await client.post("/jobs", content=b"1\n" * 500, headers=JSONL)
        events = await client.get(made.headers["location"] + "/events")
        assert events.headers["content-type"].startswith("text/event-stream")
        texts = [text.split("\n") for text in events.text.strip().split("\n\n")]
        jobs = [json.loads(text[2].removeprefix("data: ")) for text in texts]
        assert [text[:2] for text in texts] == [
            ["event: job", f"id: {n}"] for n in range(len(texts))
        ]
        assert [job["num_done"] for job in jobs] == sorted(job["num_done"] for job in jobs)
        assert jobs[-1]["state"] == "succeeded"
        head = await client.head(made.headers["location"] + "/events")
        assert (head.status_code, head.content) == (200, b"")


async def test_a_job_that_is_over_is_deleted(arena: Arena, tmp_path: Path) -> None:
    async with served(arena, tmp_path) as client:
        made = await client.post("/jobs", json=body(1))
        location = made.headers["location"]
        await over(client, location)
        assert (await client.delete(location)).status_code == 204
        for path in (location, f"{location}/result", f"{location}/events"):
            gone = await client.get(path)
            assert (gone.status_code, gone.json()["code"]) == (404, "unknown_job")
        assert (await client.delete(location)).status_code == 404


async def test_jobs_are_listed_in_pages(arena: Arena, tmp_path: Path) -> None:
    async with served(arena, tmp_path) as client:
        for index in range(5):
            await client.put(f"/jobs/j{index}", json=body(1))
            await over(client, f"/jobs/j{index}")
        page = await client.get("/jobs", params={"limit": 2, "state": ["succeeded", "failed"]})
        assert [job["id"] for job in page.json()["jobs"]] == ["j4", "j3"]
        assert page.json()["next"] == "j3"
        following = page.links["next"]["url"]
        seen = ["j4", "j3"]
        while following:
            page = await client.get(following)
            seen += [job["id"] for job in page.json()["jobs"]]
            following = page.links.get("next", {}).get("url", "")
        assert seen == ["j4", "j3", "j2", "j1", "j0"]
        assert page.json()["next"] is None
        assert (await client.get("/jobs", params={"state": "queued"})).json()["jobs"] == []
        assert (await client.get("/jobs", params={"state": "odd"})).status_code == 422
        assert (await client.get("/jobs", params={"limit": 0})).status_code == 422


async def test_a_key_sees_its_own_jobs_only(arena: Arena, tmp_path: Path) -> None:
    ann, ben = ({"x-api-key": key} for key in (ANN, BEN))
    place = tmp_path / "jobs"
    async with answering(arena) as pool, serving(pool, place, keys=f"{ANN},{BEN}") as client:
        assert (await client.post("/jobs", json=body(1))).status_code == 401
        assert (await client.get("/jobs")).status_code == 401
        made = await client.post("/jobs", json=body(1), headers=ann)
        location = made.headers["location"]
        for path in (location, f"{location}/result", f"{location}/events"):
            assert (await client.get(path, headers=ben)).status_code == 404
        assert (await client.delete(location, headers=ben)).status_code == 404
        assert (await client.get("/jobs", headers=ben)).json()["jobs"] == []
        assert len((await client.get("/jobs", headers=ann)).json()["jobs"]) == 1
        same = {"idempotency-key": "k"}
        first = await client.post("/jobs", json=body(1), headers=ann | same)
        second = await client.post("/jobs", json=body(2), headers=ben | same)
        assert second.status_code == 202
        assert first.json()["id"] != second.json()["id"]


async def test_what_cannot_be_is_said(arena: Arena, tmp_path: Path) -> None:
    async with served(arena, tmp_path) as client:
        for path, headers, status, text in (
            ("/jobs?model=no", {}, 404, "no model 'no' is served here"),
            ("/jobs", {"x-priority": "0"}, 400, "X-Priority"),
            ("/jobs?webhook=https://elsewhere.example/", {}, 403, "webhook_hosts"),
            ("/jobs?webhook=nothing", {}, 422, "http"),
            ("/jobs", {"content-encoding": "gzip"}, 415, "Content-Encoding"),
        ):
            answer = await client.post(path, json=body(1), headers=headers)
            assert answer.status_code == status, answer.text
            assert text in answer.json()["detail"]
        hook = "https://hooks.example/x"
        made = await client.post("/jobs", params={"webhook": hook}, json=body(1))
        assert made.json()["webhook"] == hook
        assert (await client.get("/jobs/a", params={"wait": 61})).status_code == 422
        result = await client.get(
            f"{made.headers['location']}/result", headers={"accept": "image/png"}
        )
        assert result.status_code == 406


async def test_a_job_may_be_larger_than_other_bodies(arena: Arena, tmp_path: Path) -> None:
    lines = b'"%s"\n' % (b"x" * 1000) * 2000
    async with answering(arena) as pool:
        limits = {"max_body_bytes": 100_000, "max_job_bytes": 3_000_000}
        async with serving(pool, tmp_path / "jobs", **limits) as client:
            made = await client.post("/jobs", content=lines, headers=JSONL)
            assert (await over(client, made.headers["location"]))["num_failed"] == 0
            later = {**JSONL, "prefer": "respond-async"}
            assert (await client.post("/predict", content=lines, headers=later)).status_code == 202
            assert (await client.post("/predict", content=lines, headers=JSON)).status_code == 413

            async def pieces() -> AsyncIterator[bytes]:
                yield lines
                yield lines

            for content in (lines * 2, pieces()):
                large = await client.post("/jobs", content=content, headers=JSONL)
                assert (large.status_code, large.json()["code"]) == (413, "too_large")
            whole = await client.post("/jobs", content=lines, headers=JSON)
            assert (whole.status_code, whole.json()["code"]) == (413, "too_large")
            assert len((await client.get("/jobs")).json()["jobs"]) == 2


async def test_bodies_that_are_being_sent_are_bounded_in_sum(arena: Arena, tmp_path: Path) -> None:
    async with answering(arena) as pool:
        limits = {"max_body_bytes": 100_000, "max_job_bytes": 1_000_000}
        async with serving(pool, tmp_path / "jobs", **limits) as client:
            half, goes_on = asyncio.Event(), asyncio.Event()

            async def slowly() -> AsyncIterator[bytes]:
                yield b'"%s"\n' % (b"x" * 699_000)
                half.set()
                await goes_on.wait()

            first = asyncio.create_task(client.post("/jobs", content=slowly(), headers=JSONL))
            await half.wait()
            await until(lambda: sum(spooled(tmp_path)) > 5e5)
            second = await client.post("/jobs", content=b'"%s"\n' % (b"x" * 699_000), headers=JSONL)
            assert (second.status_code, second.json()["code"]) == (429, "over_quota")
            goes_on.set()
            assert (await first).status_code == 202


async def test_a_body_may_take_longer_than_a_call_but_must_go_on(
    arena: Arena, tmp_path: Path
) -> None:
    head = b"POST /jobs HTTP/1.1\r\nhost: h\r\ncontent-type: application/jsonl\r\n"
    async with answering(arena) as pool:
        limits = {"max_timeout_s": 0.2, "default_timeout_s": 0.2, "body_gap_s": 30.0}
        async with serving(pool, tmp_path / "jobs", **limits) as client:

            async def slowly() -> AsyncIterator[bytes]:
                for _ in range(5):
                    yield b"1\n"
                    await asyncio.sleep(0.1)  # in all more than max_timeout_s

            made = await client.post("/jobs", content=slowly(), headers=JSONL)
            assert (made.status_code, made.json()["num_instances"]) == (202, 5)
        limits["body_gap_s"] = 0.2
        async with serving(pool, tmp_path / "others", **limits) as client:
            reader, writer = await asyncio.open_connection(
                client.base_url.host, client.base_url.port
            )
            writer.write(head + b"content-length: 1000\r\n\r\n1\n")
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
            assert answer.startswith(b"HTTP/1.1 408 ")
            writer.close()
            await until(lambda: not spooled(tmp_path))
            assert (await client.get("/jobs")).json()["jobs"] == []
