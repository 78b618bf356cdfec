"""A real service in a process of its own, started as a user starts it."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
import psutil

from inferpool.service.tools.trial.processes import is_alive
from tests.e2e import forked

ROOT = forked.ROOT
FAULTY = "tests.fault_model:FaultModel"
_START_TIMEOUT_S = 150.0


class Running:
    """A service that was started; `log` is what it wrote, line by line."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.url = ""
        self._own = threading.local()
        self._clients: list[httpx.Client] = []
        self.log: list[dict[str, object]] = []
        self.may_read = threading.Event()
        """While it is clear, nobody reads what the service logs."""
        self.may_read.set()
        self._lines: queue.Queue[dict[str, object] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def http(self) -> httpx.Client:
        """The client of this thread: threads that share one may close each other's connections.

        It opens a connection per call, so that calls reach every front end.
        """
        client: httpx.Client | None = getattr(self._own, "client", None)
        if client is None:
            limits = httpx.Limits(max_keepalive_connections=0)
            self.http = client = httpx.Client(verify=False, timeout=60, limits=limits)
        return client

    @http.setter
    def http(self, client: httpx.Client) -> None:
        self._own.client = client
        self._clients.append(client)

    @property
    def address(self) -> tuple[str, int]:
        """The host and port that it listens on."""
        url = httpx.URL(self.url)
        return url.host, url.port or 0

    def told_after(self, words: str) -> str:
        """Return the next word, as an address, in the first message that begins with some words."""
        for line in self.log:
            if (message := str(line["message"])).startswith(words):
                return message.removeprefix(words).split()[0].rstrip(",")
        raise AssertionError(f"did not write {words!r}: {self.log}")

    def get(self, path: str, **options: Any) -> httpx.Response:
        """Send a GET request."""
        return self.http.get(self.address_of(path), **options)

    def post(self, path: str = "/predict", **options: Any) -> httpx.Response:
        """Send a POST request."""
        return self.http.post(self.address_of(path), **options)

    def address_of(self, path: str) -> str:
        """Return the URL of a path, which may be relative as those in answers are."""
        return self.url + path if path.startswith("/") else urljoin(self.url, path)

    def ask(self, *instances: object, **options: Any) -> httpx.Response:
        """Send instances as JSON."""
        return self.post(json={"instances": list(instances)}, **options)

    def predict(self, *instances: object, **options: Any) -> list[Any]:
        """Return the predictions for instances that are sent as JSON."""
        answer = self.ask(*instances, **options)
        assert answer.status_code == 200, (answer.text, self.log)
        return list(answer.json()["predictions"])

    def model(self) -> dict[str, Any]:
        """Return what /health says about the only model."""
        (model,) = self.get("/health").json()["models"]
        return dict(model)

    def worker(self, name: str) -> dict[str, Any]:
        """Return what /health says about the only worker of a model, one of several."""
        models = self.get("/health").json()["models"]
        (worker,) = next(model["workers"] for model in models if model["name"] == name)
        return dict(worker)

    def workers(self) -> list[dict[str, Any]]:
        """Return what /health says about each worker of every model."""
        return [w for model in self.get("/health").json()["models"] for w in model["workers"]]

    def worker_pids(self) -> list[int]:
        """Return the pids of the workers that are ready."""
        return [worker["pid"] for worker in self.workers() if worker["state"] == "ready"]

    def metrics(self) -> str:
        """Return the text of /metrics."""
        return self.get("/metrics").text

    def metric(self, name: str) -> float:
        """Return the value of a metric that is named with its labels; 0 where there is none."""
        start = f"inferpool_{name} "
        lines = self.metrics().splitlines()
        return sum(float(line.removeprefix(start)) for line in lines if line.startswith(start))

    def family(self) -> list[psutil.Process]:
        """Return the main process and all processes under it."""
        main = psutil.Process(self.process.pid)
        return [main, *main.children(recursive=True)]

    def wait_for_log(self, text: str, timeout_s: float = _START_TIMEOUT_S) -> dict[str, object]:
        """Return the next log line whose message contains a text: each line is found once."""
        until = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.01, until - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"did not write {text!r}: {self.log}") from None
            if line is None:
                raise AssertionError(f"ended before it wrote {text!r}: {self.log}")
            if text in str(line["message"]):
                return line

    def wait_until_listening(self, timeout_s: float = _START_TIMEOUT_S) -> "Running":
        """Wait until it has logged its URL; workers may still be loading."""
        self.url = str(self.wait_for_log(" at http", timeout_s)["message"]).rpartition(" at ")[2]
        return self

    def wait_until_ready(self) -> "Running":
        """Wait until all workers and fronts are up; only workers, where /health needs a key."""
        return self.wait_until_listening().wait_until_started()

    def wait_until_started(self) -> "Running":
        """Wait until all workers and fronts are up, once it has said that it listens."""

        def is_ready() -> bool:
            if self.get("/health/ready").json().get("status") != "ready":
                return False
            health = self.get("/health")
            return health.status_code != 200 or _are_up(health.json()["fronts"])

        until(is_ready, _START_TIMEOUT_S)
        return self

    def wait_until_full(self) -> None:
        """Wait until every worker and front is up; a front that dies may end a connection."""

        def is_full() -> bool:
            try:
                health = self.get("/health").json()
            except httpx.TransportError:
                return False
            workers = [worker for model in health["models"] for worker in model["workers"]]
            return _are_up(health["fronts"]) and all(w["state"] == "ready" for w in workers)

        until(is_full, _START_TIMEOUT_S)

    def signal(self, signum: int) -> None:
        """Send the main process a signal."""
        self.process.send_signal(signum)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Return the exit code, once `log` has everything that was written."""
        code = self.process.wait(timeout_s)
        self._reader.join(10)  # ends late if another process holds the service's stderr
        return code

    def close(self) -> None:
        """Stop reading its log, after it has ended."""
        for client in self._clients:
            client.close()
        self.may_read.set()
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for text in self.process.stderr:
            self.may_read.wait()
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                line = {"message": text.rstrip(), "level": "raw"}
            self.log.append(line)
            self._lines.put(line)
        self._lines.put(None)


@contextlib.contextmanager
def running(
    *arguments: str,
    settings: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    port: int = 0,
    ready: bool = True,
    command: Sequence[str] = forked.COMMAND,
    preexec_fn: Callable[[], None] | None = None,
    forks: bool = True,
) -> Iterator[Running]:
    """Start `inferpool serve` with settings from a file, and end it however the test left it.

    It is forked, unless the command or what else is asked for needs an interpreter of its own.
    """
    models = (settings or {}).get("models", {}).values()
    if "--speed" not in arguments and not any("speed" in model for model in models):
        arguments += ("--speed", "exact")  # choosing a preset takes seconds
    with tempfile.TemporaryDirectory() as folder:
        if settings is not None:
            file = Path(folder, "inferpool.toml")
            file.write_text("".join(f"{key} = {_toml(settings[key])}\n" for key in settings))
            arguments += ("--config", str(file))
        popen = forked.popen if forks else subprocess.Popen
        process = popen(
            [*command, "serve", *arguments, "--port", str(port), "--log-format", "json"],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": forked.python_path(), **(env or {})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=preexec_fn,
        )
        with ended_after(process) as service:
            yield service.wait_until_ready() if ready else service


@contextlib.contextmanager
def ended_after(process: "subprocess.Popen[str]") -> Iterator[Running]:
    """Read what a service or an agent logs, and kill all of its session after the block."""
    service = Running(process)
    try:
        yield service
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
        service.close()


@contextlib.contextmanager
def asking(
    ask: Callable[[], httpx.Response], num_clients: int = 2
) -> Iterator[list[httpx.Response]]:
    """Have clients ask one call after another during the block; yields their answers so far."""
    answers: list[httpx.Response] = []
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            answers.append(ask())

    with ThreadPoolExecutor(num_clients) as threads:
        clients = [threads.submit(run) for _ in range(num_clients)]
        try:
            yield answers
        finally:
            is_over.set()
        for client in clients:
            client.result()


def faulty(**model: object) -> dict[str, dict[str, dict[str, object]]]:
    """Return settings for one `FaultModel` named m; it has one replica unless told otherwise."""
    return {"models": {"m": {"source": FAULTY, "replicas": 1, **model}}}


def num_descriptors(process: psutil.Process) -> int:
    """Return how many descriptors a process has, besides connections to the store of jobs.

    The store keeps as many of those, of a handful at most, as were needed at once by chance.
    """
    files = (Path(each.path).name for each in process.open_files())
    return process.num_fds() - sum(name.startswith("jobs.sqlite3") for name in files)


def status_of(url: str, timeout_s: float = 60.0) -> int:
    """Return the status of the answer to a GET request, or 0 while nobody answers."""
    try:
        return httpx.get(url, timeout=timeout_s, verify=False).status_code
    except httpx.TransportError:
        return 0


def until(claim: Callable[[], object], timeout_s: float = 150.0) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline, claim
        time.sleep(0.02)


def left_over(family: Sequence[psutil.Process], timeout_s: float = 60.0) -> list[psutil.Process]:
    """Return the processes that are still alive after a time that is enough for all to end."""
    deadline = time.monotonic() + timeout_s
    while (alive := [each for each in family if is_alive(each)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive


def _are_up(fronts: Sequence[Mapping[str, Any]]) -> bool:
    return all(front["state"] == "up" for front in fronts)


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(value, default=str)
