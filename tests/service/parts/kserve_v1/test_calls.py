"""Calls of KServe's version 1 over ASGI, to a model that answers as told."""

import json
from typing import Any

import httpx
import pytest

from inferpool.models.spec import Interface
from inferpool.service.api.codecs.body import Limits
from inferpool.service.errors import (
    DeadlineExceededError,
    ModelFailedError,
    OverloadedError,
    QuarantinedError,
    UnavailableError,
)
from inferpool.workers.shared.messages import ContentBlob
from tests.service.api.fakes import FakeModel, call, endpoint, post, result, spec

PATH = "/v1/models/fake:predict"
PICTURE = b"\xff\xd8\xff\xe0"


def ask(model: FakeModel, body: object, path: str = PATH, **request: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return post(
        endpoint(model, limits=Limits(max_json_bytes=1000)), path, content=content, **request
    )


def kinds(model: FakeModel) -> list[tuple[str, bytes]]:
    return [(each.kind, body) for each, body in zip(model.payloads, model.bodies, strict=True)]


@pytest.mark.parametrize("media_type", [None, "application/json", "text/plain"])
def test_instances_are_answered_in_their_order_whatever_the_content_type_is(
    media_type: str | None,
) -> None:
    model = FakeModel(outputs=[spec(2)])
    headers = {} if media_type is None else {"content-type": media_type}
    answer = ask(model, {"instances": [{"a": 1}, "b"], "parameters": {"k": 3}}, headers=headers)
    assert (answer.status_code, answer.json()) == (200, {"predictions": [0, 1]})
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-model-version"] == "1"
    assert kinds(model) == [("json", b'{"a": 1}'), ("json", b'"b"')]
    assert all(json.loads(ref.parameters) == {"k": 3} for ref in model.refs)
    assert not any(ref.wants_tensors for ref in model.refs)


def test_base64_in_an_object_is_an_image_or_bytes() -> None:
    model = FakeModel()
    assert ask(model, {"instances": [{"b64": "/9j/4A=="}, {"b64": "aGFsbG8="}]}).is_success
    assert kinds(model) == [("image", PICTURE), ("bytes", b"hallo")]


def test_a_model_says_what_a_text_is_and_whether_json_is_a_document() -> None:
    model = FakeModel(interface=Interface(accepts="image", envelope=False))
    answer = ask(model, {"instances": ["/9j/4A==", {"x": 1}]})
    assert answer.json() == {"predictions": [0, 1]}
    assert kinds(model) == [("image", PICTURE), ("document", b'{"x": 1}')]


def test_what_tensorflow_serving_calls_the_only_signature_is_accepted() -> None:
    model = FakeModel()
    body = {"signature_name": "serving_default", "instances": [1], "parameters": {"inputs": 2}}
    assert ask(model, body).json() == {"predictions": [0]}
    assert model.refs[0].parameters == b'{"inputs": 2}'
    assert ask(model, {"instances": [{"inputs": [1]}]}).json() == {"predictions": [1]}
    assert model.bodies[1] == b'{"inputs": [1]}'


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 400, "empty"),
        (b"{", 400, "malformed JSON"),
        (b"\xff", 400, "the body"),
        (b'{"instances": "\xff"}', 400, "UTF-8"),
        ({"instances": []}, 400, "is empty"),
        ({"instances": 3}, 400, "instances"),
        ({"instance": [3]}, 400, "unknown field"),
        ({"instances": [{"b64": "#"}]}, 400, "instances[0].b64"),
        ({"instances": [1], "parameters": []}, 400, "parameters"),
        ({"inputs": {"x": [1]}}, 400, "by column"),
        ({"signature_name": "other", "instances": [1]}, 400, "serving_default"),
        ({"signature_name": 3, "instances": [1]}, 400, "unknown field"),
        (b'{"signature_name": "serving_default", "instances": [1', 400, "malformed"),
        (b'{"signature_name": "serving_default"}', 400, "instances"),
        (b'{"inputs":' + b"[" * 200 + b"]" * 200 + b"}", 400, "by column"),
        (b'{"inputs":' + b"[" * 5000, 413, "limit for JSON"),
        (b'{"instances":' + b"[" * 200 + b"]" * 200 + b"}", 400, "deep"),
        ({"instances": ["a" * 1000]}, 413, "limit for JSON"),
        ({"instances": [1] * 300}, 413, "more than 256"),
    ],
)
def test_a_body_that_does_not_fit_gets_a_sentence_and_no_422(
    body: object, status: int, said: str
) -> None:
    answer = ask(FakeModel(), body)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    assert said in answer.json()["error"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OverloadedError("the queue is full"), 429),
        (UnavailableError("no worker is ready"), 503),
        (DeadlineExceededError("too late"), 504),
        (ModelFailedError("forward raised"), 500),
        (QuarantinedError("killed workers"), 400),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_an_instance_that_fails_fails_the_call_and_is_named(
    error: Any, status: int, at_once: bool
) -> None:
    model = FakeModel(
        lambda index: error if index == 1 else result(), refusals=[None, error] * at_once
    )
    answer = ask(model, {"instances": [1, 2, 3]})
    assert answer.status_code == status
    assert answer.json()["error"] == f"instances[1]: {error.message}"
    assert "instances" not in error.message  # calls may share it
    assert ("retry-after" in answer.headers) == (status in (429, 503))
    assert ask(FakeModel(lambda _: error), {"instances": [1]}).status_code == status


def test_content_comes_in_base64() -> None:
    blob = ContentBlob(media_type="image/png", data=b"hallo")
    answer = ask(FakeModel(lambda _: result(blob)), {"instances": [1]})
    assert answer.json() == {"predictions": [{"b64": "aGFsbG8=", "media_type": "image/png"}]}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/models/fake/versions/1:predict", 404),
        ("/v1/models/other:predict", 404),
        ("/v1/models/:predict", 404),
        ("/v1/models//:predict", 404),
        ("/v1/models/a/b/c:predict", 404),
        ("/v1/models/f%61ke:predict", 200),
    ],
)
def test_the_path_names_the_model_and_maybe_its_version(path: str, status: int) -> None:
    answer = ask(FakeModel(), {"instances": [1]}, path)
    assert answer.status_code == status
    assert status == 200 or isinstance(answer.json()["error"], str)


def test_wrong_methods_and_compressed_bodies_are_refused_in_the_same_words() -> None:
    model = FakeModel()
    for method in ("GET", "PUT", "DELETE"):
        answer = call(endpoint(model), method, PATH)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert isinstance(answer.json()["error"], str)
    answer = ask(model, {"instances": [1]}, headers={"content-encoding": "br"})
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "identity")
    assert "Content-Encoding" in answer.json()["error"]
