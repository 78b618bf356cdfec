"""What became of a change, for those who asked for it and did not wait."""

import asyncio
from collections.abc import Callable

import httpx
import pytest
from fastapi import FastAPI

from inferpool.service.api.errors import CALL_KEY
from inferpool.service.api.exchange import begin_call
from inferpool.service.api.route_errors import install_error_handlers
from inferpool.service.parts.swap.changes import Changes
from inferpool.service.parts.swap.routes import models_router
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.errors import WorkerStartError
from tests.service.catalog.test_catalog import ROOM, Kept
from tests.service.pools import until

ASYNC = {"prefer": "respond-async"}


class Asked:
    """Asks the routes of changes over a catalog of fake workers."""

    def __init__(self, arena: Arena, **options: float) -> None:
        self.kept = kept = Kept(arena)
        self.changes = Changes(kept.catalog, kept.metrics, None, ROOM, grace_s=5)
        app = FastAPI()
        install_error_handlers(app)
        app.include_router(models_router(self.changes, **options))

        async def with_call(scope, receive, send):
            call = begin_call(scope["method"], scope["path"], b"", scope["headers"])
            await app({**scope, CALL_KEY: call}, receive, send)

        transport = httpx.ASGITransport(app=with_call)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://host", headers=ASYNC)

    async def ready(self) -> "Asked":
        await until(lambda: self.kept.catalog.serving["m"].is_ready)
        return self

    async def over(self, name: str, id: str) -> dict[str, object]:
        """Return a change once it is decided."""
        while True:
            info = (await self.http.get(f"/admin/models/{name}")).json()
            (change,) = (each for each in info["changes"] if each["id"] == id)
            if change["state"] != "going_on":
                return dict(change)
            await asyncio.sleep(0.001)


@pytest.fixture
def make(arena: Arena) -> Callable[..., Asked]:
    return lambda **options: Asked(arena, **options)


async def test_a_swap_that_is_refused_between_two_looks_still_says_why(make):
    asked = await make().ready()
    asked.kept.engine.failures = [WorkerStartError("there is no file new.pth", permanent=True)] * 9
    begun = await asked.http.post("/admin/models/m/versions", json={"options": {"path": "new.pth"}})
    assert begun.status_code == 202
    assert begun.headers["location"] == "../../../admin/models/m"
    (change,) = begun.json()["changes"]
    assert (change["kind"], change["state"]) == ("swap", "going_on")
    ended = await asked.over("m", change["id"])
    assert (ended["state"], ended["code"], ended["version"]) == ("failed", "version_refused", 2)
    assert "there is no file new.pth" in str(ended["reason"])
    await until(lambda: not asked.changes.model_info("m").change)
    asked.kept.engine.failures = []
    later = await asked.http.post("/admin/models/m/versions", json={"policy": "force"})
    assert (await asked.over("m", later.json()["changes"][0]["id"]))["state"] == "done"
    info = (await asked.http.get("/admin/models/m")).json()
    assert [each["state"] for each in info["changes"]] == ["done", "failed"]
    assert [each["state"] for each in info["versions"]][1:] == ["refused", "kept"]


async def test_a_swap_to_what_certainly_cannot_be_loaded_makes_no_version(make):
    asked = await make().ready()
    begun = await asked.http.post("/admin/models/m/versions", json={"weights": "new.pth"})
    ended = await asked.over("m", begun.json()["changes"][0]["id"])
    assert (ended["state"], ended["code"], ended["version"]) == ("failed", "invalid_input", None)
    assert "weights: echo takes no weights, but was given 'new.pth'" in str(ended["reason"])
    await until(lambda: not asked.changes.model_info("m").change)
    info = (await asked.http.get("/admin/models/m")).json()
    assert [each["state"] for each in info["versions"]] == ["serving"]
    now = await asked.http.post(
        "/admin/models/m/versions", json={"source": "no_such:Net"}, headers={"prefer": ""}
    )
    assert (now.status_code, now.json()["code"]) == (422, "invalid_input")
    assert "source: there is no module 'no_such'" in now.json()["detail"]


async def test_a_change_that_is_asked_for_again_with_its_key_is_made_once(make):
    asked = await make().ready()

    async def swap(key: str, **body: object) -> httpx.Response:
        headers = {"idempotency-key": key, "prefer": ""}
        body = {"policy": "force", **body}
        return await asked.http.post("/admin/models/m/versions", json=body, headers=headers)

    first, repeated = await asyncio.gather(swap("a"), swap("a"))
    later = await swap("a")
    assert [each.status_code for each in (first, repeated, later)] == [200] * 3
    assert {each.json()["version"] for each in (first, repeated, later)} == {2}
    other = await swap("a", rollback_s=1)
    assert (other.status_code, other.json()["code"]) == (422, "invalid_input")
    asked.kept.engine.failures = [WorkerStartError("no file", permanent=True)] * 9
    refused = [await swap("b"), await swap("b")]
    assert [each.status_code for each in refused] == [422] * 2
    assert refused[0].json()["detail"] == refused[1].json()["detail"]
    assert asked.changes.model_info("m").versions[0].number == 3
    assert (await swap("")).status_code == 400
    assert (await swap("x" * 300)).status_code == 400


