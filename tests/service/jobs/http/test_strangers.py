"""Jobs over HTTP as clients use them that are unlucky, or mean no good."""

import asyncio
from pathlib import Path

import pytest

from inferpool.service.jobs.http.results import choose_result_format
from inferpool.workers.arena import Arena
from tests.service.jobs.http.test_routes import body, served


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
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
            assert answer.startswith(b"HTTP/1.1 " + status)
            writer.close()


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
