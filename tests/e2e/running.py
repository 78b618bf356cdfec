"""A real service in a process of its own, as a user starts it."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import psutil

from inferpool.service.tools.trial.processes import is_alive

ROOT = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S = 60.0


class Running:
    """A service that has been started; `log` is what it wrote, line by line."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.url = ""
        self.log: list[dict[str, object]] = []
        self._may_read = threading.Event()
        self._may_read.set()
        self._lines: queue.Queue[dict[str, object] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for_log(self, text: str, timeout_s: float = _START_TIMEOUT_S) -> dict[str, object]:
        """The next log line whose message contains a text: each line is found once."""
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

    def wait_until_ready(self) -> "Running":
        """Wait until /health/ready answers 200, and no worker is still on its way."""
        self.url = str(self.wait_for_log(" at http")["message"]).rpartition(" at ")[2]
        until = time.monotonic() + _START_TIMEOUT_S
        while httpx.get(f"{self.url}/health/ready", verify=False).json().get("status") != "ready":
            assert time.monotonic() < until, self.log
            time.sleep(0.02)
        return self

    def family(self) -> list[psutil.Process]:
        """The front end and all processes under it."""
        front_end = psutil.Process(self.process.pid)
        return [front_end, *front_end.children(recursive=True)]

    def worker_pids(self) -> list[int]:
        """Of the workers that are ready."""
        models = httpx.get(f"{self.url}/health").json()["models"]
        return [w["pid"] for m in models for w in m["workers"] if w["state"] == "ready"]

    def signal(self, signum: int) -> None:
        """Send the front end a signal."""
        self.process.send_signal(signum)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Its exit code, once `log` has all that it wrote."""
        code = self.process.wait(timeout_s)
        self._reader.join(10)  # in vain where another process has its stderr
        return code

    def pause_reading(self) -> None:
        """Read none of its log for a while."""
        self._may_read.clear()

    def resume_reading(self) -> None:
        """Read its log again."""
        self._may_read.set()

    def close(self) -> None:
        """Stop reading its log; it has ended."""
        self.resume_reading()
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for text in self.process.stderr:
            self._may_read.wait()
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
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    port: int = 0,
    ready: bool = True,
    command: Sequence[str] = (sys.executable, "-m", "inferpool"),
    preexec_fn: Callable[[], None] | None = None,
) -> Iterator[Running]:
    """Start `python -m inferpool serve`, and end it however the test left it."""
    speed = [] if "--speed" in arguments else ["--speed", "exact"]  # to choose takes seconds
    process = subprocess.Popen(
        [*command, "serve", *arguments, *speed, "--port", str(port), "--log-format", "json"],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=preexec_fn,
    )
    service = Running(process)
    try:
        yield service.wait_until_ready() if ready else service
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
        service.close()


def until(claim: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline, claim
        time.sleep(0.02)


def left_over(family: Sequence[psutil.Process], timeout_s: float = 10.0) -> list[psutil.Process]:
    """Those of some processes that are still there after a while: longer than any should take."""
    until = time.monotonic() + timeout_s
    while (alive := [each for each in family if is_alive(each)]) and time.monotonic() < until:
        time.sleep(0.02)
    return alive
