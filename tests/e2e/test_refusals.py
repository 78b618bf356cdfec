"""Refusals of large bodies reach clients that send everything before they read. Real sockets."""

import json
import shutil
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.certificates import make_certificate
from tests.e2e.running import Running, running, until
from tests.ports import free_port

KEY, METRICS, ADMIN = "predict-0123456789", "metrics-0123456789", "admin-0123456789"
MIB = 1 << 20
BODY = bytes(8 * MIB)
TOO_LARGE = bytes(20 * MIB)
"""More than `max_body_bytes` and `max_job_bytes`."""
CHUNK_BYTES = 64 * 1024
PATIENCE_S = 60.0
BYTES = "content-type: application/octet-stream\r\n"
JSON = "content-type: application/json\r\n"
WITH_KEY = f"authorization: Bearer {KEY}\r\n"
WITH_ADMIN = f"authorization: Bearer {ADMIN}\r\n"
WITH_METRICS = f"authorization: Bearer {METRICS}\r\n"


class RefusedCall(NamedTuple):
    """One call that is refused before its body has been read."""

    line: str
    headers: str
    status: int
    body: bytes = BODY


ROWS = (
    RefusedCall("POST /predict", BYTES, 401),
    RefusedCall("POST /predict/nobody", BYTES + WITH_KEY, 404),
    RefusedCall("PUT /predict", BYTES + WITH_KEY, 405),
    RefusedCall("POST /predict", BYTES + WITH_KEY + "x-priority: 12\r\n", 400),
    RefusedCall("POST /predict", BYTES + WITH_KEY, 413, TOO_LARGE),
    RefusedCall(
        "POST /predict", JSON + WITH_KEY + "prefer: respond-async\r\nx-priority: 0\r\n", 400
    ),
    RefusedCall("POST /predict/no", JSON + WITH_KEY + "prefer: respond-async\r\n", 404),
    RefusedCall("POST /jobs", JSON, 401),
    RefusedCall("POST /jobs?model=nobody", JSON + WITH_KEY, 404),
    RefusedCall("POST /jobs", JSON + WITH_KEY + "x-priority: 12\r\n", 400),
    RefusedCall("POST /jobs", JSON + WITH_KEY + "content-encoding: gzip\r\n", 415),
    RefusedCall("POST /jobs?webhook=nonsense", JSON + WITH_KEY, 422),
    RefusedCall("POST /jobs", JSON + WITH_KEY, 413, TOO_LARGE),
    RefusedCall("PUT /jobs/-", JSON + WITH_KEY, 400),
    RefusedCall("PUT /jobs/one?model=nobody", JSON + WITH_KEY, 404),
    RefusedCall("GET /jobs/nothing", JSON + WITH_KEY, 404),
    RefusedCall("PATCH /jobs", JSON + WITH_KEY, 405),
    RefusedCall("POST /admin/models", JSON, 401),
    RefusedCall("POST /admin/models", JSON + WITH_ADMIN, 413, TOO_LARGE),
    RefusedCall("POST /admin/nothing", JSON + WITH_ADMIN, 404),
    RefusedCall("PATCH /admin/models", JSON + WITH_ADMIN, 405),
    RefusedCall("POST /health", JSON, 401),
    RefusedCall("POST /health", JSON + WITH_METRICS, 405),
    RefusedCall("POST /events", JSON + WITH_METRICS, 405),
    RefusedCall("POST /", JSON, 405),
    RefusedCall("POST /docs/assets/favicon.png", JSON, 405),
    RefusedCall("POST /nothing", JSON, 404),
    RefusedCall("POST /v1/models/echo:predict", JSON, 401),
    RefusedCall("POST /v1/models/nobody:predict", JSON + WITH_KEY, 404),
    RefusedCall("POST /v1/models/echo:predict", JSON + WITH_METRICS, 403),
    RefusedCall("POST /v1/models/echo:predict", JSON + WITH_KEY, 413, TOO_LARGE),
    RefusedCall("PUT /v1/models/echo:predict", JSON + WITH_KEY, 405),
    RefusedCall("POST /v1/models", JSON + WITH_KEY, 405),
    RefusedCall("POST /v1/models/echo", JSON + WITH_KEY, 405),
    RefusedCall("POST /v1/models", JSON, 401),
    RefusedCall("POST /v1/nothing", JSON + WITH_KEY, 404),
    RefusedCall("POST /v2/models/echo/infer", JSON, 401),
    RefusedCall("POST /v2/models/nobody/infer", JSON + WITH_KEY, 404),
    RefusedCall("POST /v2/models/echo/infer", JSON + WITH_METRICS, 403),
    RefusedCall("POST /v2/models/echo/infer", JSON + WITH_KEY, 413, TOO_LARGE),
    RefusedCall("GET /v2/models/echo/infer", JSON + WITH_KEY, 405),
    RefusedCall("POST /predictions/echo", JSON, 401),
    RefusedCall("POST /predictions/nobody", JSON + WITH_KEY, 404),
    RefusedCall("POST /predictions/echo/7", JSON + WITH_KEY, 404),
    RefusedCall("POST /predictions/echo", JSON + WITH_METRICS, 403),
    RefusedCall("PUT /echo/predict", BYTES + WITH_KEY, 413, TOO_LARGE),
    RefusedCall("OPTIONS /invocations?model_name=echo", JSON + WITH_KEY, 405),
)
FULL = RefusedCall("POST /jobs", JSON + WITH_KEY, 429)
"""RefusedCall while all uploads are taken."""


