import asyncio
import io
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from inferpool.service.api.codecs.body import Limits
from inferpool.service.api.exchange import Exchange, Predict, is_predict
from inferpool.service.errors import (
    DeadlineExceededError,
    InvalidInputError,
    ModelFailedError,
    OverloadedError,
    ServiceError,
    TooLargeError,
    UnavailableError,
    WorkerCrashedError,
)
from inferpool.service.queue.instance import InstanceTiming, Result
from inferpool.workers.shared.messages import TensorBlob
from tests.service.api.codecs.test_json import JPEG
from tests.service.api.codecs.test_tensors import npy
from tests.service.api.fakes import FakeModel, NoWire, call, endpoint, post, result, spec

if TYPE_CHECKING:
    from inferpool.service.api.exchange import Call

IMAGE = {"content-type": "image/jpeg"}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"


def test_an_image_is_answered_with_its_prediction() -> None:
    model = FakeModel(lambda _: result(b'[{"label":"cat"}]'))
    headers = [*IMAGE.items(), ("accept", "text/html"), ("accept", "*/*")]  # which are joined
    response = post(endpoint(model), content=JPEG, headers=headers)
    assert response.status_code == 200
    assert response.json() == {"predictions": [[{"label": "cat"}]]}
    assert response.headers["content-type"] == "application/json"
    assert model.bodies == [JPEG]


def test_the_path_chooses_the_model() -> None:
    one, two = FakeModel(name="one"), FakeModel(name="two")
    predict = Predict({"one": one, "two": two}, default="two")
    post(predict, "/predict/one", content=b"1", headers=IMAGE)
    post(predict, "/predict", content=b"2", headers=IMAGE)
    post(predict, "/predict/", content=b"3", headers=IMAGE)
    assert (one.bodies, two.bodies) == ([b"1"], [b"2", b"3"])
    assert post(Predict({"one": one}), content=b"x", headers=IMAGE).status_code == 404


def test_every_answer_has_ids_and_timings() -> None:
    for content in (b"x", b""):
        headers = post(endpoint(FakeModel()), content=content, headers=IMAGE).headers
        assert len(headers["x-request-id"]) == 32
        version, trace_id, span_id, flags = headers["traceparent"].split("-")
        assert (version, len(trace_id), len(span_id), flags) == ("00", 32, 16, "00")
        assert "total;dur=" in headers["server-timing"]


def test_server_timing_shows_the_stages_of_the_slowest_instance() -> None:
    timings = [InstanceTiming(0.001, 0.02, 0.3), InstanceTiming(0.004, 0.005, 0.006)]
    model = FakeModel(lambda index: Result(b"1", timings[index]))
    response = post(endpoint(model), json={"instances": [1, 2]})
    stages = [
        stage.strip().split(";dur=") for stage in response.headers["server-timing"].split(",")
    ]
    assert [name for name, _ in stages] == ["queue", "preprocess", "inference", "total"]
    assert [float(value) for _, value in stages][:3] == [4.0, 20.0, 300.0]


def test_a_request_id_is_kept_and_a_trace_is_continued_if_it_is_one() -> None:
    headers = {
        **IMAGE,
        "x-request-id": "abc:1",
        "traceparent": f"00-{TRACE}-{SPAN}-01",
        "tracestate": "a=1",
    }
    found = post(endpoint(FakeModel()), content=b"x", headers=headers).headers
    assert found["x-request-id"] == "abc:1"
    assert found["tracestate"] == "a=1"
    _, trace_id, span_id, flags = found["traceparent"].split("-")
    assert (trace_id, flags) == (TRACE, "01")
    assert span_id != SPAN
    headers["traceparent"] = "00-junk"
    found = post(endpoint(FakeModel()), content=b"x", headers=headers).headers
    assert "tracestate" not in found
    assert len(found["traceparent"]) == 55