async def test_a_model_that_fails_to_come_is_remembered_but_not_listed(make):
    asked = make()
    asked.kept.engine.failures = [WorkerStartError("no module named nets", permanent=True)] * 9
    begun = await asked.http.post("/admin/models", json={"name": "n", "source": "echo"})
    ended = await asked.over("n", begun.json()["changes"][0]["id"])
    assert (ended["kind"], ended["state"]) == ("add", "failed")
    assert "no module named nets" in str(ended["reason"])
    await until(lambda: "n" not in asked.changes._changes)
    info = (await asked.http.get("/admin/models/n")).json()
    assert (info["version"], info["ready"], info["change"]) == (None, False, "")
    assert [each["state"] for each in info["versions"]] == ["refused"]
    listed = (await asked.http.get("/admin/models")).json()["models"]
    assert [each["name"] for each in listed] == ["m"]
    assert (await asked.http.delete("/admin/models/n")).status_code == 404


async def test_a_model_that_is_being_added_cannot_be_removed_yet(make):
    asked = make()
    begun = await asked.http.post("/admin/models", json={"name": "n", "source": "echo"})
    answer = await asked.http.delete("/admin/models/n")
    assert answer.status_code == 409
    assert "n is being changed already (add" in answer.json()["detail"]
    assert (await asked.over("n", begun.json()["changes"][0]["id"]))["state"] == "done"


async def test_a_version_to_go_back_to_is_remembered_beyond_those_that_were_refused(make):
    asked = await make().ready()
    body = {"policy": "force", "rollback_s": 0}

    async def swapped() -> object:
        answer = await asked.http.post("/admin/models/m/versions", json=body)
        (state,) = {(await asked.over("m", answer.json()["changes"][0]["id"]))["state"]}
        await until(lambda: not asked.changes.model_info("m").change)
        return state

    assert await swapped() == "done"
    since = (await asked.http.get("/admin/models/m")).json()["versions"][0]["since"]
    for _ in range(25):
        asked.kept.engine.failures = [WorkerStartError("it has a bug", permanent=True)]
        assert await swapped() == "failed"
    info = (await asked.http.get("/admin/models/m")).json()
    states = {each["number"]: (each["state"], each["since"]) for each in info["versions"]}
    assert len(states) == 20
    assert states[2] == ("serving", since)
    assert states[1][0] == "gone"
    rollback = await asked.http.post("/admin/models/m/rollback")
    assert rollback.status_code == 202


async def test_a_removal_is_shown_until_what_was_accepted_is_answered_and_then_the_model_is_gone(
    make,
):
    asked = await make().ready()
    asked.kept.are_fronts_slow = True
    begun = await asked.http.delete("/admin/models/m")
    assert begun.status_code == 202
    (change,) = begun.json()["changes"]
    await until(lambda: "m" not in asked.kept.catalog.serving)
    info = (await asked.http.get("/admin/models/m")).json()
    assert (info["changes"][0]["id"], info["version"]) == (change["id"], None)
    asked.kept.told.set()
    await until(lambda: "m" not in asked.changes._changes)
    assert (await asked.http.get("/admin/models/m")).status_code == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/admin/models", {"name": "n", "source": "echo", "devices": "cuda:7"}),
        ("/admin/models/m/versions", {"devices": "cuda:7"}),
    ],
    ids=["add", "swap"],
)
async def test_who_waits_gets_the_error_of_a_change_that_fails_at_once(make, path, body):
    asked = await make().ready()
    answer = await asked.http.post(path, json=body, headers={"prefer": ""})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_input")
    assert "cuda:7" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"", 400, "the body is not JSON"),
        (b'{"name": "\xff"}', 400, "the body is not JSON"),
        (b'{"name": "\\ud800"}', 400, "the body is not JSON"),
        (b"[" * 100_000, 400, "the body is not JSON"),
        (b'{"options": {"n": 1%b}}' % (b"0" * 5000), 400, "the body is not JSON"),
        (b'["m"]', 400, "must be a JSON object"),
        (b" " * (1 << 18) + b"{}", 413, "larger than 262144 bytes"),
        (b'{"name": ["n"]}', 422, "cannot be a model's name"),
        (b'{"name": "m", "source": "echo"}', 409, "there is a model 'm'"),
    ],
)
async def test_a_body_that_cannot_be_used_is_refused(make, body, status, text):
    answer = await make().http.post("/admin/models", content=body)
    assert answer.status_code == status
    assert text in answer.json()["detail"]


async def test_a_change_that_takes_too_long_for_one_answer_goes_on(make):
    asked = await make(answer_s=0.01).ready()
    body = {"wait_s": 60}  # for live inputs
    answer = await asked.http.post("/admin/models/m/versions", json=body, headers={"prefer": ""})
    assert (answer.status_code, answer.headers["location"]) == (202, "../../../admin/models/m")
    assert "preference-applied" not in answer.headers
    assert answer.json()["changes"][0]["state"] == "going_on"


async def test_models_that_failed_to_come_are_forgotten_in_the_end(make, monkeypatch):
    monkeypatch.setattr("inferpool.service.parts.swap.records._NUM_ABSENT", 2)
    asked = make()
    for name in ("a", "b", "c"):
        asked.kept.engine.failures = [WorkerStartError("it has a bug", permanent=True)] * 9
        begun = await asked.http.post("/admin/models", json={"name": name, "source": "echo"})
        await asked.over(name, begun.json()["changes"][0]["id"])
        await until(lambda name=name: name not in asked.changes._changes)
    statuses = [(await asked.http.get(f"/admin/models/{name}")).status_code for name in "abc"]
    assert statuses == [404, 200, 200]
    assert set(asked.changes._history._records) <= {"b", "c", "m"}
