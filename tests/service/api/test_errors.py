import json

import pytest
from fastapi import FastAPI, HTTPException

from inferpool.service import errors
from inferpool.service.api.errors import TABLE, kind_of, problem
from inferpool.service.api.route_errors import install_error_handlers
from inferpool.service.errors import (
    BadRequestError,
    DeadlineExceededError,
    GivenUpError,
    InternalError,
    OverloadedError,
    ServiceError,
    UnavailableError,
)
from tests.service.api.fakes import call

MEMBERS = {
    *("type", "title", "status", "detail", "instance"),
    *("code", "error", "request_id", "retryable"),
}


def test_every_error_has_a_row_or_that_of_its_nearest_base() -> None:
    tree = {each for each in vars(errors).values() if isinstance(each, type)}
    tree -= {ServiceError, errors.StartError}  # the latter comes before there is a call
    assert tree <= TABLE.keys()
    codes = [each.code for each in TABLE]
    assert len(set(codes)) == len(codes)
    unknown = type("NoSlotError", (OverloadedError,), {"code": "no_slot"})
    assert kind_of(unknown("full")) is TABLE[OverloadedError]
    assert kind_of(ServiceError("what")) is TABLE[InternalError]


def test_a_problem_has_the_members_of_rfc_9457_and_ours() -> None:
    status, headers, body = problem(BadRequestError("bad X"), "id-1", "/predict/a b")
    document = json.loads(body)
    assert status == 400
    assert headers == [
        (b"content-type", b"application/problem+json"),
        (b"content-length", b"%d" % len(body)),
    ]
    assert document == {
        "type": "urn:problem-type:inferpool:bad_request",
        "title": "The request cannot be read",
        "status": 400,
        "detail": "bad X",
        "instance": "/predict/a%20b",
        "code": "bad_request",
        "error": "bad X",
        "request_id": "id-1",
        "retryable": False,
    }


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (OverloadedError("full", retry_after_s=7), b"7"),
        (OverloadedError("full", retry_after_s=0), b"1"),
        (UnavailableError("gone"), b"1"),
        (GivenUpError("never"), None),
        (DeadlineExceededError("late"), None),
    ],
)
def test_overload_says_when_to_come_back(error: ServiceError, seconds: bytes | None) -> None:
    _, headers, body = problem(error, "id", "/predict")
    assert dict(headers).get(b"retry-after") == seconds
    assert json.loads(body)["retryable"] is not isinstance(error, GivenUpError)


def make_app() -> FastAPI:
    app = FastAPI()
    install_error_handlers(app)

    @app.get("/count/{number}")
    async def count(number: int) -> int:
        return 1 // number

    @app.get("/busy")
    async def busy() -> None:
        raise OverloadedError("full", retry_after_s=3)

    @app.get("/teapot")
    async def teapot() -> None:
        raise HTTPException(418, "short and stout", headers={"x-spout": "yes"})

    return app


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "detail", "headers"),
    [
        ("GET", "/nowhere", 404, "not_found", "there is nothing at /nowhere; /docs lists", {}),
        ("POST", "/embed", 404, "not_found", "nothing at /embed; the setting `tei` turns it", {}),
        ("PUT", "/busy", 405, "method_not_allowed", "/busy takes GET, not PUT", {"allow": "GET"}),
        ("GET", "/count/x", 422, "invalid_input", "path.number: ", {}),
        ("GET", "/count/0", 500, "internal_error", "error of the service", {}),
        ("GET", "/busy", 429, "overloaded", "full", {"retry-after": "3"}),
        ("GET", "/teapot", 418, "im_a_teapot", "short and stout", {"x-spout": "yes"}),
    ],
)
def test_every_error_of_the_app_is_a_problem(
    method: str, path: str, status: int, code: str, detail: str, headers: dict[str, str]
) -> None:
    response = call(make_app(), method, path, headers={"x-request-id": "id-1"})
    document = response.json()
    assert response.status_code == document["status"] == status
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["x-request-id"] == document["request_id"] == "id-1"
    assert document.keys() >= MEMBERS
    assert document["code"] == code
    assert detail in document["detail"]
    assert headers.items() <= dict(response.headers).items()
    without_id = call(make_app(), method, path, headers={"x-request-id": "no good"})
    assert len(without_id.headers["x-request-id"]) == 32
