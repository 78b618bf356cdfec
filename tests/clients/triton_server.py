"""Starts a real Triton, from the package nvidia-pytriton, with the models of shapes.py."""

import os
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.clients.shapes import MAX_BATCH_SIZE, MODELS, PeerModel, Tensor
from tests.ports import free_port

HERE = Path(__file__).parent
_START_S = 120.0


@contextmanager
def triton(python: Path, folder: Path) -> Iterator[tuple[int, int]]:
    """Serve the models by Triton; yield its ports for HTTP and gRPC.

    Args:
        python: Interpreter of an environment with nvidia-pytriton: Debian's own Python 3.11.
        folder: Place of the model repository and of the log.
    """
    http, grpc = free_port(), free_port()
    site = next((python.parent.parent / "lib").glob("python*/site-packages"))
    server = folder / "tritonserver"
    shutil.copytree(site / "pytriton/tritonserver", server, dirs_exist_ok=True)
    stub = f"python_backend_stubs/{site.parent.name.removeprefix('python')}"
    shutil.copy(
        server / stub / "triton_python_backend_stub",
        server / "backends/python/triton_python_backend_stub",
    )
    write_repository(folder / "models")
    command = [
        str(server / "bin/tritonserver"),
        f"--model-repository={folder / 'models'}",
        f"--backend-directory={server / 'backends'}",
        "--http-address=127.0.0.1",
        "--grpc-address=127.0.0.1",
        f"--http-port={http}",
        f"--grpc-port={grpc}",
        "--allow-metrics=false",
        "--model-control-mode=explicit",
        "--load-model=*",
        f"--backend-config=python,shm-region-prefix-name=clients{os.getpid()}_",
    ]
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(site / "nvidia_pytriton.libs"),
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(python.parent.parent),
    }
    keeper = _Keeper(command, environment, folder / "triton.log")
    keeper.start()
    try:
        keeper.wait_until_ready(http)
        yield http, grpc
    finally:
        keeper.stop()


class _Keeper(threading.Thread):
    """Starts Triton again when it has ended: some bad requests end it."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        super().__init__(daemon=True)
        self._command, self._environment, self._log = command, environment, log
        self._is_over = False
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        with self._log.open("wb") as log:
            while not self._is_over:
                self._process = subprocess.Popen(
                    self._command, env=self._environment, stdout=log, stderr=log
                )
                self._process.wait()
                time.sleep(0.2)

    def stop(self) -> None:
        """End Triton, and do not start it again."""
        self._is_over = True
        if self._process is not None:
            self._process.terminate()
        self.join(60)

    def wait_until_ready(self, port: int) -> None:
        """Wait until all models are ready.

        Raises:
            RuntimeError: It takes too long; the text is the end of Triton's log.
        """
        until = time.monotonic() + _START_S
        while time.monotonic() < until:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5):
                    return
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f"Triton does not start:\n{self._log.read_text()[-3000:]}")


def write_repository(folder: Path) -> None:
    """Write the folder that Triton loads the models from."""
    for name, model in MODELS.items():
        version = folder / name / "1"
        version.mkdir(parents=True, exist_ok=True)
        shutil.copy(HERE / "triton_model.py", version / "model.py")
        (folder / name / "config.pbtxt").write_text(configuration(name, model))
        if model.labels:
            (folder / name / "labels.txt").write_text("\n".join(model.labels) + "\n")


def configuration(name: str, model: PeerModel) -> str:
    """Return the text of a `config.pbtxt`."""
    parts = [f'name: "{name}"', 'backend: "python"', f"max_batch_size: {MAX_BATCH_SIZE}"]
    parts += [f"input {{ {_field(each)} }}" for each in model.inputs]
    for each in model.outputs:
        labels = ' label_filename: "labels.txt"' if model.labels else ""
        parts.append(f"output {{ {_field(each)}{labels} }}")
    parts.append("instance_group { kind: KIND_CPU count: 1 }")
    parts.append(
        "model_transaction_policy { decoupled: true }" if model.streams else "dynamic_batching { }"
    )
    return "\n".join(parts) + "\n"


def _field(tensor: Tensor) -> str:
    name, datatype, shape = tensor
    kind = "STRING" if datatype == "BYTES" else datatype
    return f'name: "{name}" data_type: TYPE_{kind} dims: {list(shape)}'
