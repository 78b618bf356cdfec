"""The files for Prometheus and Grafana in docker/, on a real Prometheus and a real service."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from inferpool.service.telemetry.metrics import COUNTERS, GAUGES
from tests.e2e.running import ROOT, Running, running, status_of, until
from tests.ports import free_port
from tests.pty_screen import on_terminal

FOLDER = ROOT / "docker" / "prometheus"
KEY = "a-key-for-metrics-0123456789"
BOARD = json.loads((ROOT / "docker/grafana/dashboards/inferpool.json").read_text())
VARIABLES = {"$__rate_interval": "5s", "$__range": "30s", "$instance": ".+", "$model": ".+"}
ELSEWHERE = re.compile("_gpu_|_rank_|_traces_|_hosts?_|_hosts{|_standby{|ALERTS")
"""Queries about GPUs, split models, traces, hosts and alerts: the service here has none of them."""
PROMETHEUS_FIELDS = {"step", "titleFormat", "textFormat", "tagKeys", "useValueForTime"}
"""Fields of an annotation which Grafana's schema leaves to the data source."""

needs_prometheus = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs Prometheus: apt-get install prometheus"
)


class Prometheus:
    """A running Prometheus, asked over HTTP."""

    def __init__(self, url: str) -> None:
        self.client = httpx.Client(base_url=url, timeout=60)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples of an expression now; fail if Prometheus refuses the expression."""
        answer = self.client.post("/api/v1/query", data={"query": expression}).json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        return list(answer["data"]["result"])

    def rules(self) -> list[dict[str, Any]]:
        """Return each rule with the result of its last evaluation."""
        groups = self.client.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire."""
        alerts = self.client.get("/api/v1/alerts").json()["data"]["alerts"]
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}


