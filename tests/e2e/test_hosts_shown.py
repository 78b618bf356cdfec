"""Hosts are seen everywhere: a real front end, and the agents of two hosts as processes."""

import json
import os
import re
import signal
from collections.abc import Iterator, Mapping
from subprocess import CompletedProcess
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.collector import FakeCollector, attributes, collecting
from tests.e2e import forked
from tests.e2e.hosts import RunningCluster, cluster
from tests.e2e.running import faulty, until

ADMIN = "a-key-for-operators-of-hosts"


@pytest.fixture(scope="module")
def collector() -> Iterator[FakeCollector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def hosts(collector: FakeCollector) -> Iterator[RunningCluster]:
    env = {"INFERPOOL_ADMIN_KEYS": ADMIN, "INFERPOOL_TRACE_ENDPOINT": collector.url}
    with cluster("first", "second", settings=faulty(), env=env) as hosts:
        yield hosts


def command(*arguments: str, key: str = ADMIN) -> CompletedProcess[str]:
    env = {**os.environ, "INFERPOOL_ADMIN_KEYS": key}
    return forked.run([*forked.COMMAND, *arguments], env=env, timeout=120)


def is_well(host: Mapping[str, Any]) -> bool:
    """Return whether a host has told all of itself lately, as one on a busy machine may not."""
    forks = host["forkserver"] is not None and host["forkserver"]["state"] == "ready"
    return bool(forks and host["round_trip_s"] is not None and host["state"] == "connected")


def test_health_shows_each_host_and_the_host_of_each_worker(hosts: RunningCluster):
    until(lambda: all(is_well(host) for host in hosts.hosts().values()))
    health = hosts.service.get("/health").json()
    assert health["cluster_address"] == f"127.0.0.1:{hosts.port}"
    assert [host["name"] for host in health["hosts"]] == ["first", "second"]
    for host in health["hosts"]:
        assert host["pid"] == hosts.agents[host["name"]].process.pid
        assert (host["workers"], host["workers_ready"]) == (1, 1)
        for what in ("version", "torch", "python"):
            assert host[what] == health[what] != ""
        assert abs(host["clock_offset_s"]) < 5  # it is the same clock
        assert host["arena_bytes"] > 0
        assert "CPU core" in host["devices"][-1]
    assert {worker["host"] for worker in hosts.service.workers()} == {"first", "second"}


def test_metrics_have_the_host(hosts: RunningCluster):
    text = hosts.service.metrics()
    for name in ("first", "second"):
        assert f'inferpool_host_up{{host="{name}"}} 1.0' in text
        assert f'inferpool_host_workers_ready{{host="{name}"}} 1.0' in text
        assert re.search(rf'inferpool_worker_up\{{device="cpu",host="{name}",[^}}]*\}} 1\.0', text)
    assert "inferpool_hosts 2.0" in text


def test_the_work_of_another_host_lies_inside_its_call_in_a_trace(
    hosts: RunningCluster, collector: FakeCollector
):
    trace_id = f"{7:032x}"
    headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    assert hosts.service.predict({"n": 5}, headers=headers)[0]["twice"] == 10
    until(lambda: collector.of_trace(trace_id))
    spans = {span.name: span for span in collector.of_trace(trace_id)}
    (root,) = (span for span in spans.values() if span.kind == Span.SPAN_KIND_SERVER)
    queue, prepare, compute = spans["queue"], spans["prepare"], spans["compute"]
    for span in (prepare, compute):
        assert attributes(span.attributes)["inferpool.host"] in ("first", "second")
        assert root.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano
    assert queue.end_time_unix_nano == prepare.start_time_unix_nano
    assert prepare.start_time_unix_nano <= compute.start_time_unix_nano


def test_top_shows_the_hosts(hosts: RunningCluster):
    shown = command("top", "--once", "--url", hosts.service.url).stdout
    assert re.search(r"first +(connected|silent) +1 of 1", shown)
    assert re.search(r"\d +ready +second +cpu", shown)


@pytest.mark.slow
def test_doctor_measures_each_connection(hosts: RunningCluster):
    until(lambda: all(is_well(host) for host in hosts.hosts().values()))
    done = command("doctor", "--cluster", hosts.service.url, "--json")
    found = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    assert (done.returncode, done.stderr) == (0, "")
    assert found["cluster port"]["level"] == "note" or "can be reached" in str(found)
    assert found["versions"]["level"] == "ok"
    for name in ("first", "second"):
        assert "images/s of 100 KiB" in found[f"bandwidth of {name}"]["message"]
    other = command("doctor", "--cluster", hosts.service.url, "--json", key="")
    assert "not measured" in other.stdout


def test_the_log_names_the_host_of_a_worker_that_ends(hosts: RunningCluster):
    (worker,) = hosts.workers_of("second")
    os.kill(worker["pid"], signal.SIGKILL)
    line = hosts.service.wait_for_log(f"{worker['name']}#{worker['incarnation']} ended")
    assert line["host"] == "second"
    hosts.wait_until_full()


def test_a_host_that_left_and_one_that_was_lost_are_told_apart(hosts: RunningCluster):
    epoch = hosts.hosts()["first"]["epoch"]
    hosts.agents["first"].signal(signal.SIGTERM)
    assert hosts.agents["first"].wait() == 0
    hosts.agents["second"].signal(signal.SIGKILL)
    until(lambda: len(hosts.service.get("/health").json()["lost_hosts"]) == 2)
    health = hosts.service.get("/health").json()
    lost = {host["name"]: host for host in health["lost_hosts"]}
    assert (lost["first"]["state"], lost["second"]["state"]) == ("left", "lost")
    assert lost["second"]["reason"]
    assert hosts.service.metric('host_up{host="second"}') == 0
    assert hosts.service.metric('hosts_lost_total{reason="lost"}') >= 1
    assert hosts.service.ask({"n": 1}).status_code == 503
    hosts.start_agent("first")
    hosts.wait_until_full("first")
    assert hosts.hosts()["first"]["epoch"] > epoch
    assert "first" not in {
        host["name"] for host in hosts.service.get("/health").json()["lost_hosts"]
    }