@pytest.mark.parametrize(
    ("headers", "query", "timeout_s", "priority", "parameters"),
    [
        ({"x-timeout-ms": "2500", "x-priority": "2"}, "?top_k=3", 2.5, 2, b'{"top_k":3}'),
        ({}, "", 7, 5, b""),
        ({"x-timeout-ms": "300001"}, "", 300, 5, b""),
        ({"x-timeout-ms": "9" * 5000}, "", 300, 5, b""),
    ],
    ids=["given", "defaults", "too long", "far too long"],
)
def test_options_reach_the_model_within_their_limits(
    headers: dict[str, str], query: str, timeout_s: float, priority: int, parameters: bytes
) -> None:
    model = FakeModel()
    began = time.monotonic()
    predict = endpoint(model, limits=Limits(default_timeout_s=7))
    post(predict, f"/predict{query}", content=b"x", headers=IMAGE | headers)
    (ref,) = model.refs
    assert began + timeout_s <= ref.deadline <= time.monotonic() + timeout_s
    assert (ref.priority, ref.parameters) == (priority, parameters)
    assert not ref.wants_tensors


def test_instances_are_answered_in_their_order_with_errors_in_place() -> None:
    replies: list[Result | Exception] = [result(b"0"), ModelFailedError("it raised"), result(b"2")]
    model = FakeModel(
        lambda index: replies[index], refusals=[None, None, None, OverloadedError("full")]
    )
    response = post(endpoint(model), json={"instances": ["a", "b", "c", "d"]})
    assert response.status_code == 200
    failed = {"code": "model_error", "message": "it raised", "status": 500}
    refused = {"code": "overloaded", "message": "full", "status": 429}
    assert response.json() == {"predictions": [0, {"error": failed}, 2, {"error": refused}]}
    assert model.bodies == [b'"a"', b'"b"', b'"c"']
    all_refused = [OverloadedError("full", retry_after_s=4), UnavailableError("gone")]
    response = post(endpoint(FakeModel(refusals=all_refused)), json={"instances": [1, 2]})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "4"
    errors = [(each["index"], each["status"]) for each in response.json()["errors"]]
    assert errors == [(0, 429), (1, 503)]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OverloadedError("full"), 429),
        (TooLargeError("big"), 413),
        (InvalidInputError("no"), 422),
        (ModelFailedError("no"), 500),
        (WorkerCrashedError("no"), 500),
        (UnavailableError("no", retry_after_s=2), 503),
        (DeadlineExceededError("no"), 504),
    ],
)
@pytest.mark.parametrize("is_refused", [False, True])
def test_an_error_of_the_only_instance_ends_the_call(
    error: ServiceError, status: int, is_refused: bool
) -> None:
    done: list[tuple[str, int, float]] = []
    model = FakeModel(refusals=[error]) if is_refused else FakeModel(lambda _: error)
    predict = endpoint(model, on_done=lambda *what: done.append(what))
    response = post(predict, content=b"x", headers={**IMAGE, "x-request-id": "id-1"})
    document = response.json()
    assert response.status_code == status == done[0][1]
    assert response.headers["content-type"] == "application/problem+json"
    assert document["request_id"] == response.headers["x-request-id"] == "id-1"
    assert (document["code"], document["instance"]) == (error.code, "/predict")


async def test_call_that_is_over_holds_no_outputs() -> None:
    headers = [(b"content-type", b"image/jpeg")]
    exchange = Exchange.open(NoWire(), endpoint(FakeModel()), "POST", "/predict", b"", headers)
    exchange.call.outcomes.append(asyncio.Future())
    exchange.close(200)
    assert not exchange.call.outcomes


