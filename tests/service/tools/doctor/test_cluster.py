"""The checks of a cluster, over made-up answers of its front end."""

import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from inferpool.service.checks.findings import Finding
from inferpool.service.tools.doctor.cluster import ClusterConnection, check_cluster
from tests.ports import free_port

VERSIONS = {"version": "1.2", "torch": "2.9", "python": "3.12"}
SPEED = {"host": "x", "to_bytes_per_s": 512_000_000, "from_bytes_per_s": 400_000_000}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def host(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "state": "connected",
        "devices": ["2 CPU cores"],
        "workers": 2,
        "workers_ready": 2,
        "round_trip_s": 0.0004,
        "clock_offset_s": 0.01,
        **VERSIONS,
        **changes,
    }


def health(port: int, *hosts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    address = f"0.0.0.0:{port}"
    told = {"status": "ready", "models": [], "cluster_address": address, "hosts": hosts}
    return {**told, **VERSIONS, **changes}


def checked(
    answer: Callable[[httpx.Request], httpx.Response], admin_key: str = "k"
) -> dict[str, Finding]:
    connection = ClusterConnection(
        "http://127.0.0.1:9",
        ssl.create_default_context(),
        admin_key=admin_key,
        transport=httpx.MockTransport(answer),
    )
    findings = list(check_cluster(connection))
    connection.close()
    return {finding.check: finding for finding in findings}


def found(told: dict[str, Any], *, admin_key: str = "k", speed: Any = SPEED) -> dict[str, Finding]:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(200, json=told)
        assert request.method == "POST"
        assert request.headers["authorization"] == "Bearer k"
        return httpx.Response(404 if "code" in speed else 200, json=speed)

    return checked(answer, admin_key)


def test_a_sound_cluster_gets_a_table_and_the_images_that_each_connection_carries(port: int):
    findings = found(health(port, host("a"), host("b")))
    assert {finding.level for finding in findings.values()} == {"ok"}
    assert findings["hosts"].message == "2 connected, with 4 workers that are ready"
    head, first, _ = findings["hosts"].rows
    assert len(head) == len(first)
    assert first[:8] == ("a", "1.2", "2.9", "3.12", "+0.010 s", "0.4 ms", "512 MB/s", "400 MB/s")
    assert "5,000 images/s of 100 KiB at most" in findings["bandwidth of a"].message
    assert findings["cluster port"].message.endswith(f":{port} can be reached from here")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"torch": "2.8"}, "a has torch 2.8"),
        ({"gpus": [{"index": 3, "up": False}]}, "GPU 3 is lost"),
        ({"round_trip_s": 0.05}, "50.0 ms"),
        ({"clock_offset_s": -4.0}, "its clock is 4.0 s behind the front end's"),
        ({"state": "silent", "last_beat_age_s": 2.5}, "no sign of life for 2.5 s"),
        ({"workers_ready": 1}, "1 of 2 workers are ready"),
    ],
)
def test_each_trouble_of_a_host_is_a_warning_or_worse(port: int, changes: Any, said: str):
    findings = found(health(port, host("a", **changes))).values()
    (text,) = [str(each) for each in findings if each.level != "ok" and said in each.message]
    assert "a" in text


def test_what_is_lost_slow_or_not_measured_is_said(port: int):
    lost = {"name": "c", "state": "lost", "reason": "closed"}
    assert "lost 0 s ago: closed" in found(health(port, lost_hosts=[lost]))["host c"].message
    told = found(health(port, host("a")), admin_key="")
    assert told["bandwidth"].level == "note"
    assert "INFERPOOL_ADMIN_KEYS" in told["bandwidth"].advice
    refusal = {"code": "not_found", "detail": "no host is there"}
    told = found(health(port, host("a")), speed=refusal)
    assert "not measured: no host is there" in told["bandwidth of a"].message
    slow = {**SPEED, "to_bytes_per_s": 12_000_000}
    assert found(health(port, host("a")), speed=slow)["bandwidth of a"].level == "warning"


def test_what_is_no_cluster_or_has_no_host_is_an_error(port: int):
    alone = found(health(port, cluster_address=None))["front end"]
    assert (alone.level, "--cluster-port" in alone.advice) == ("error", True)
    empty = found(health(port))["hosts"]
    assert (empty.level, "inferpool agent --join" in empty.advice) == ("error", True)
    closed = found(health(0, cluster_address=f"127.0.0.1:{free_port()}"))
    assert "cannot be reached from here" in closed["cluster port"].message


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (httpx.Response(401, json={}), "INFERPOOL_METRICS_KEYS"),
        (httpx.Response(200, text="<html>"), "no inferpool"),
        (None, "inferpool doctor --cluster http://HOST:PORT"),
    ],
)
def test_a_front_end_that_does_not_answer_is_one_error(answer: httpx.Response | None, said: str):
    def handle(request: httpx.Request) -> httpx.Response:
        if answer is None:
            raise httpx.ConnectError("refused")
        return answer

    (finding,) = checked(handle).values()
    assert (finding.level, said in finding.message) == ("error", True)
