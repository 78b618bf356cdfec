"""Starts the real TorchServe, in a process of its own."""

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.clients.torchserve.archives import AT_START, RECIPES
from tests.clients.torchserve.calls import MAX_REQUEST_BYTES
from tests.ports import free_port

_START_S = 600.0
_STOP_S = 60.0
ADDRESSES = ("inference", "management", "metrics")


def write_config(folder: Path, store: Path) -> tuple[Path, dict[str, int]]:
    """Write a config.properties; return its path, and the ports by the addresses' names."""
    ports = {name: free_port() for name in ADDRESSES}
    lines = [
        *(f"{name}_address=http://127.0.0.1:{port}" for name, port in ports.items()),
        f"model_store={store}",
        f"load_models={','.join(f'{name}.mar' for name in AT_START)}",
        "default_workers_per_model=1",
        "default_startup_timeout=600",  # ten workers that load PyTorch at once take their time
        f"max_request_size={MAX_REQUEST_BYTES}",
        "metrics_mode=prometheus",
        "disable_token_authorization=true",
        "enable_model_api=true",
    ]
    config = folder / "config.properties"
    config.write_text("\n".join(lines) + "\n")
    return config, ports


@contextmanager
def real_torchserve(python: Path, folder: Path, store: Path) -> Iterator[Mapping[str, int]]:
    """Serve a folder of archives by TorchServe; yield the ports by the addresses' names.

    Args:
        python: The interpreter of an environment with TorchServe.
        folder: A place for its settings and logs.
        store: The folder of the archives.

    Raises:
        RuntimeError: The server does not start.
    """
    config, ports = write_config(folder, store)
    log, home = folder / "torchserve.log", folder / "home"
    home.mkdir(exist_ok=True)
    command = [str(python.parent / "torchserve"), "--start", "--foreground", "--ncs"]
    command += ["--ts-config", str(config), "--disable-token-auth", "--enable-model-api"]
    variables = os.environ | {"PATH": f"{python.parent}:{os.environ['PATH']}", "TMPDIR": str(home)}
    variables |= {"LOG_LOCATION": str(home), "METRICS_LOCATION": str(home)}
    variables.pop("PYTHONPATH", None)
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=home, env=variables, stdout=file, stderr=file, start_new_session=True
        )
    try:
        _wait(process, ports["inference"], ports["management"], log)
        yield ports
    finally:
        _stop(process)


def _wait(process: "subprocess.Popen[bytes]", inference: int, management: int, log: Path) -> None:
    """Wait until the server is healthy and each model has its worker."""
    until = time.monotonic() + _START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{inference}/ping", timeout=5):
                pass
            waits = [name for name in AT_START if not _is_ready(management, name)]
        except OSError:
            waits = [*AT_START]
        if not waits:
            return
        time.sleep(0.5)
    raise RuntimeError(f"TorchServe is not ready:\n{log.read_text()[-3000:]}")


def _is_ready(port: int, name: str) -> bool:
    model = RECIPES[name].model or name
    url = f"http://127.0.0.1:{port}/models/{model}/{RECIPES[name].version}"
    with urllib.request.urlopen(url, timeout=5) as response:
        (found,) = json.load(response)
    return any(worker["status"] == "READY" for worker in found["workers"])


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End the server with its Java process and its workers, which are of its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
