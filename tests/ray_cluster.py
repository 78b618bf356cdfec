"""A Ray cluster on this machine, in a process of its own: nodes can be added, killed and drained.

Tests use `RayCluster`. Only its process imports Ray, which changes the log records and the signal
handlers of whoever imports it.
"""

import contextlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType

import pytest

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: `uv sync` installs it"
)
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else, under `uv run`, it copies the repository
    "RAY_memory_monitor_refresh_ms": "0",  # else it kills agents where memory is short
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_ROOT = Path(__file__).resolve().parents[1]
_PATIENCE_S = 90.0


class RayCluster:
    """A head without room for agents, and nodes that a test adds. Used as a context."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self.environ = {**os.environ, **QUIET, **(environ or {})}
        self.address = ""

    def __enter__(self) -> "RayCluster":
        try:
            own_address()
        except OSError as error:
            pytest.skip(f"this machine has no address that Ray could use: {error}")
        self._folder = tempfile.TemporaryDirectory(prefix="ray-")  # paths of sockets must be short
        self.environ["RAY_TMPDIR"] = self._folder.name
        (Path(self._folder.name) / "ray").mkdir()
        self._log = (Path(self._folder.name) / "log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.ray_cluster", self._folder.name],
            cwd=_ROOT,
            env=self.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        try:
            self.address = self._answer()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def add(self, num_cpus: int = 1, num_gpus: int = 0) -> str:
        """Start a node; return its id."""
        return self.tell("add", num_cpus, num_gpus)

    def kill(self, node: str) -> None:
        """SIGKILL a node's raylet, as a lost machine would lose it."""
        self.tell("kill", node)

    def drain(self, node: str, seconds: int = 60) -> None:
        """Announce that a node will be gone in so many seconds, as a spot notice does."""
        self.tell("drain", node, seconds)

    def kill_head(self) -> None:
        """SIGKILL the process that knows of all nodes (the GCS)."""
        self.tell("kill_head")

    def tell(self, what: str, *arguments: object) -> str:
        """Send a command to the process of the cluster; return its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, *arguments]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], _PATIENCE_S)
        line = self._process.stdout.readline() if readable else ""
        assert line, f"the cluster does not answer: {Path(self._log.name).read_text()[-4000:]}"
        return str(json.loads(line))

    def _end(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # its nodes too, if it hangs
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._log.close()
            with contextlib.suppress(OSError):  # the last processes may still write to it
                self._folder.cleanup()


def own_address() -> str:
    """Return an address of this machine that is not 127.0.0.1, which Ray needs."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])


def _commands() -> Iterator[list[object]]:
    for line in sys.stdin:
        yield json.loads(line)


def _serve(folder: str) -> None:
    """Run the nodes, and do what comes on stdin until it ends."""
    from ray._private.ray_constants import PROCESS_TYPE_GCS_SERVER
    from ray.cluster_utils import Cluster

    gcs_client = import_module("ray._raylet").GcsClient  # its stub does not have it
    address = own_address()
    cluster = Cluster()
    told = {"include_dashboard": False, "node_ip_address": address, "temp_dir": folder}
    cluster.add_node(num_cpus=0, **told)
    nodes = {}
    _say(cluster.address)
    for what, *arguments in _commands():
        answer = ""
        if what == "add":
            num_cpus, num_gpus = arguments
            node = cluster.add_node(num_cpus=num_cpus, num_gpus=num_gpus, **told)
            nodes[node.node_id] = node
            answer = node.node_id
        elif what == "kill":
            cluster.remove_node(nodes.pop(arguments[0]), allow_graceful=False)
        elif what == "drain":
            name, seconds = arguments
            by = int((time.time() + float(str(seconds))) * 1000)
            taken, why = gcs_client(address=cluster.address).drain_node(
                name, 2, "a spot notice", by
            )
            assert taken, why
        elif what == "kill_head":
            for info in cluster.head_node.all_processes[PROCESS_TYPE_GCS_SERVER]:
                info.process.kill()
        _say(answer)
    cluster.shutdown()


def _say(answer: object) -> None:
    os.write(_OUTPUT, (json.dumps(answer) + "\n").encode())


if __name__ == "__main__":
    _OUTPUT = os.dup(1)
    os.dup2(2, 1)  # Ray writes to stdout too
    _serve(sys.argv[1])
