"""Several hosts as they are deployed: the compose file run by an engine, and the manifests.

The containers run only if DOCKER_HOST names an engine.
"""

import configparser
import contextlib
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml

from inferpool.service.cli.main import INFERPOOL
from inferpool.service.settings.loader import load
from tests.e2e.containers import Composed, docker, image, needs_compose
from tests.e2e.running import ROOT, asking, until
from tests.ports import free_port

__all__ = ["image"]  # a fixture

COMPOSE = ROOT / "docker" / "cluster.compose.yaml"
GPUS = ROOT / "docker" / "cluster.gpu.compose.yaml"
MANIFESTS = ROOT / "docker" / "kubernetes" / "hosts"
AGENTS = ("agent-1", "agent-2", "agent-3")
START_S = 300.0
"""How long all containers may take to start on a busy machine: their image has no bytecode."""
DRAIN_S = 30
"""How long the workers of an agent may take to finish."""

pytestmark = pytest.mark.timeout(900)  # the first test waits for the image


class ComposedHosts(Composed):
    """A front end and three agents that compose runs."""

    def ask(self) -> httpx.Response:
        """Ask a model that sends back what it is asked."""
        number = {"n": os.urandom(8).hex()}
        answer = httpx.post(f"{self.url}/predict", json={"instances": [number]}, timeout=60)
        if answer.status_code == 200:
            assert answer.json()["predictions"] == [number]
        return answer

    def full(self) -> set[str]:
        """Return the names of the hosts whose workers are all ready."""
        with contextlib.suppress(httpx.HTTPError):
            hosts = httpx.get(f"{self.url}/health", timeout=60).json()["hosts"]
            return {
                host["name"]
                for host in hosts
                if host["state"] != "lost" and 0 < host["workers_ready"] == host["workers"]
            }
        return set()


@pytest.fixture(scope="module")
def hosts(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposedHosts]:
    """Start all with the key in a file, as the compose file says."""
    folder = tmp_path_factory.mktemp("hosts")
    keys = folder / "cluster_keys"
    keys.write_text("a-key-for-the-tests-of-hosts\n")
    keys.chmod(0o400)
    os.chown(keys, 1000, 1000)
    port = free_port()
    variables = {
        "IMAGE": image,
        "PUBLISH": f"127.0.0.1:{port}",
        "MEMORY": "2g",
        "NOFILE": str(min(65536, resource.getrlimit(resource.RLIMIT_NOFILE)[1])),
        "INFERPOOL_MODELS__M__SOURCE": "echo",
        "INFERPOOL_MODELS__M__REPLICAS": "1",
    }
    (folder / ".env").write_text("".join(f"{name}={text}\n" for name, text in variables.items()))
    name = f"inferpool-hosts-{os.getpid()}"
    composed = ComposedHosts(name, folder, f"http://127.0.0.1:{port}", COMPOSE)
    try:
        composed.compose("up", "--detach", "--no-build", "--wait", timeout_s=START_S)
        yield composed
    finally:
        composed.compose("down", "--volumes", "--timeout", "5")


def all_right(answers: list[httpx.Response]) -> bool:
    """Return whether there was an answer to each call, and each was right."""
    return {answer.status_code for answer in answers} == {200}


def test_the_agents_join_under_their_names_and_are_healthy(hosts: ComposedHosts):
    until(lambda: hosts.full() == set(AGENTS), START_S)
    assert hosts.ask().status_code == 200
    for name in ("front-end", *AGENTS):
        assert hosts.state(name, "{{.State.Health.Status}}") == "healthy"


def test_a_container_that_is_killed_and_one_that_stands_still_cost_no_request(
    hosts: ComposedHosts,
):
    until(lambda: hosts.full() == set(AGENTS), START_S)
    with asking(hosts.ask, 4) as answers:
        until(lambda: len(answers) > 20)
        hosts.compose("kill", "--signal", "KILL", "agent-1")
        until(lambda: hosts.full() == {"agent-2", "agent-3"})
        hosts.compose("pause", "agent-2")
        until(lambda: hosts.full() == {"agent-3"})
        num = len(answers)
        until(lambda: len(answers) > num + 50)
        hosts.compose("unpause", "agent-2")
        hosts.compose("start", "agent-1")  # `kill` counts as a wish that it stays away
        until(lambda: hosts.full() == set(AGENTS), START_S)
    assert all_right(answers)


def test_a_container_that_is_stopped_leaves_with_exit_status_0_and_costs_no_request(
    hosts: ComposedHosts,
):
    with asking(hosts.ask, 4) as answers:
        until(lambda: len(answers) > 20)
        hosts.compose("stop", "agent-3")
        num = len(answers)
        until(lambda: len(answers) > num + 20)
    assert all_right(answers)
    assert hosts.state("agent-3", "{{.State.ExitCode}} {{.State.OOMKilled}}") == "0 false"
    hosts.compose("start", "agent-3")


def test_the_front_end_of_a_new_container_finds_the_models_loaded(hosts: ComposedHosts):
    until(lambda: hosts.full() == set(AGENTS), START_S)
    before = pids_of(hosts)
    hosts.compose("up", "--detach", "--no-build", "--no-deps", "--force-recreate", "front-end")
    until(lambda: hosts.full() == set(AGENTS), START_S)
    assert hosts.ask().status_code == 200
    assert pids_of(hosts) == before


