"""Jobs over HTTP as clients use them that are unlucky, or mean no good."""

import asyncio
import threading
from pathlib import Path

import pytest

from inferpool.service.api.codecs.body import BodyContext
from inferpool.service.parts.jobs.http import reading
from inferpool.service.parts.jobs.http.reading import JobBody, read_body
from inferpool.service.parts.jobs.http.results import choose_result_format
from inferpool.workers.shared.arena import Arena
from tests.service.api.server import until
from tests.service.parts.jobs.http.test_routes import ANN, BEN, body, served, serving, spooled
from tests.service.parts.jobs.test_jobs import answering


async def test_a_body_is_refused_before_it_comes_if_its_head_shows_why(
    arena: Arena, tmp_path: Path
) -> None:
    head = (
        b"POST /jobs HTTP/1.1\r\nhost: h\r\ncontent-type: application/jsonl\r\n"
        b"content-length: 1000000\r\nexpect: 100-continue\r\n"
    )
    async with served(arena, tmp_path) as client:
        for line, status in (
            (b"content-encoding: gzip", b"415"),
            (b"x-model-version: 1", b"400"),
            (b"idempotency-key: " + b"k" * 256, b"400"),
        ):
            url = client.base_url
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(head + line + b"\r\n\r\n")
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
            assert answer.startswith(b"HTTP/1.1 " + status)
            writer.close()


async def test_a_page_that_follows_nothing_is_not_the_last_one(
    arena: Arena, tmp_path: Path
) -> None:
    ann, ben = ({"x-api-key": key} for key in (ANN, BEN))
    place = tmp_path / "jobs"
    async with answering(arena) as pool, serving(pool, place, keys=f"{ANN},{BEN}") as client:
        for id in ("a", "b", "c"):
            await client.put(f"/jobs/{id}", json=body(1), headers=ann)
            await client.get(f"/jobs/{id}?wait=60", headers=ann)
        first = (await client.get("/jobs?limit=1", headers=ann)).json()
        assert first["next"] == "c"
        rest = await client.get("/jobs?after=c", headers=ann)
        assert [job["id"] for job in rest.json()["jobs"]] == ["b", "a"]
        foreign = await client.get("/jobs?after=c", headers=ben)
        await client.delete("/jobs/c", headers=ann)
        for answer in (
            foreign,
            await client.get("/jobs?after=c", headers=ann),
            await client.get("/jobs?after=%00", headers=ann),
        ):
            assert (answer.status_code, answer.json()["code"]) == (404, "unknown_job")


@pytest.mark.parametrize("place", ["postgresql"], indirect=True)
async def test_ids_that_cannot_be_are_unknown(arena: Arena, place: str) -> None:
    async with answering(arena) as pool, serving(pool, place) as client:
        for id in ("%00", "-", "%ff", "a" * 65):
            for path in (f"/jobs/{id}", f"/jobs/{id}/result", f"/jobs/{id}/events"):
                answer = await client.get(path)
                assert (answer.status_code, answer.json()["code"]) == (404, "unknown_job")
            assert (await client.delete(f"/jobs/{id}")).status_code == 404


async def test_bodies_that_take_long_to_read_hold_up_nobody(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    def slowly(content_type: bytes, path: Path, head: BodyContext) -> JobBody:
        assert goes_on.wait(120)
        return read_body(content_type, path, head)

    monkeypatch.setattr(reading, "read_body", slowly)
    async with served(arena, tmp_path) as client:
        sending = [asyncio.create_task(client.post("/jobs", json=body(1))) for _ in range(40)]
        await until(lambda: len(spooled(tmp_path)) == len(sending))
        try:
            assert (await client.get("/jobs/none")).status_code == 404
        finally:
            goes_on.set()
        assert {(await task).status_code for task in sending} == {202}


async def test_methods_that_a_path_takes_are_told(arena: Arena, tmp_path: Path) -> None:
    async with served(arena, tmp_path) as client:
        for path, allowed in (
            ("/jobs", "GET, POST"),
            ("/jobs/a", "GET, PUT, DELETE"),
            ("/jobs/a/result", "GET"),
        ):
            answer = await client.request("TRACE", path)
            assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
            assert answer.json()["detail"] == f"{path} takes {allowed}, not TRACE"


async def test_no_longer_wait_is_promised_than_there_will_be(arena: Arena, tmp_path: Path) -> None:
    async with served(arena, tmp_path) as client:
        prefer = {"prefer": "respond-async, wait=100"}
        answer = await client.post("/predict", json=body(1), headers=prefer)
        assert answer.headers["preference-applied"] == "respond-async, wait=60"


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("", "json"),
        ("*/*", "json"),
        ("application/*", "json"),
        ("application/x-ndjson", "jsonl"),
        ("application/jsonl, application/json", "json"),
        ("application/json;q=0, application/jsonl", "jsonl"),
        ("*/*;q=0.1, application/jsonl", "jsonl"),
    ],
)
def test_the_form_of_a_result_is_chosen_by_quality(accept: str, wanted: str) -> None:
    assert choose_result_format(accept) == wanted
