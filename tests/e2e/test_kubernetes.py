"""The manifests of docker/kubernetes: their form, and how their probes judge a real service."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml

from inferpool.service.settings.loader import load
from tests.e2e.running import ROOT, faulty, running, until
from tests.ports import free_port

FOLDER = ROOT / "docker" / "kubernetes"
FASTER = 20
"""Probes are sent so many times as often as the manifest says; all else is as it says."""
OBJECTS: list[dict[str, Any]] = [
    each
    for path in sorted(FOLDER.glob("*.yaml"))
    for each in yaml.safe_load_all(path.read_text())
    if each
]
DEPLOYMENTS = [each for each in OBJECTS if each["kind"] == "Deployment"]
PODS = [each["spec"]["template"] for each in DEPLOYMENTS]


def object_of(kind: str) -> dict[str, Any]:
    """Return the only object of a kind."""
    (one,) = [each for each in OBJECTS if each["kind"] == kind]
    return one


@pytest.mark.parametrize("version", ["1.29", "1.33", kubernetes_validate.latest_version()])
def test_kubernetes_accepts_every_manifest_and_no_unknown_field(version):
    assert len(OBJECTS) >= 7
    for one in OBJECTS:
        kubernetes_validate.validate(one, version, strict=True)
    wrong = {**DEPLOYMENTS[0], "spec": {**DEPLOYMENTS[0]["spec"], "replica": 2}}
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(wrong, version, strict=True)


@pytest.mark.parametrize("pod", PODS, ids=[each["metadata"]["name"] for each in DEPLOYMENTS])
def test_a_pod_is_probed_where_the_service_answers_and_ends_after_its_drain(pod, tmp_path):
    settings = load({}, object_of("ConfigMap")["data"], tmp_path).settings
    spec, container = pod["spec"], pod["spec"]["containers"][0]
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert [probe["path"] for probe in probes] == [*["/health/live"] * 2, "/health/ready"]
    assert {probe["port"] for probe in probes} == {container["ports"][0]["name"]}
    drain_s = settings.drain_timeout_s + settings.shutdown_delay_s
    assert spec["terminationGracePeriodSeconds"] >= drain_s + 15
    mounts = {each["name"] for each in container["volumeMounts"]}
    assert mounts == {each["name"] for each in spec["volumes"]}
    assert container["securityContext"]["readOnlyRootFilesystem"]


def test_pods_that_share_no_store_keep_no_jobs_since_a_call_may_reach_any_of_them(tmp_path):
    settings = load({}, object_of("ConfigMap")["data"], tmp_path).settings
    assert settings.job_store == "none"
    assert all(each["spec"]["replicas"] > 1 for each in DEPLOYMENTS)


def test_services_and_budgets_select_the_pods_of_both_kinds():
    selectors = [object_of("Service")["spec"]["selector"]]
    selectors += [object_of("PodDisruptionBudget")["spec"]["selector"]["matchLabels"]]
    for selector in selectors:
        assert all(selector.items() <= pod["metadata"]["labels"].items() for pod in PODS)
    scaled = object_of("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"]
    assert scaled in [each["metadata"]["name"] for each in DEPLOYMENTS]


def test_keys_of_the_secret_reach_the_service_under_the_names_of_its_settings(tmp_path):
    secret = object_of("Secret")
    for pod in PODS:
        environ = {
            each["name"]: secret["stringData"][each["valueFrom"]["secretKeyRef"]["key"]]
            for each in pod["spec"]["containers"][0]["env"]
        }
        assert environ["PGPASSWORD"] == secret["stringData"]["job_store_password"]
        settings = load({}, environ, tmp_path).settings
        assert settings.predict_keys
        assert settings.metrics_keys
        assert settings.admin_keys


def test_yaml_is_tidy():
    command = [sys.executable, "-m", "yamllint", "--strict", "compose.yaml", "docker"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@dataclass
class Pod:
    """A pod as its node judges it, for a test to read at any time."""

    is_started: bool = False
    is_ready: bool = False
    is_terminating: bool = False
    num_refused: int = 0
    """Answers that said that it is not ready."""
    reasons_to_kill: list[str] = field(default_factory=list)


@contextmanager
def kubelet(url: str) -> Iterator[Pod]:
    """Probe one service from a thread, as the kubelet of its node would."""
    (container,) = PODS[0]["spec"]["containers"]  # of cpu.yaml
    pod, is_over = Pod(), threading.Event()
    next_at = dict.fromkeys(("startup", "liveness", "readiness"), 0.0)
    failures = dict.fromkeys(next_at, 0)

    def send(kind: str, client: httpx.Client) -> None:
        probe = container[f"{kind}Probe"]
        next_at[kind] = time.monotonic() + probe["periodSeconds"] / FASTER
        answer = None
        with suppress(httpx.HTTPError):
            answer = client.get(probe["httpGet"]["path"], timeout=probe.get("timeoutSeconds", 1))
        is_good = answer is not None and answer.is_success
        failures[kind] = 0 if is_good else failures[kind] + 1
        patience = FASTER if kind == "startup" else 1  # the process starts no faster
        has_failed = failures[kind] >= patience * probe["failureThreshold"]
        if kind == "readiness":
            pod.is_ready = not has_failed and (pod.is_ready or is_good)
            pod.num_refused += answer is not None and not is_good
        elif has_failed and not pod.is_terminating:
            pod.reasons_to_kill.append(f"its {kind} probe failed")
        pod.is_started = pod.is_started or is_good

    def run() -> None:
        with httpx.Client(base_url=url) as client:
            while not is_over.wait(0.01):
                for kind in ("liveness", "readiness") if pod.is_started else ("startup",):
                    is_moot = kind == "liveness" and pod.is_terminating
                    if time.monotonic() >= next_at[kind] and not is_moot:
                        send(kind, client)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield pod
    finally:
        is_over.set()
        thread.join()


@pytest.mark.slow
def test_a_pod_is_never_killed_and_gets_requests_only_while_it_can_answer(tmp_path: Path):
    gate = tmp_path / "gate"
    gate.touch()
    options = {"forward_s": 0.05, "once": tmp_path / "once", "gate": gate}
    settings = faulty(max_batch_size=1, batch_timeout_s=1, options=options)
    settings |= {"max_queue_length": 8, "shutdown_delay_s": 2}

    def ask(do: str = "ok") -> int:
        return service.ask({"n": 21, "do": do}).status_code

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (
        kubelet(url) as pod,
        running(settings=settings, port=port, ready=False) as service,
        ThreadPoolExecutor(60) as pool,
    ):
        service.url = url
        until(lambda: pod.is_started)
        assert not pod.is_ready  # it loads
        assert ask() == 503
        gate.unlink()
        until(lambda: pod.is_ready)
        assert ask() == 200

        gate.touch()
        os.kill(service.worker_pids()[0], signal.SIGKILL)  # its only worker
        until(lambda: not pod.is_ready)
        gate.unlink()
        until(lambda: pod.is_ready)

        gate.touch()
        asked = pool.submit(ask, "hang")
        until(lambda: not pod.is_ready)
        gate.unlink()
        asked.result()
        until(lambda: pod.is_ready)

        before = pod.num_refused
        statuses = set(pool.map(lambda _: ask(), range(60)))  # seven times what may wait
        assert statuses == {200, 429}
        assert pod.num_refused == before  # others are as busy, and none would be left
        until(lambda: pod.is_ready)

        pod.is_terminating = True
        service.signal(signal.SIGTERM)
        until(lambda: not pod.is_ready)
        assert ask() == 200  # balancers that have not heard of it yet still send requests
        assert service.wait() == 0
    assert pod.reasons_to_kill == []