def pids_of(hosts: ComposedHosts) -> set[tuple[str, int]]:
    """Return the host and the process of each worker."""
    models = httpx.get(f"{hosts.url}/health", timeout=60).json()["models"]
    return {(worker["host"], worker["pid"]) for model in models for worker in model["workers"]}


@needs_compose
def test_agents_have_the_key_and_little_else_and_gpus_by_a_second_file(tmp_path: Path):
    where = ["--file", str(COMPOSE), "--file", str(GPUS), "--project-directory", str(tmp_path)]
    services = json.loads(docker("compose", *where, "config", "--format", "json"))["services"]
    assert set(services) == {"front-end", *AGENTS}
    for name, one in services.items():
        assert one["read_only"]
        assert one["cap_drop"] == ["ALL"]
        assert [secret["source"] for secret in one["secrets"]] == ["cluster_keys"]
        assert bool(one.get("ports")) == (name == "front-end")
    ids = []
    for name in AGENTS:
        assert services[name]["hostname"] == name
        assert int(services[name]["stop_grace_period"].rstrip("s")) >= DRAIN_S + 15
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        ids += device["device_ids"]
    assert ids == ["0", "1", "2"]
    (port,) = services["front-end"]["ports"]
    assert port["host_ip"] == "127.0.0.1"


OBJECTS: list[dict[str, Any]] = [
    each
    for path in sorted(MANIFESTS.glob("*.yaml"))
    for each in yaml.safe_load_all(path.read_text())
]


def pod_of(kind: str) -> dict[str, Any]:
    """Return the template of the pods of the only object of a kind."""
    (one,) = [each for each in OBJECTS if each["kind"] == kind]
    return dict(one["spec"]["template"])


@pytest.mark.parametrize("version", ["1.29", "1.33", kubernetes_validate.latest_version()])
def test_kubernetes_accepts_each_manifest_of_hosts(version: str):
    kinds = {each["kind"] for each in OBJECTS}
    assert kinds >= {"Deployment", "StatefulSet", "Service", "Secret", "PodDisruptionBudget"}
    for one in OBJECTS:
        kubernetes_validate.validate(one, version, strict=True)


def test_agents_reach_the_front_end_with_the_key_before_it_is_ready(tmp_path: Path):
    secret = next(each for each in OBJECTS if each["kind"] == "Secret")
    front, agent = pod_of("Deployment"), pod_of("StatefulSet")
    (front_end,), (host,) = front["spec"]["containers"], agent["spec"]["containers"]
    environ = {each["name"]: each["value"] for each in front_end["env"]}
    folders = []
    for pod, container in ((front, front_end), (agent, host)):
        volume = next(each for each in pod["spec"]["volumes"] if each["name"] == "keys")
        assert volume["secret"]["secretName"] == secret["metadata"]["name"]
        mount = next(each for each in container["volumeMounts"] if each["name"] == "keys")
        folders.append(mount["mountPath"])
    assert folders[0] == folders[1]
    keys = tmp_path / "cluster_keys"
    keys.write_text(secret["stringData"]["cluster_keys"])
    path = f"{folders[0]}/cluster_keys"
    assert environ.pop("INFERPOOL_CLUSTER_KEYS_FILE") == path
    assert f"--key-file={path}" in host["args"]
    settings = load({}, {**environ, "INFERPOOL_CLUSTER_KEYS_FILE": str(keys)}, tmp_path).settings
    (join,) = [each.partition("=")[2] for each in host["args"] if each.startswith("--join=")]
    name, _, port = join.partition(":")
    assert int(port) == settings.cluster_port
    (service,) = [
        each for each in OBJECTS if (each["kind"], each["metadata"]["name"]) == ("Service", name)
    ]
    assert service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["ports"][0]["port"] == int(port)
    assert service["spec"]["selector"].items() <= front["metadata"]["labels"].items()
    drain_s = settings.drain_timeout_s + settings.shutdown_delay_s
    assert front["spec"]["terminationGracePeriodSeconds"] >= drain_s + 15
    assert agent["spec"]["terminationGracePeriodSeconds"] >= DRAIN_S + 15


def test_an_agent_is_ready_while_it_is_connected_and_ended_only_if_it_hangs():
    (host,) = pod_of("StatefulSet")["spec"]["containers"]
    probes = [host[f"{kind}Probe"]["exec"]["command"] for kind in ("readiness", "liveness")]
    assert [probe[-2:] for probe in probes] == [["joined", "8470"], ["agent", "8470"]]


def test_the_unit_for_systemd_starts_an_agent_that_may_drain(tmp_path: Path):
    page = (ROOT / "docs" / "hosts.md").read_text()
    (text,) = re.findall(r"```ini\n(.*?)```", page, re.S)
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment]  # as its documentation says
    unit.read_string(text)
    service = unit["Service"]
    assert (service["Restart"], service["KillMode"]) == ("always", "mixed")
    assert int(service["TimeoutStopSec"]) >= DRAIN_S + 15
    program, *words = shlex.split(service["ExecStart"])
    parser, _ = INFERPOOL.make_parser(words[0])
    given = parser.parse_args(words)
    credential = service["LoadCredential"].partition(":")[0]
    assert str(given.key_file) == f"%d/{credential}"
    if (verify := shutil.which("systemd-analyze")) is not None:
        file = tmp_path / "inferpool-agent.service"
        file.write_text(text.replace(program, "/bin/true"))
        subprocess.run([verify, "verify", str(file)], check=True)
