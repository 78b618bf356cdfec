"""The checks of a cluster, over made-up answers of its front end."""

import socket
import ssl
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from inferpool.service.checks.findings import Finding
from inferpool.service.tools.doctor.cluster import ClusterConnection, check_cluster

MODELS: list[Any] = []


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def host(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "state": "connected",
        "devices": ["2 CPU cores"],
        "version": "1.2",
        "torch": "2.9",
        "python": "3.12",
        "workers": 2,
        "workers_ready": 2,
        "round_trip_s": 0.0004,
        "clock_offset_s": 0.01,
        **changes,
    }


def health(port: int, *hosts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "status": "ready",
        "models": MODELS,
        "version": "1.2",
        "torch": "2.9",
        "python": "3.12",
        "cluster_address": f"0.0.0.0:{port}",
        "hosts": hosts,
        **changes,
    }


def found(
    told: dict[str, Any], measured: httpx.Response | None = None, *, admin_key: str = "k"
) -> dict[str, Finding]:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(200, json=told)
        assert request.method == "POST"
        assert request.headers["authorization"] == "Bearer k"
        speed = {"host": "x", "to_bytes_per_s": 512_000_000, "from_bytes_per_s": 400_000_000}
        return measured or httpx.Response(200, json=speed)

    connection = ClusterConnection(
        "http://127.0.0.1:9",
        ssl.create_default_context(),
        admin_key=admin_key,
        transport=httpx.MockTransport(answer),
    )
    findings = list(check_cluster(connection))
    connection.close()
    return {finding.check: finding for finding in findings}


def test_a_sound_cluster_gets_a_table_and_the_images_that_each_connection_carries(port: int):
    findings = found(health(port, host("a"), host("b")))
    assert {finding.level for finding in findings.values()} == {"ok"}
    assert findings["hosts"].message == "2 connected, with 4 workers that are ready"
    head, first, _ = findings["hosts"].rows
    assert len(head) == len(first)
    assert first[:8] == ("a", "1.2", "2.9", "3.12", "+0.010 s", "0.4 ms", "512 MB/s", "400 MB/s")
    assert findings["bandwidth of a"].message == (
        "512 MB/s to it, 400 MB/s from it: 5,000 images/s of 100 KiB at most"
    )
    assert findings["cluster port"].message.endswith(f":{port} can be reached from here")


def test_each_trouble_of_a_host_has_its_remedy(port: int):
    bad = host(
        "a",
        state="silent",
        workers_ready=1,
        last_beat_age_s=2.5,
        gpus=[{"index": 3, "up": False}],
    )
    far = host("b", clock_offset_s=-4.0, round_trip_s=0.05, torch="2.8")
    told = health(port, bad, far, lost_hosts=[{"name": "c", "state": "lost", "reason": "closed"}])
    findings = [str(finding) for finding in found(told).values()]
    assert any("torch 2.9" in text and "b has torch 2.8" in text for text in findings)
    assert any("GPU 3 is lost" in text for text in findings)
    assert any("host c: lost 0 s ago: closed" in text for text in findings)
    assert any("50.0 ms" in text for text in findings)


def test_a_clock_that_is_off_is_told_by_how_much(port: int):
    told = found(health(port, host("a", clock_offset_s=-4.0)))["host a"]
    assert (told.level, told.message.partition(",")[0]) == (
        "warning",
        "its clock is 4.0 s behind the front end's",
    )


def test_what_is_not_measured_is_said(port: int):
    told = found(health(port, host("a")), admin_key="")
    assert told["bandwidth"].level == "note"
    assert "INFERPOOL_ADMIN_KEYS" in told["bandwidth"].advice
    refusal = httpx.Response(404, json={"code": "not_found", "detail": "no host is there"})
    told = found(health(port, host("a")), refusal)
    assert "not measured: no host is there" in told["bandwidth of a"].message
    slow = httpx.Response(200, json={"to_bytes_per_s": 12_000_000, "from_bytes_per_s": 1e9})
    assert found(health(port, host("a")), slow)["bandwidth of a"].level == "warning"


def test_what_is_no_cluster_or_has_no_host_is_an_error(port: int):
    alone = found(health(port, cluster_address=None))["front end"]
    assert (alone.level, "--cluster-port" in alone.advice) == ("error", True)
    empty = found(health(port))["hosts"]
    assert (empty.level, "inferpool agent --join" in empty.advice) == ("error", True)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = found(health(0, cluster_address=f"127.0.0.1:{unused.getsockname()[1]}"))
    assert "cannot be reached from here" in closed["cluster port"].message


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (httpx.Response(401, json={}), "INFERPOOL_METRICS_KEYS"),
        (httpx.Response(200, text="<html>"), "no inferpool"),
        (httpx.ConnectError("refused"), "inferpool doctor --cluster http://HOST:PORT"),
    ],
)
def test_a_front_end_that_does_not_answer_is_one_error(answer: object, said: str):
    def handle(request: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, httpx.Response)
        return answer

    transport = httpx.MockTransport(handle)
    context = ssl.create_default_context()
    connection = ClusterConnection("http://127.0.0.1:9", context, transport=transport)
    (finding,) = check_cluster(connection)
    assert finding.level == "error"
    assert said in finding.message