def framed(row: RefusedCall, framing: str, rest: str = "") -> bytes:
    head = f"{row.line} HTTP/1.1\r\nhost: h\r\n{row.headers}{rest}"
    if framing == "length":
        return f"{head}content-length: {len(row.body)}\r\n\r\n".encode() + row.body
    chunk = b"%x\r\n%b\r\n" % (CHUNK_BYTES, bytes(CHUNK_BYTES))
    chunks = chunk * (len(row.body) // CHUNK_BYTES)
    return f"{head}transfer-encoding: chunked\r\n\r\n".encode() + chunks + b"0\r\n\r\n"


def answer_to(service: Running, data: bytes, tls: ssl.SSLContext | None = None) -> int | str:
    """Send everything, then read: return the answer's status if all of it came."""
    with ExitStack() as stack:
        client = stack.enter_context(socket.create_connection(service.address, PATIENCE_S))
        if tls is not None:
            client = stack.enter_context(tls.wrap_socket(client, server_hostname="localhost"))
        try:
            client.sendall(data)
            with client.makefile("rb") as file:
                status = int(file.readline().split()[1])
                headers = dict(iter(lambda: file.readline().strip().lower().split(b": ", 1), [b""]))
                body = file.read(int(headers[b"content-length"]))
        except OSError as error:
            return f"{type(error).__name__}: {error}"
    found = json.loads(body)
    assert found.get("status", status) == status
    if "error" not in found:  # TorchServe's form
        assert (found["code"], bool(found["type"] and found["message"])) == (status, True)
        return status
    error = found["error"]
    assert isinstance(error["message"] if isinstance(error, dict) else error, str)
    return status


@pytest.fixture(scope="module", params=[1, 2], ids=["one front", "two fronts"])
def service(request: pytest.FixtureRequest, tmp_path_factory) -> Iterator[Running]:
    flags = ("--front-ends", str(request.param), "--replicas", "1")
    store = str(tmp_path_factory.mktemp("jobs"))
    env = {
        "INFERPOOL_PREDICT_KEYS": KEY,
        "INFERPOOL_METRICS_KEYS": METRICS,
        "INFERPOOL_ADMIN_KEYS": ADMIN,
        "INFERPOOL_MAX_JOB_BYTES": str(16 * MIB),
    }
    file = tmp_path_factory.mktemp("torchserve") / "config.properties"
    addresses = [
        f"{name}_address=http://127.0.0.1:{free_port()}" for name in ("management", "metrics")
    ]
    file.write_text("\n".join([*addresses, f"max_request_size={16 * MIB}"]))
    flags += ("--torchserve", str(file))
    with running("echo", *flags, "--job-store", store, env=env) as service:
        yield service


@contextmanager
def all_uploads_taken(service: Running) -> Iterator[None]:
    """Hold half bodies of jobs until no more are accepted."""
    head = f"{FULL.line} HTTP/1.1\r\nhost: h\r\n{FULL.headers}content-length: 99\r\n"
    with ExitStack() as stack:

        def is_full() -> bool:
            holder = stack.enter_context(socket.create_connection(service.address, PATIENCE_S))
            holder.sendall(f"{head}expect: 100-continue\r\n\r\n".encode())
            return not holder.recv(1 << 16).startswith(b"HTTP/1.1 100")

        until(is_full)
        yield


@pytest.mark.parametrize("framing", ["length", "chunks"])
@pytest.mark.parametrize("rest", ["", "connection: close\r\n"], ids=["kept", "closing"])
def test_a_client_that_sends_all_before_it_reads_gets_its_refusal(
    service: Running, framing: str, rest: str
) -> None:
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda row: answer_to(service, framed(row, framing, rest)), ROWS))
    wrong = {row[:3]: status for row, status in zip(ROWS, found, strict=True) if status != row[2]}
    assert wrong == {}
    with all_uploads_taken(service):
        assert answer_to(service, framed(FULL, framing, rest)) == 429


@pytest.mark.parametrize("row", [*ROWS, FULL], ids=lambda row: f"{row.line} {row.status}")
def test_a_body_that_is_refused_is_not_asked_for(service: Running, row: RefusedCall) -> None:
    head = f"{row.line} HTTP/1.1\r\nhost: h\r\n{row.headers}expect: 100-continue\r\n"
    with ExitStack() as stack:
        if row is FULL:
            stack.enter_context(all_uploads_taken(service))
        client = stack.enter_context(socket.create_connection(service.address, PATIENCE_S))
        client.sendall(f"{head}content-length: {len(row.body)}\r\n\r\n".encode())
        with client.makefile("rb") as file:
            data = file.read()  # to its end: the body never comes, so the connection is of no use
    assert data.startswith(b"HTTP/1.1 %d " % row.status)
    assert data.count(b"HTTP/1.1 ") == 1
    assert b"\r\nconnection: close\r\n" in data


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_refusals_reach_clients_over_tls(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    context = ssl.create_default_context(cafile=str(certificate))
    tls = ("--tls-certificate", str(certificate), "--tls-key", str(key))
    store = ("--job-store", str(tmp_path / "jobs"))
    with running("echo", "--replicas", "1", *tls, *store) as service:
        for row in (
            RefusedCall("POST /predict/nobody", BYTES, 404),
            RefusedCall("POST /jobs?model=nobody", JSON, 404),
            RefusedCall("POST /predict", BYTES, 413, TOO_LARGE),
        ):
            data = framed(row, "length", "connection: close\r\n")
            assert answer_to(service, data, context) == row.status
