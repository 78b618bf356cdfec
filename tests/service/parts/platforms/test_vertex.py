"""Calls as Vertex AI makes them, over ASGI, to a model that answers as told."""

import json
from typing import Any

import httpx
import pytest

from inferpool.models.spec import Interface
from inferpool.service.api.codecs.body import Limits
from inferpool.service.api.optional_calls import calls_of
from inferpool.service.errors import ModelFailedError, UnavailableError
from tests.service.api.fakes import FakeModel, call, endpoint, kinds_of

ROUTE = "/v1/endpoints/1/deployedModels/2:predict"


class Asked:
    """Settings that turn on nothing but the path."""

    tei = torchserve = sagemaker = None

    def __init__(self, route: str) -> None:
        self.vertex_predict_route = route


def ask(model: FakeModel, body: object, route: str = ROUTE, **request: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    predict = endpoint(model, limits=Limits(max_json_bytes=1000))
    predict.optional = calls_of(Asked(route))
    return call(predict, request.pop("method", "POST"), route, content=content, **request)


@pytest.mark.parametrize("route", [ROUTE, "/predict", "/v2/x", "/health", "/a:b"])
@pytest.mark.parametrize("media_type", [None, "application/json; charset=utf-8"])
def test_instances_go_to_the_default_model_whatever_the_path_is(route, media_type):
    model = FakeModel()
    headers = {} if media_type is None else {"content-type": media_type}
    answer = ask(model, {"instances": [1, "b"], "parameters": {"k": 1}}, route, headers=headers)
    assert (answer.status_code, answer.json()) == (200, {"predictions": [0, 1]})
    assert kinds_of(model) == [("json", b"1"), ("json", b'"b"')]
    assert json.loads(model.refs[0].parameters) == {"k": 1}


@pytest.mark.parametrize(
    ("media_type", "body", "payload"),
    [
        ("image/jpeg", b"\xff\xd8\xff\xe0", ("image", b"\xff\xd8\xff\xe0")),
        ("text/plain", b"abc", ("json", b'"abc"')),
        ("application/octet-stream", b"abc", ("bytes", b"abc")),
        (None, b"\xff\xd8\xff\xe0", ("image", b"\xff\xd8\xff\xe0")),
    ],
)
def test_a_raw_body_is_read_as_by_predict(media_type, body, payload):
    model = FakeModel()
    headers = {} if media_type is None else {"content-type": media_type}
    answer = ask(model, body, headers=headers)
    assert (answer.status_code, answer.json()) == (200, {"predictions": [0]})
    assert kinds_of(model) == [payload]


def test_a_model_of_documents_gets_raw_ones_and_those_in_instances():
    model = FakeModel(interface=Interface(envelope=False))
    headers = {"content-type": "application/json"}
    assert ask(model, {"x": 1}, headers=headers).json() == 0
    assert ask(model, {"instances": [2, 3]}, headers=headers).json() == {"predictions": [1, 2]}
    assert kinds_of(model) == [("document", b'{"x": 1}'), ("document", b"2"), ("document", b"3")]


@pytest.mark.parametrize("body", [b"", b"{", {"x": 1}, {"instances": []}, {"instances": [1] * 999}])
def test_errors_are_texts_in_an_object(body):
    answer = ask(FakeModel(), body, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500
    assert isinstance(answer.json()["error"], str)


def test_other_failures_have_statuses_that_say_so():
    failing = FakeModel(lambda _: ModelFailedError("it raised ValueError"))
    answer = ask(failing, {"instances": [1]})
    assert (answer.status_code, answer.json()["error"]) == (500, "it raised ValueError")
    full = FakeModel(refusals=[UnavailableError("later", retry_after_s=3)])
    answer = ask(full, {"instances": [1]})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
    assert ask(FakeModel(), b"", method="GET").status_code == 405
