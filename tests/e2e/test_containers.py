"""The image and the compose file, built and run by a container engine.

They run only if DOCKER_HOST names one: the build takes minutes, and space on the engine's disk.
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from inferpool.service.settings.loader import load
from tests.e2e.containers import Composed, docker, image, needs_compose
from tests.e2e.running import ROOT, asking, status_of, until
from tests.fake_driver.driver import FakeDriver, h100, t4
from tests.ports import free_port

KEY = "a-key-for-the-tests-of-containers"
PHOTO = (ROOT / "models/vision/photos/chelsea.jpg").read_bytes()
PROFILES = ("cpu", "gpu", "monitoring")
IMAGE_JOBS = "/var/lib/inferpool/jobs"

__all__ = ["image"]  # a fixture

pytestmark = pytest.mark.timeout(900)  # the first test waits for the image


class ComposedService(Composed):
    """A service that compose runs by the profile `cpu`."""

    def run(self, *command: str) -> str:
        """Run a command in the container."""
        return self.compose("exec", "--no-TTY", "cpu", *command)

    def predict(self) -> httpx.Response:
        """Ask about a photograph of a cat."""
        headers = {"Content-Type": "image/jpeg", "X-API-Key": KEY}
        return httpx.post(f"{self.url}/predict", content=PHOTO, headers=headers, timeout=60)

    def worker_pids(self) -> list[int]:
        """Return the pids of the workers that are ready, as seen in the container."""
        health = httpx.get(f"{self.url}/health", headers={"X-API-Key": KEY}, timeout=60).json()
        return [w["pid"] for m in health["models"] for w in m["workers"] if w["state"] == "ready"]

    def is_ready(self) -> bool:
        """Return whether the service says that it is ready."""
        return status_of(f"{self.url}/health/ready") == 200


@pytest.fixture(scope="module")
def service(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposedService]:
    """Start a service by variables alone; its keys come as a secret."""
    folder = tmp_path_factory.mktemp("composed")
    keys = folder / "keys"
    keys.write_text(f"{KEY}\n")
    keys.chmod(0o400)
    os.chown(keys, 1000, 1000)
    port = free_port()
    variables = {
        "IMAGE": image,
        "PUBLISH": f"127.0.0.1:{port}",
        "MEMORY": "3g",
        "NOFILE": str(min(65536, resource.getrlimit(resource.RLIMIT_NOFILE)[1])),
        "PREDICT_KEYS": str(keys),
        "INFERPOOL_PREDICT_KEYS_FILE": "/run/secrets/predict_keys",
        "INFERPOOL_MODELS__CATS__SOURCE": "efficientnet_lite0",
        "INFERPOOL_MODELS__CATS__REPLICAS": "2",
        "INFERPOOL_MODELS__CATS__SPEED": "exact",
        "INFERPOOL_SHUTDOWN_DELAY_S": "3",
    }
    (folder / ".env").write_text("".join(f"{name}={text}\n" for name, text in variables.items()))
    name, file = f"inferpool-tests-{os.getpid()}", ROOT / "compose.yaml"
    url = f"http://127.0.0.1:{port}"
    composed = ComposedService(name, folder, url, file, ("--profile", "cpu"))
    try:
        composed.compose("up", "--detach", "--no-build", "--wait")
        yield composed
    finally:
        composed.compose("down", "--volumes", "--timeout", "5")


def is_cat(answer: httpx.Response) -> bool:
    return answer.status_code == 200 and "cat" in answer.json()["predictions"][0][0]["label"]


def test_the_dockerfile_passes_its_linter():
    hadolint = Path(sys.executable).parent / "hadolint"
    subprocess.run([hadolint, ROOT / "docker" / "Dockerfile"], check=True)


@needs_compose
@pytest.mark.parametrize("profiles", [*((p,) for p in PROFILES), PROFILES], ids="+".join)
def test_the_compose_file_works_without_any_preparation(profiles, tmp_path):
    chosen = [word for profile in profiles for word in ("--profile", profile)]
    where = ["--file", str(ROOT / "compose.yaml"), "--project-directory", str(tmp_path)]
    config = json.loads(docker("compose", *where, *chosen, "config", "--format", "json"))
    published = [p["published"] for s in config["services"].values() for p in s["ports"]]
    hosts = {p["host_ip"] for s in config["services"].values() for p in s["ports"]}
    assert hosts == {"127.0.0.1"}
    if "gpu" not in profiles or "cpu" not in profiles:
        assert len(set(published)) == len(published)
    for name in {"cpu", "gpu"} & set(config["services"]):
        one = config["services"][name]
        assert one["command"] == ["serve"]
        assert one["read_only"]
        assert one["cap_drop"] == ["ALL"]
        variables = one.get("environment", {}).items()
        assert not [each for each, text in variables if each.startswith("INFERPOOL_") and text]
        assert ("PORT", "") in variables  # what .env has for others would move it off its port
        volumes = {each["target"]: each["source"] for each in one["volumes"]}
        assert volumes[IMAGE_JOBS] == "jobs"


def gpu_profile(folder: Path, *files: Path, **variables: str) -> dict[str, Any]:
    """Return the service of the profile `gpu` as compose makes it from variables in `.env`."""
    (folder / ".env").write_text("".join(f"{name}={text}\n" for name, text in variables.items()))
    named = [word for file in (ROOT / "compose.yaml", *files) for word in ("--file", str(file))]
    where = [*named, "--project-directory", str(folder), "--profile", "gpu"]
    config = json.loads(docker("compose", *where, "config", "--format", "json"))
    service: dict[str, Any] = config["services"]["gpu"]
    return service


def devices_of(service: dict[str, Any]) -> list[dict[str, Any]]:
    return list(service["deploy"]["resources"]["reservations"]["devices"])


@needs_compose
@pytest.mark.parametrize(
    ("gpus", "uuids"),
    [
        ("", ["GPU-a", "GPU-b", "GPU-c"]),
        ("all", ["GPU-a", "GPU-b", "GPU-c"]),
        ("0,2", ["GPU-a", "GPU-c"]),
        ("GPU-c,GPU-b", ["GPU-c", "GPU-b"]),
    ],
)
def test_compose_names_any_number_of_gpus_whatever_engine_brings_them(tmp_path, gpus, uuids):
    service = gpu_profile(tmp_path, GPUS=gpus)
    assert devices_of(service) == [{"driver": "nvidia", "count": -1, "capabilities": ["gpu"]}]
    settings = load({}, service["environment"] | image_variables(), tmp_path).settings
    driver = FakeDriver(tmp_path, {"GPU-a": t4(), "GPU-b": h100(), "GPU-c": t4()})
    visible = {"CUDA_VISIBLE_DEVICES": text} if (text := settings.cuda_visible_devices) else {}
    host = driver.host(**visible, CUDA_DEVICE_ORDER=settings.cuda_device_order)
    assert [gpu.uuid for gpu in host.gpus] == uuids


@needs_compose
def test_override_of_the_docs_gives_the_container_two_gpus(tmp_path):
    examples = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/deployment.md").read_text(), re.S)
    (example,) = (each for each in examples if "device_ids" in each)
    override = tmp_path / "compose.override.yaml"
    override.write_text(example)
    (device,) = devices_of(gpu_profile(tmp_path, override))
    assert device["device_ids"] == ["0", "2"]
    assert "count" not in device


def image_variables() -> dict[str, str]:
    """Return the variables that the Dockerfile sets in the image for GPUs."""
    text = (ROOT / "docker" / "Dockerfile").read_text().partition("AS runtime-cuda")[2]
    block = re.search(r"^ENV ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    assert block is not None
    return dict(word.split("=", 1) for word in block[1].split() if word != "\\")


def test_the_image_for_gpus_has_what_decodes_jpegs_in_hardware():
    capabilities = image_variables()["NVIDIA_DRIVER_CAPABILITIES"].split(",")
    assert {"compute", "utility", "video"} <= set(capabilities)


def test_the_example_of_settings_lists_all_variables_of_the_compose_file():
    read = set(re.findall(r"\$\{(\w+)", (ROOT / "compose.yaml").read_text()))
    listed = re.findall(r"^# (\w+)=", (ROOT / ".env.example").read_text(), re.MULTILINE)
    assert read <= set(listed)
    assert len(listed) == len(set(listed))


def test_the_image_leaves_out_libraries_for_gpus(image):
    assert int(docker("image", "inspect", "--format", "{{.Size}}", image)) < 2.2e9


def test_it_predicts_and_only_for_clients_with_a_key(service):
    assert is_cat(service.predict())
    without_key = httpx.post(f"{service.url}/predict", content=PHOTO, timeout=60)
    assert without_key.status_code == 401
    assert service.state("cpu", "{{.State.Health.Status}}") == "healthy"


def test_it_runs_without_root_and_can_write_to_its_volumes_alone(service):
    script = """
        id -u; grep -E "^(CapBnd|NoNewPrivs):" /proc/self/status
        for folder in / /opt/inferpool /srv/inferpool /var/lib/inferpool /var/lib/inferpool/jobs \
            /var/cache/inferpool /tmp
        do touch $folder/x 2> /dev/null && rm $folder/x && echo $folder; done; true"""
    said = service.run("sh", "-c", script).split("\n")
    assert [line.split()[-1] for line in said[:3]] == ["1000", "0000000000000000", "1"]
    volumes = ["/var/lib/inferpool", "/var/lib/inferpool/jobs", "/var/cache/inferpool", "/tmp"]
    assert said[3:-1] == volumes
    assert service.state("cpu", "{{.HostConfig.ReadonlyRootfs}} {{.HostConfig.Memory}}") == (
        f"true {3 * 2**30}"
    )


def test_a_worker_that_is_killed_in_the_container_costs_no_request(service):
    with asking(service.predict, 4) as answers:
        until(lambda: len(service.worker_pids()) == 2)
        before = service.worker_pids()
        until(lambda: len(answers) > 8)
        service.run("sh", "-c", f"kill -9 {before[0]}")
        until(lambda: len(pids := service.worker_pids()) == 2 and before[0] not in pids)
    assert all(map(is_cat, answers))


def test_a_container_that_is_killed_comes_back(service):
    pid = int(service.state("cpu", "{{.State.Pid}}"))
    if not Path(f"/proc/{pid}").exists() or os.geteuid() != 0:
        pytest.skip("the engine is not on this machine, or its processes are not ours to kill")
    job = f"{service.url}/jobs/cat"
    headers = {"Content-Type": "image/jpeg", "X-API-Key": KEY}
    assert httpx.put(job, content=PHOTO, headers=headers, timeout=60).status_code == 202
    os.kill(pid, signal.SIGKILL)  # `docker kill` would count as a wish that it stays away
    until(lambda: service.state("cpu", "{{.RestartCount}}") == "1")
    until(service.is_ready)
    assert is_cat(service.predict())
    assert httpx.get(f"{job}?wait=30", headers=headers, timeout=60).json()["state"] == "succeeded"
    assert is_cat(httpx.get(f"{job}/result", headers=headers))


def test_stopping_it_under_load_fails_no_request(service):
    with ThreadPoolExecutor() as pool:
        with asking(service.predict, 4) as answers:
            until(lambda: len(answers) > 8)
            stopped = pool.submit(service.compose, "stop")
            until(lambda: not service.is_ready())  # a balancer would send no more now
        stopped.result(60)
    assert all(map(is_cat, answers))
    assert service.state("cpu", "{{.State.ExitCode}} {{.State.OOMKilled}}") == "0 false"
    lines = service.compose("logs", "--no-log-prefix", "--no-color").splitlines()
    assert len(lines) > 10
    assert all({"time", "level", "message"} <= json.loads(line).keys() for line in lines)
    assert not [line for line in lines if json.loads(line)["level"] == "error"]


def test_nothing_of_it_is_left(service):
    service.compose("down", "--volumes")
    for what in (["ps", "--all"], ["volume", "ls"], ["network", "ls"]):
        mine = ["--quiet", "--filter", f"label=com.docker.compose.project={service.name}"]
        assert docker(*what, *mine) == ""
