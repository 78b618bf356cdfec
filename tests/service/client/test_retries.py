"""Retries of the clients, and answers of other servers, which a fake transport gives."""

import email.utils
import json
import socket
import ssl
import threading
import time

import httpx
import pytest

from inferpool.service.api.errors import TABLE, problem
from inferpool.service.client import (
    Client,
    ConnectError,
    DeadlineExceededError,
    InferpoolError,
    OverloadedError,
    ProtocolError,
    Retry,
    UnavailableError,
)
from inferpool.service.client.errors import (
    AnswerError,
    GivenUpError,
    InternalError,
    UnauthorizedError,
    error_class,
)
from inferpool.service.client.retries import RetryBudget, pause_before_retry, retry_after_s
from inferpool.service.errors import NotSavedError, RestartFailedError, VersionRefusedError
from tests.certificates import make_certificate
from tests.service.client.conftest import open_client

GOOD = httpx.Response(200, json={"predictions": [1]})
FAST = Retry(backoff_s=0.01)
PROBLEM = {"content-type": "application/problem+json"}
SAFETENSORS = {"content-type": "application/safetensors"}


def transport_of(*answers):
    """Return a transport that gives or raises each in turn; `.requests` has the requests."""
    left = list(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        transport.requests.append(request)
        current = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(current, Exception):
            raise current
        return httpx.Response(current.status_code, headers=current.headers, content=current.content)

    transport = httpx.MockTransport(answer)
    transport.requests = []
    return transport


def failure(answer, kind=InferpoolError, **options):
    """Ask once where each answer is this one, and return the error."""
    transport = transport_of(answer) if isinstance(answer, httpx.Response) else answer
    with Client(transport=transport, **options) as client, pytest.raises(kind) as raised:
        client.predict("x")
    return raised.value


def refusal(status: int, **headers: str) -> httpx.Response:
    return httpx.Response(status, headers=headers, text="<html>no</html>")


ADMIN_ERRORS = (NotSavedError, RestartFailedError, VersionRefusedError)


def test_every_error_of_the_service_has_a_type_here():
    for cls, kind in TABLE.items():
        if kind.status in (405, 414, 431, 499) or cls in ADMIN_ERRORS:
            continue  # the clients cannot cause these
        status, headers, body = problem(cls("because"), "id-1", "/predict")
        error = failure(httpx.Response(status, headers=headers, content=body), retries=0)
        assert "because" in str(error)
        assert type(error) is error_class(cls.code, status)
        assert type(error).code == error.code == cls.code
        assert (error.status, error.is_retryable) == (status, kind.is_retryable)
        assert type(error).is_retryable == kind.is_retryable
        assert error.request_id
    assert issubclass(GivenUpError, UnavailableError)


def problem_answer(**changes: object) -> httpx.Response:
    document = {"code": "x", "detail": "x", "retryable": True, **changes}
    return httpx.Response(503, headers=PROBLEM, json=document)


@pytest.mark.parametrize(
    ("answer", "cls"),
    [
        (refusal(401), UnauthorizedError),
        (refusal(429), OverloadedError),
        (refusal(502), UnavailableError),
        (refusal(504), DeadlineExceededError),
        (refusal(500), InternalError),
        (refusal(418), AnswerError),
        (refusal(302, Location="http://elsewhere"), ProtocolError),
        (httpx.Response(200, text="<html>log in</html>"), ProtocolError),
        (httpx.Response(200, json={"predictions": 1}), ProtocolError),
        (httpx.Response(200, content=b"\x08", headers=SAFETENSORS), ProtocolError),
        (httpx.Response(200, content=b"[" * 200_000), ProtocolError),
        (httpx.Response(503, headers=PROBLEM, text="{"), UnavailableError),
        (problem_answer(retry_after_s="soon"), UnavailableError),
        (problem_answer(errors=None), UnavailableError),
    ],
)
def test_status_decides_the_error_of_a_foreign_answer(answer, cls):
    assert type(failure(answer, retries=0)) is cls


def test_redirection_is_not_followed_and_says_where_to():
    transport = transport_of(refusal(301, Location="https://host/predict"), GOOD)
    assert "https://host/" in str(failure(transport, ProtocolError))
    assert len(transport.requests) == 1


def test_refusals_and_broken_connections_are_retried_and_failures_are_not():
    for passing in (
        refusal(503),
        refusal(502),
        refusal(429),
        httpx.ConnectError("refused"),
        httpx.RemoteProtocolError("the server disconnected"),
        httpx.ReadError("reset"),
    ):
        transport = transport_of(passing, passing, GOOD)
        with Client(transport=transport, retries=FAST) as client:
            assert client.predict("x").num_attempts == 3
        ids = {request.headers["x-request-id"] for request in transport.requests}
        assert len(ids) == 1
        assert {request.content for request in transport.requests} == {b'{"instances":["x"]}'}
    for lasting in (refusal(500), refusal(422), refusal(504)):
        transport = transport_of(lasting, GOOD)
        failure(transport, retries=FAST)
        assert len(transport.requests) == 1


def test_after_sending_false_leaves_a_broken_connection_alone():
    retries = Retry(backoff_s=0.01, after_sending=False)
    transport = transport_of(httpx.ReadError("reset"), GOOD)
    error = failure(transport, ConnectError, retries=retries)
    assert "may have read" in error.__notes__[0]
    transport = transport_of(httpx.ConnectError("refused"), GOOD)
    with Client(transport=transport, retries=retries) as client:
        assert client.predict("x").num_attempts == 2


def test_each_attempt_tells_the_service_the_time_left():
    transport = transport_of(refusal(503), refusal(503), GOOD)
    with Client(transport=transport, retries=Retry(backoff_s=0.1), timeout_s=600) as client:
        client.predict("x")
        first, second, third = [int(each.headers["x-timeout-ms"]) for each in transport.requests]
        assert 500_000 <= first <= 599_900  # so that its 504 arrives in time
        assert first - 50 >= second
        assert second - 100 >= third
        client.predict("x", timeout_s=None)
    assert "x-timeout-ms" not in transport.requests[-1].headers


@pytest.mark.measures
def test_retry_after_is_kept_but_not_past_the_deadline():
    late = refusal(429, **{"Retry-After": "20"})
    transport = transport_of(late, GOOD)
    started = time.monotonic()
    error = failure(transport, OverloadedError, timeout_s=10)
    assert time.monotonic() - started < 5
    assert error.retry_after_s == 20
    assert "past the deadline" in error.__notes__[0]
    error = OverloadedError("full", retry_after_s=3)
    retry = Retry()
    pauses = [
        pause_before_retry(
            error,
            retry=retry,
            budget=RetryBudget(retry),
            num_attempts=num_attempts,
            left_s=100,
            was_sent=True,
        )
        for num_attempts in (1, 4, 7)
    ]
    assert 3.05 <= pauses[0] <= 3.1
    assert 3.4 <= pauses[1] <= 3.8
    assert 5.5 <= pauses[2] <= 8


@pytest.mark.parametrize(
    ("value", "expected"),
    [("7", 7.0), ("", None), ("soon", None), ("-1", None), ("1.5", None), ("\xb2", None)],
)
def test_retry_after_as_a_number(value: str, expected: float | None):
    headers = httpx.Headers([(b"Retry-After", value.encode("latin-1"))])
    assert retry_after_s(headers) == expected


def test_retry_after_of_years_ends_a_call_without_deadline():
    transport = transport_of(refusal(503, **{"Retry-After": "9" * 11}), GOOD)
    error = failure(transport, UnavailableError, timeout_s=None)
    assert "longer than anyone waits" in error.__notes__[0]


def test_retry_after_as_a_date_uses_the_clock_of_the_server():
    now = 1_000_000_000  # years ago, by ours
    headers = {
        "Retry-After": email.utils.formatdate(now + 12, usegmt=True),
        "Date": email.utils.formatdate(now, usegmt=True),
    }
    assert retry_after_s(httpx.Headers(headers)) == 12
    del headers["Date"]
    assert retry_after_s(httpx.Headers(headers)) == 0


def test_budget_limits_the_retries_of_a_client():
    now = 0.0
    budget = RetryBudget(Retry(budget_ratio=0.2, budget_reserve=10, budget_per_s=1), lambda: now)
    assert sum(budget.withdraw() for _ in range(20)) == 10
    taken = 0
    for _ in range(100):
        budget.deposit()
        taken += budget.withdraw()
    assert 19 <= taken <= 20
    now = 5.0
    assert sum(budget.withdraw() for _ in range(20)) in (5, 6)


def test_spent_budget_ends_retries_that_reach_the_service():
    retries = Retry(backoff_s=0.001, budget_reserve=3, budget_ratio=0, budget_per_s=0)
    error = failure(refusal(503), UnavailableError, retries=retries)
    assert error.num_attempts == 4
    assert "lately" in error.__notes__[0]
    transport = transport_of(httpx.ConnectError("refused"), *[httpx.ConnectError("")] * 5, GOOD)
    with Client(transport=transport, retries=retries) as client:
        assert client.predict("x").num_attempts == 7  # costs the service nothing


def test_attempts_are_limited_and_each_retry_is_reported():
    transport = transport_of(refusal(503))
    retries = Retry(max_attempts=3, backoff_s=0.001)
    told = []
    options = {"retries": retries, "on_retry": lambda *each: told.append(each)}
    failure(transport, UnavailableError, **options)
    assert len(transport.requests) == 3
    assert [(error.status, pause_s < 0.01) for error, pause_s in told] == [(503, True)] * 2


@pytest.mark.measures
def test_silent_and_trickling_servers_meet_the_deadline(kind):
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
    for trickle in (b"", answer):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            stop = threading.Event()
            server = threading.Thread(target=_trickle, args=(listener, trickle, stop), daemon=True)
            server.start()
            started = time.monotonic()
            with open_client(kind, url, timeout_s=0.3) as client:
                with pytest.raises(DeadlineExceededError) as raised:
                    client.predict("x")
                assert raised.value.status is None
            assert 0.25 <= time.monotonic() - started < 15
            stop.set()
            server.join(60)


def _trickle(listener: socket.socket, answer: bytes, stop: threading.Event) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.sendall(answer)
        while not stop.wait(0.02):
            try:
                connection.sendall(b"x" if answer else b"")
            except OSError:
                return


def test_untrusted_certificate_is_not_retried_and_a_trusted_one_works(tmp_path):
    certificate, key = make_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    answer = b'HTTP/1.1 200 OK\r\nContent-Length: 19\r\n\r\n{"predictions":[1]}'
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"

        def serve():
            connection, _ = listener.accept()
            with connection, pytest.raises(ssl.SSLError):
                context.wrap_socket(connection, server_side=True)
            connection, _ = listener.accept()
            with context.wrap_socket(connection, server_side=True) as secure:
                secure.recv(65536)
                secure.sendall(answer)
                secure.recv(65536)

        server = threading.Thread(target=serve)
        server.start()
        with Client(url, timeout_s=60) as client, pytest.raises(ConnectError) as raised:
            client.predict("x")
        with Client(url, timeout_s=60, verify=str(certificate)) as client:
            assert client.predict("x").value == 1
        server.join(60)
    assert raised.value.num_attempts == 1
    assert "certificate" in str(raised.value).lower()


def test_key_headers_and_model_are_sent():
    transport = transport_of(GOOD)
    with Client(
        "http://host/prefix/", key=" secret\n", headers={"X-Tenant": "a"}, transport=transport
    ) as client:
        client.predict("x", model="a b/c", priority=2, parameters={"k": 1})
    (request,) = transport.requests
    assert request.url.raw_path == b"/prefix/predict/a%20b%2Fc"
    assert request.headers["authorization"] == "Bearer secret"
    assert request.headers["x-tenant"] == "a"
    assert request.headers["x-priority"] == "2"
    assert request.headers["host"] == "host"
    assert json.loads(request.content) == {"instances": ["x"], "parameters": {"k": 1}}
