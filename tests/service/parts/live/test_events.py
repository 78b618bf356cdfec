import asyncio
import json
from collections import Counter
from collections.abc import MutableMapping, Sequence
from typing import Any

import pytest
from fastapi import FastAPI

from inferpool.service.api.auth import Guard
from inferpool.service.api.web import App
from inferpool.service.parts.live.sampler import MAX_STREAMS, events_router
from inferpool.service.settings.draft import read_keys
from tests.service.api.fakes import call
from tests.service.api.server import until

Message = MutableMapping[str, Any]


class FakeFeed:
    """Has the events that it is given, and then waits, or ends."""

    def __init__(self, *events: bytes, is_endless: bool = False) -> None:
        self.is_ending = False
        self._events = list(events)
        self._is_endless = is_endless

    def first(self) -> bytes:
        return b'{"history":[1]}'

    async def next(self) -> bytes:
        if self._is_endless:
            await asyncio.Event().wait()
        self.is_ending = len(self._events) == 1
        return self._events.pop(0)


def app_over(feed: FakeFeed) -> FastAPI:
    return App(version="0", routers=[events_router(feed, Guard())])


async def listen(
    app: FastAPI,
    *,
    hang_up: asyncio.Event,
    spec_version: str = "2.3",
    client: str = "10.0.0.1",
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> list[Message]:
    """Return all messages of one call until it is over."""
    sent: list[Message] = []

    async def receive() -> Message:
        await hang_up.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": spec_version},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/events",
        "raw_path": b"/events",
        "query_string": b"",
        "headers": list(headers),
        "client": (client, 1),
    }
    await app(scope, receive, send)
    return sent


def test_each_state_is_an_event_until_the_service_ends() -> None:
    response = call(app_over(FakeFeed(b"{}", b'{"last":1}')), "GET", "/events")
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-store"
    events = [event.split("\n") for event in response.text.strip().split("\n\n")]
    assert [event[:2] for event in events] == [["event: state", f"id: {n}"] for n in range(3)]
    data = [json.loads(event[2].removeprefix("data: ")) for event in events]
    assert data == [{"history": [1]}, {}, {"last": 1}]


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
async def test_a_stream_is_over_when_its_client_goes_and_its_place_is_free_again(
    spec_version: str,
) -> None:
    app = app_over(FakeFeed(is_endless=True))
    for _ in range(2):  # as many as may listen at once, twice
        gone = asyncio.Event()
        clients = [
            asyncio.create_task(listen(app, hang_up=gone, spec_version=spec_version))
            for _ in range(64)
        ]
        await asyncio.sleep(0)
        await until(lambda clients=clients: not any(each.done() for each in clients))
        for _ in range(100):
            await asyncio.sleep(0)
        refused = await listen(app, hang_up=gone)
        assert refused[0]["status"] == 429
        assert (b"retry-after", b"5") in refused[0]["headers"]
        gone.set()
        for sent in await asyncio.gather(*clients):
            assert sent[0]["status"] == 200
            assert sent[1]["body"].startswith(b"event: state\n")


@pytest.mark.parametrize("tells_keys_apart", [False, True])
async def test_whoever_takes_all_streams_leaves_some_for_others(tells_keys_apart: bool) -> None:
    keys = ["a-key-of-16-characters", "another-of-16-characters"]
    guard = Guard(predict=read_keys(",".join(keys[: 1 + tells_keys_apart])), share=0.75)
    app = App(version="0", routers=[events_router(FakeFeed(is_endless=True), guard)], guard=guard)
    gone = asyncio.Event()

    def stream(number: int) -> asyncio.Task[list[Message]]:
        who = {"client": f"10.0.0.{number}", "headers": [(b"x-api-key", keys[0].encode())]}
        if tells_keys_apart:
            who = {"headers": [(b"x-api-key", keys[number].encode())]}
        return asyncio.create_task(listen(app, hang_up=gone, **who))  # type: ignore[arg-type]  # of two types

    greedy = [stream(0) for _ in range(MAX_STREAMS)]
    await until(lambda: sum(each.done() for each in greedy) == MAX_STREAMS // 4)
    other = stream(1)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not other.done()
    gone.set()
    assert (await other)[0]["status"] == 200
    statuses = Counter(sent[0]["status"] for sent in await asyncio.gather(*greedy))
    assert statuses == {200: MAX_STREAMS * 3 // 4, 429: MAX_STREAMS // 4}


def test_head_gets_the_headers_and_no_stream() -> None:
    answer = call(app_over(FakeFeed(is_endless=True)), "HEAD", "/events")
    assert (answer.status_code, answer.content) == (200, b"")


def test_the_form_of_an_event_is_documented() -> None:
    document = call(app_over(FakeFeed()), "GET", "/openapi.json").json()
    answer = document["paths"]["/events"]["get"]["responses"]["200"]
    reference = answer["content"]["text/event-stream"]["schema"]["$ref"]
    state = document["components"]["schemas"][reference.rpartition("/")[2]]
    assert {"time", "health", "models", "history"} <= set(state["properties"])
