"""Starts inferpool with the models of models.py, as a process of its own."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.clients.models import REAL_MODELS, SETTINGS
from tests.ports import free_port

_START_S = 180.0
_STOP_S = 60.0


@contextmanager
def served(
    folder: Path,
    settings: dict[str, object],
    models: Mapping[str, Mapping[str, object]] = SETTINGS | REAL_MODELS,
) -> Iterator[tuple[int, int]]:
    """Serve the models; yield the ports for HTTP and gRPC.

    Args:
        folder: Place of the settings file and of the log.
        settings: Further settings of the service.
        models: Their settings.
    """
    http, grpc = free_port(), free_port()
    found = {"host": "127.0.0.1", "port": http, "grpc_port": grpc, "front_ends": 1, **settings}
    lines = [f"{key} = {json.dumps(value)}" for key, value in found.items()]
    for name, values in models.items():
        lines += [f"[models.{name}]", *(f"{k} = {json.dumps(v)}" for k, v in values.items())]
    (folder / "inferpool.toml").write_text("\n".join(lines) + "\n")
    log = folder / "inferpool.log"
    command = [sys.executable, "-m", "inferpool", "serve", "--config", f"{folder}/inferpool.toml"]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        _wait(process, http, log)
        yield http, grpc
    finally:
        process.terminate()
        process.wait(_STOP_S)


def _wait(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.3)
    raise RuntimeError(f"the service is not ready:\n{log.read_text()[-3000:]}")