@contextlib.contextmanager
def prometheus(folder: Path, *, target: str, key: Path) -> Iterator[Prometheus]:
    """Run Prometheus; it scrapes the service twice a second, and its alerts fire without delay."""
    shutil.copy(FOLDER / "prometheus.yml", folder)
    config = yaml.safe_load((folder / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    ours = config["scrape_configs"][0]
    del ours["dns_sd_configs"]
    ours["static_configs"] = [{"targets": [target]}]
    ours["authorization"]["credentials_file"] = str(key)
    config["scrape_configs"] = [ours]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    rules = (FOLDER / "rules.yml").read_text()
    (folder / "rules.yml").write_text(re.sub(r"\n +for: \S+", "", rules))
    port = free_port()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
    server = Prometheus(f"http://127.0.0.1:{port}")

    def is_ready() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        return status_of(f"http://127.0.0.1:{port}/-/ready") == 200

    try:
        until(is_ready)
        yield server
    finally:
        server.client.close()
        process.kill()
        process.wait(60)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    keys = tmp_path_factory.mktemp("keys") / "metrics"
    keys.write_text(f"{KEY}\n")
    env = {"INFERPOOL_JOB_STORE": str(tmp_path_factory.mktemp("jobs"))}
    with running("echo", "--replicas", "2", "--metrics-keys-file", str(keys), env=env) as service:
        yield service


@pytest.fixture(scope="module")
def watching(service: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "key").write_text(f"{KEY}\n")
    target = service.url.removeprefix("http://")
    with prometheus(folder, target=target, key=folder / "key") as server:
        until(lambda: server.query("inferpool_worker_up == 1"))
        yield server


def panels() -> Iterator[dict[str, Any]]:
    for panel in BOARD["panels"]:
        yield from panel.get("panels", ())
        if panel["type"] != "row":
            yield panel


def queries() -> list[str]:
    """Return every query of the dashboard, as Grafana would send it."""
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    found += [each["expr"] for each in BOARD["annotations"]["list"] if "expr" in each]
    for name, value in VARIABLES.items():
        found = [query.replace(name, value) for query in found]
    return found


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
@pytest.mark.slow
def test_promtool_passes_the_configuration_and_the_rules_and_their_tests():
    promtool("check", "config", "--syntax-only", "prometheus.yml")
    promtool("check", "rules", "rules.yml")
    promtool("test", "rules", "rules.test.yml")


def test_each_alert_says_what_to_do_and_is_tested():
    groups = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    tests = (FOLDER / "rules.test.yml").read_text()
    for alert in alerts:
        assert alert["labels"]["severity"] in {"critical", "warning", "info"}, alert
        assert set(alert["annotations"]) == {"summary", "description"}, alert
        assert f'"{alert["alert"]}"' in tests, f"{alert['alert']} is not tested"


def test_the_dashboard_fits_the_schema_of_grafana():
    def lost(before: Any, after: Any, path: str) -> Iterator[str]:
        if isinstance(before, dict) and isinstance(after, dict):
            for name, value in before.items():
                if name not in after:
                    yield f"{path}.{name}"
                else:
                    yield from lost(value, after[name], f"{path}.{name}")
        elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
            for number, (one, other) in enumerate(zip(before, after, strict=True)):
                yield from lost(one, other, f"{path}[{number}]")
        elif before != after:
            yield path

    register_default_plugins()
    known = json.loads(JSONEncoder().encode(Dashboard.from_json(BOARD)))
    unknown = {path for path in lost(BOARD, known, "") if not path.endswith(".definition")}
    assert {path for path in unknown if path.rpartition(".")[2] not in PROMETHEUS_FIELDS} == set()
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)


def test_the_dashboard_finds_its_data_source_and_shows_every_metric_of_the_service():
    sources = ROOT / "docker/grafana/provisioning/datasources/prometheus.yml"
    provided = yaml.safe_load(sources.read_text())["datasources"][0]["uid"]
    assert BOARD["templating"]["list"][0]["current"]["value"] == provided
    used = {panel["datasource"]["uid"] for panel in panels()}
    assert used == {"${datasource}"}
    names = {f"inferpool_{name}" for name in (*GAUGES, *COUNTERS)}
    assert {name for name in names if not any(name in query for query in queries())} <= {
        "inferpool_model_ready",  # chooses the models
        "inferpool_draining",  # is for alerts
    }


@pytest.mark.measures
@needs_prometheus
@pytest.mark.slow
def test_every_query_and_every_rule_runs_and_sees_a_worker_that_is_killed(
    service: Running, watching: Prometheus
):
    def load() -> None:
        assert [service.predict(n) for n in range(20)] == [[n] for n in range(20)]

    load()
    until(lambda: watching.query("inferpool_ready == 1 unless inferpool_draining == 1"))
    headers = {"Authorization": f"Bearer {KEY}"}
    models = service.get("/health", headers=headers).json()["models"]
    os.kill(models[0]["workers"][0]["pid"], signal.SIGKILL)
    waiting = [query for query in queries() if not ELSEWHERE.search(query)]
    end = time.monotonic() + 60
    while waiting:
        load()
        waiting = [query for query in waiting if not watching.query(query)]
        assert time.monotonic() < end, waiting
    for query in queries():
        watching.query(query)
    assert [rule for rule in watching.rules() if rule["health"] == "err"] == []
    until(lambda: all(rule["health"] == "ok" for rule in watching.rules()))

    def num_restarts() -> list[str]:
        samples = watching.query('inferpool_worker_restarts_total{reason="signal"}')
        return [sample["value"][1] for sample in samples]

    # A scrape that took longer than half a second counts as none.
    until(lambda: num_restarts() == ["1"] and "InferpoolDown" not in watching.firing())


def test_top_shows_the_service_to_whoever_has_a_key(service: Running):
    env = {"INFERPOOL_METRICS_KEYS": KEY}
    with on_terminal("top", "--url", service.url, env=env) as screen:
        screen.wait_for("echo ready")
        screen.wait_for("\n1       ready")
        screen.press("q")
        assert screen.leave() == 0


@needs_prometheus
def test_an_alert_fires_once_the_service_is_killed(service: Running, watching: Prometheus):
    service.signal(signal.SIGKILL)  # nothing after this test has a service
    until(lambda: "InferpoolDown" in watching.firing())
