"""A container engine, named by DOCKER_HOST, and the image that tests run in it."""

import faulthandler
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.running import ROOT

IMAGE = "inferpool:tests"
ROOM_BYTES = 8 * 2**30
"""Space for the image, its layers on the way, and what is downloaded."""


def _docker() -> str | None:
    """Return a docker that has BuildKit: with its plug-in, or old enough to contain it."""
    for path in (shutil.which("docker"), "/usr/bin/docker"):
        if path is None or not Path(path).exists():
            continue
        about = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        version = re.search(r"version (\d+)", about)
        buildx = subprocess.run([path, "buildx", "version"], capture_output=True)
        if buildx.returncode == 0 or (version and int(version[1]) < 23):
            return path
    return None


DOCKER = _docker()
HAS_COMPOSE = (
    DOCKER is not None
    and subprocess.run([DOCKER, "compose", "version"], capture_output=True).returncode == 0
)
needs_compose = pytest.mark.skipif(not HAS_COMPOSE, reason="install docker and docker compose")


def docker(*arguments: str, timeout_s: float = 120) -> str:
    """Return what a docker command prints; it must succeed."""
    assert DOCKER is not None
    done = subprocess.run(
        [DOCKER, *arguments],
        capture_output=True,
        env={**os.environ, "DOCKER_BUILDKIT": "1"},
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stdout[-4000:]}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def image() -> str:
    """Build the image for CPUs, without what takes long: a compiler, and all bytecode."""
    if DOCKER is None or not os.environ.get("DOCKER_HOST"):
        pytest.skip("set DOCKER_HOST to a container engine, such as unix:///var/run/docker.sock")
    data = Path(docker("info", "--format", "{{.DockerRootDir}}").strip())
    if data.exists() and shutil.disk_usage(data).free < ROOM_BYTES:
        pytest.skip(f"an image takes {ROOM_BYTES >> 30} GiB of room in {data}")
    faulthandler.cancel_dump_traceback_later()  # it would take the build for a hang
    build = ["build", "--network=host", "--file", str(ROOT / "docker" / "Dockerfile")]
    build += ["--build-arg", "PACKAGES=", "--build-arg", "UV_COMPILE_BYTECODE=0"]
    docker(*build, "--tag", IMAGE, str(ROOT), timeout_s=900)
    return IMAGE


@dataclass(frozen=True)
class Composed:
    """Containers that compose runs, from one file."""

    name: str
    folder: Path
    url: str
    file: Path
    options: Sequence[str] = ()

    def compose(self, *arguments: str, timeout_s: float = 120) -> str:
        """Run docker compose on them."""
        where = ["--file", str(self.file), "--project-directory", str(self.folder)]
        where += ["--project-name", self.name, *self.options]
        return docker("compose", *where, *arguments, timeout_s=timeout_s)

    def state(self, service: str, template: str) -> str:
        """Return what the engine knows about the container of a service."""
        container = self.compose("ps", "--all", "--quiet", service).strip()
        return docker("inspect", "--format", template, container).strip()