def test_tensors_are_answered_in_the_form_that_is_accepted() -> None:
    blob = TensorBlob("y", "float32", (2,), np.ones(2, np.float32).tobytes())
    model = FakeModel(lambda _: result([blob]), inputs=[spec(-1, 3)])
    body = npy(np.zeros((4, 3), np.float32))
    headers = {"content-type": "application/x-npy", "accept": "application/x-npy"}
    response = post(endpoint(model), content=body, headers=headers)
    assert np.array_equal(np.load(io.BytesIO(response.content)), np.ones((4, 2)))
    assert len(model.payloads) == 4
    assert all(ref.wants_tensors for ref in model.refs)


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "detail"),
    [
        ("GET", "/predict", {}, 405, "/predict takes POST, not GET"),
        ("DELETE", "/predict", {}, 405, "/predict takes POST, not DELETE"),
        ("POST", "/predict/none", IMAGE, 404, "no model is called 'none'; there are: fake"),
        ("POST", "/predict/fake/x", IMAGE, 404, "no model is called 'fake/x'"),
        ("POST", "/predict", {}, 415, "Content-Type is missing"),
        ("POST", "/predict", {**IMAGE, "accept": "text/html"}, 406, "Accept: text/html allows"),
        ("POST", "/predict", {**IMAGE, "x-timeout-ms": "0"}, 400, "milliseconds, from 1"),
        ("POST", "/predict", {**IMAGE, "x-timeout-ms": "1.5"}, 400, "X-Timeout-Ms: must be"),
        ("POST", "/predict", {**IMAGE, "x-timeout-ms": "-1"}, 400, "X-Timeout-Ms: must be"),
        ("POST", "/predict", {**IMAGE, "x-priority": "0"}, 400, "X-Priority: must be 1 (first)"),
        ("POST", "/predict", {**IMAGE, "x-priority": "10"}, 400, "X-Priority"),
        ("POST", "/predict?a=1&a=2", IMAGE, 400, "the query has 'a' more than once"),
        ("POST", "/predict", {**IMAGE, "content-length": "99999999"}, 413, "16777216 bytes"),
        ("POST", "/predict", {**IMAGE, "content-length": "x"}, 400, "Content-Length"),
    ],
)
def test_a_call_that_cannot_be_answered_says_why(
    method: str, path: str, headers: dict[str, str], status: int, detail: str
) -> None:
    model = FakeModel()
    response = call(endpoint(model), method, path, content=b"x", headers=headers)
    assert response.status_code == status
    assert detail in response.json()["detail"]
    assert response.headers.get("allow") == ("POST" if status == 405 else None)
    assert not model.payloads


def test_each_call_is_recorded_once() -> None:
    done: list[tuple[str, int]] = []
    seen: list[tuple[Call, int]] = []
    predict = endpoint(
        FakeModel(),
        on_done=lambda model, status, _: done.append((model, status)),
        on_failure=lambda call, status, _: seen.append((call, status)),
    )
    post(predict, content=b"x", headers=IMAGE)
    post(predict, "/predict/none", content=b"x", headers=IMAGE)
    assert done == [("fake", 200), ("unknown", 404)]
    assert [(each.path, each.num_instances, status) for each, status in seen] == [
        ("/predict/none", 0, 404),
    ]


@pytest.mark.parametrize(
    "request_", [{"content": b"x", "headers": IMAGE}, {"json": {"instances": [1, 2]}}]
)
def test_a_bug_is_logged_and_answered(
    request_: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = FakeModel(lambda _: ZeroDivisionError("secret"))
    response = post(endpoint(model), **request_)
    assert response.status_code == 500
    assert response.json()["code"] == "internal_error"
    assert "secret" not in response.text
    assert "ZeroDivisionError" in caplog.text
    record = caplog.records[0]
    assert vars(record)["request_id"] == response.headers["x-request-id"]
    assert vars(record)["trace_id"] == response.headers["traceparent"].split("-")[1]


def test_instances_that_the_service_cancels_are_an_error_that_can_be_retried() -> None:
    class Cancelling(FakeModel):
        def _settle(self, future: "asyncio.Future[Result]", reply: object) -> None:
            future.cancel()

    for request_ in ({"content": b"x", "headers": IMAGE}, {"json": {"instances": [1, 2]}}):
        assert post(endpoint(Cancelling()), **request_).status_code == 503


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/predict", True), ("/predict/m", True), ("/predictions", False), ("/", False)],
)
def test_the_paths_of_the_endpoint(path: str, expected: bool) -> None:
    assert is_predict(path) is expected


def test_a_place_in_an_instance_is_named_with_the_number_of_the_instance() -> None:
    replies = [
        result(b"1"),
        InvalidInputError("instance.x[0]: no"),
        InvalidInputError("an instance"),
    ]
    response = post(endpoint(FakeModel(lambda n: replies[n])), json={"instances": [1, 2, 3]})
    messages = [each["error"]["message"] for each in response.json()["predictions"][1:]]
    assert messages == ["instances[1].x[0]: no", "an instance"]
