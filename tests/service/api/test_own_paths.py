"""Calls at a path that a model has of its own, besides `/predict/NAME`."""

import json

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from inferpool.models.spec import Interface
from inferpool.service.api.auth import Guard
from inferpool.service.api.codecs.body import Limits
from inferpool.service.api.cors import Cors
from inferpool.service.api.exchange import Predict, path_of
from inferpool.service.api.web import App
from inferpool.service.settings.draft import read_keys
from tests.service.api.fakes import FakeModel, call, post, result
from tests.service.api.server import ONE, serve

KEY = "a-key-of-sixteen-characters"
BARE = Interface(envelope=False, path="/classify")
JSON = {"content-type": "application/json"}


def at_own_path(interface: Interface = BARE, **options: object) -> tuple[Predict, FakeModel]:
    model = FakeModel(lambda index: result(b'{"n":%d}' % index), interface=interface)
    entries = {"fake": model, path_of("fake", 1): model, interface.path: model}
    return Predict(entries, default="other", **options), model  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["/classify", "/classify/", "/cl%61ssify", "/predict/fake"])
def test_a_call_at_its_path_is_answered_as_at_its_name(path: str):
    predict, model = at_own_path()
    answer = post(predict, path, content=b'{"x": 1}', headers=JSON)
    assert (answer.status_code, answer.json()) == (200, {"n": 0})
    assert answer.headers["x-model-version"] == "1"
    assert model.bodies == [b'{"x": 1}']


def test_without_an_envelope_several_values_are_a_list_and_errors_stay_problems():
    predict, _ = at_own_path(limits=Limits(max_body_bytes=100))
    files = [("x", ("a", b"1", "application/octet-stream"))]
    assert post(predict, "/classify", files=files * 2).status_code == 413
    predict, _ = at_own_path()
    assert post(predict, "/classify", files=files).json() == {"n": 0}
    predict, _ = at_own_path()
    assert post(predict, "/classify", files=files * 2).json() == [{"n": 0}, {"n": 1}]
    for body, status in ((b"{", 400), (b"[" * 200, 422)):
        answer = post(predict, "/classify", content=body, headers=JSON)
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["instance"] == "/classify"


def test_a_call_at_a_path_may_name_a_version():
    predict, _ = at_own_path()
    named = JSON | {"x-model-version": "1"}
    assert post(predict, "/classify", content=b"1", headers=named).status_code == 200
    answer = post(predict, "/classify", content=b"1", headers=named | {"x-model-version": "2"})
    assert answer.status_code == 404
    assert "fake has no version '2' loaded; there are: 1" in answer.json()["detail"]


def test_a_path_is_guarded_and_open_to_pages_like_others():
    guard = Guard(predict=read_keys(KEY))
    done: list[tuple[str, int]] = []
    predict, _ = at_own_path(
        guard=guard,
        cors=Cors(["http://app"]),
        on_done=lambda name, status, s: done.append((name, status)),
    )
    assert post(predict, "/classify", content=b"1", headers=JSON).status_code == 401
    known = JSON | {"x-api-key": KEY, "origin": "http://app"}
    answer = post(predict, "/classify", content=b"1", headers=known)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "http://app"
    asking = {"origin": "http://app", "access-control-request-method": "POST"}
    assert call(predict, "OPTIONS", "/classify", headers=asking).status_code == 204
    assert call(predict, "GET", "/classify", headers=known).status_code == 405
    assert done == [("fake", 401), ("fake", 200), ("fake", 405)]


def test_an_application_answers_there_too_and_nowhere_near_it():
    predict, model = at_own_path()
    app = App(version="1", guard=Guard(predict=read_keys(KEY)))
    app.predict = predict
    assert post(app, "/classify", content=b"1", headers=JSON).json() == {"n": 0}
    for path in ("/classify/more", "/classify2", "/classif", "//classify"):
        assert post(app, path, content=b"1", headers=JSON).status_code == 404
    del predict.models["/classify"]  # type: ignore[attr-defined]  # it is a dict
    assert post(app, "/classify", content=b"1", headers=JSON).status_code == 404
    answer = post(predict, "/classify", content=b"1", headers=JSON)
    assert "no model has the path '/classify' now; there are: fake" in answer.json()["detail"]
    assert len(model.bodies) == 1


async def test_a_head_at_a_path_is_known_when_it_comes_again():
    head = ONE[:-1].replace(b"/predict", b"/classify").replace(b"image/png", b"application/json")
    async with serve() as server:
        server.model.interface = BARE
        server.protocol.predict.models["/classify"] = server.model  # type: ignore[index]  # a dict
        async with server.connect() as client:
            answers = [await client.ask(head + body) for body in (b"1", b"2", b"3")]
        assert len(server.protocol.known_heads) == 1
    assert [json.loads(each.body) for each in answers] == [0, 1, 2]
    assert server.model.bodies == [b"1", b"2", b"3"]


def test_a_path_is_found_below_the_path_of_a_mount():
    predict, _ = at_own_path()
    app = App(version="1")
    app.predict = predict
    mounted = Starlette(routes=[Mount("/models", app)])
    assert post(mounted, "/models/classify", content=b"1", headers=JSON).json() == {"n": 0}
    assert post(mounted, "/classify", content=b"1", headers=JSON).status_code == 404


async def test_a_path_is_found_below_the_root_path_that_a_proxy_has_left():
    call = ONE.replace(b"/predict", b"/root/classify").replace(b"image/png", b"application/json")
    async with serve() as server:
        server.model.interface = BARE
        predict = server.protocol.predict
        predict.models["/classify"] = server.model  # type: ignore[index]  # it is a dict
        predict.root_path = b"/root"
        assert (await server.answer_to(call.replace(b"x", b"1"))).status == 200
        assert (await server.answer_to(call.replace(b"/root", b""))).status == 400
