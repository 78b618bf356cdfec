"""The endpoint behind what users put around an ASGI application."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import fastapi
import pytest

from tests.service.api.fakes import FakeModel, as_app, endpoint, post
from tests.service.api.server import ONE, serve, silent_model, until

App = Callable[..., Awaitable[None]]
CallNext = Callable[[fastapi.Request], Awaitable[fastapi.Response]]


class Replaying:
    """Reads the body, as to check a signature, and gives it whole whenever it is asked."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.num_asked = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]

        async def replay() -> dict[str, object]:
            self.num_asked += 1
            assert self.num_asked < 100
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)


def in_fastapi(app: App, *, is_replayed: bool) -> fastapi.FastAPI:
    """A user's application with a middleware that may read the body, and puts it back."""
    outer = fastapi.FastAPI()

    @outer.middleware("http")
    async def look(request: fastapi.Request, call_next: CallNext) -> fastapi.Response:
        if is_replayed:
            body = await request.body()

            async def receive() -> dict[str, object]:
                return {"type": "http.request", "body": body}

            request._receive = receive  # type: ignore[assignment]  # as examples in the web do
        return await call_next(request)

    outer.mount("/", app)
    return outer


def test_middleware_may_give_the_body_again_without_blocking_the_loop() -> None:
    model = FakeModel()
    outer = Replaying(as_app(endpoint(model)))
    apps = [outer, in_fastapi(as_app(endpoint(model)), is_replayed=True)]
    for index, app in enumerate(apps):
        answer = post(app, content=b"abc", headers={"content-type": "image/png"})
        assert (answer.status_code, answer.json()) == (200, {"predictions": [index]})
    assert model.bodies == [b"abc", b"abc"]
    assert outer.num_asked <= 2


async def test_a_hangup_behind_middleware_logs_no_error(caplog: pytest.LogCaptureFixture) -> None:
    around = partial(in_fastapi, is_replayed=False)
    async with serve(silent_model(), "asgi", around=around) as server:
        async with server.connect() as client:
            client.send(ONE)
            await until(lambda: server.model.futures)
        await until(lambda: not server.server.server_state.tasks)
        assert server.model.futures[0].cancelled()
    assert server.statuses == [499]
    assert "No response returned" not in caplog.text
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("error", [None, BrokenPipeError(), RuntimeError()])
async def test_a_call_is_recorded_if_its_answer_cannot_be_sent(error: Exception | None) -> None:
    statuses: list[int] = []
    app = as_app(endpoint(FakeModel(), on_done=lambda _, status, __: statuses.append(status)))
    scope = {
        "type": "http", "method": "POST", "path": "/predict", "query_string": b"",
        "headers": [(b"content-type", b"image/png")],
    }  # fmt: skip
    messages = [{"type": "http.request", "body": b"abc"}]
    is_sending = asyncio.Event()

    async def receive() -> dict[str, object]:
        return messages.pop() if messages else await asyncio.Future()

    async def send(_: object) -> None:
        is_sending.set()
        if error is not None:
            raise error
        await asyncio.Future()  # nobody reads

    call = asyncio.ensure_future(app(scope, receive, send))
    await is_sending.wait()
    if error is None:
        call.cancel()
    (raised,) = await asyncio.gather(call, return_exceptions=True)
    kind = {None: asyncio.CancelledError, RuntimeError: RuntimeError}.get(error and type(error))
    assert raised is None if kind is None else isinstance(raised, kind)
    assert statuses == [499]
