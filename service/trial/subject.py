"""The service on trial: started as its user would, on a free port of this host."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

import service
from service.cli_config import Row, write_toml
from service.settings import Settings
from service.settings_loader import Loaded
from service.settings_names import KEY_SETTINGS, PREFIX
from service.trial.bound import bound_command
from service.trial.client import Address, NoAnswerError, connect
from service.trial.errors import TrialError
from service.trial.health import read_health

HOST = "127.0.0.1"
_NUM_TAIL_LINES = 15
_HINT = "\n`inferpool serve` tells more of it"
_POLL_S = 0.05
_STOP_S = 30.0
_LINGER_S = 2.0
"""For the other processes of a service that has left."""
_TOLD_TO_PEOPLE = "service.console"
"""The logger of what each worker comes to."""
_TELEMETRY = "OTEL_"
"""How the standard variables of OpenTelemetry begin."""
_LEFT_OUT = (
    *KEY_SETTINGS,
    *(f"{name}_file" for name in KEY_SETTINGS),
    "tls_certificate",
    "tls_key",
    "host",
    "port",
    "log_format",
    *(name for name in Settings.model_fields if name.startswith("trace_")),
)


class _Line(msgspec.Struct):
    """Of its log."""

    level: str
    logger: str
    message: str


class Subject:
    """A service while it runs. A context manager: leaving it ends every process of it."""

    def __init__(self, rows: Sequence[Row]) -> None:
        """Start nothing yet.

        Args:
            rows: Its settings, but for where it listens and how it logs.
        """
        self.address: Address = (HOST, _free_port())
        own: list[Row] = [
            (("host",), HOST, "trial"),
            (("port",), self.address[1], "trial"),
            (("log_format",), "json", "trial"),
        ]
        self._rows = [*own, *rows]
        self._folder = tempfile.TemporaryDirectory(prefix="inferpool-trial-")
        self._log = Path(self._folder.name, "service.log")
        self._process: subprocess.Popen[bytes] | None = None
        self._family: set[psutil.Process] = set()

    def __enter__(self) -> "Subject":
        """Start the service."""
        config = Path(self._folder.name, "inferpool.toml")
        with config.open("w", encoding="utf-8") as file:
            write_toml(self._rows, file)
        command = bound_command(["serve", "--config", str(config)])
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=_environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        """Kill what is left of it."""
        for process in self.family():
            _signal(process, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        """Of the front end."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the front end is alive."""
        return self._process is not None and self._process.poll() is None

    def family(self) -> list[psutil.Process]:
        """All processes of it that are alive, now or when this was asked before."""
        if self._process is not None and self._process.poll() is None:
            try:
                front_end = psutil.Process(self._process.pid)
                self._family |= {front_end, *front_end.children(recursive=True)}
            except psutil.NoSuchProcess:
                pass
        self._family = {process for process in self._family if is_alive(process)}
        return sorted(self._family, key=lambda process: process.pid)

    async def until_ready(self, timeout_s: float) -> None:
        """Wait until every worker of every model is ready.

        Raises:
            TrialError: The service or a worker ended, or is not ready in time.
        """
        waited_s = 0.0
        while True:
            if not self.is_running:
                assert self._process is not None
                if reason := self._last_words():
                    raise TrialError(f"{reason}{_HINT}")
                code = self._process.returncode
                raise TrialError(f"the service ended with exit code {code}{self.log_tail()}")
            try:
                connection = await connect(self.address, lambda: None)
                try:
                    health = await read_health(connection)
                finally:
                    connection.close()
                if health.is_full:
                    return
                if health.failure:
                    raise TrialError(f"a worker failed: {health.failure}{_HINT}")
            except (OSError, NoAnswerError):
                pass
            if waited_s > timeout_s:
                raise TrialError(f"the service is not ready in {timeout_s:g} s{self.log_tail()}")
            await asyncio.sleep(_POLL_S)
            waited_s += _POLL_S

    async def stop(self) -> tuple[int | None, int]:
        """Tell the service to stop.

        Returns:
            Its exit code, None if it did not leave in time; and how many of its processes were
            still there a moment later.
        """
        assert self._process is not None
        self.family()
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, _STOP_S)
        except subprocess.TimeoutExpired:
            return None, len(self.family())
        until = time.monotonic() + _LINGER_S
        while (alive := self.family()) and time.monotonic() < until:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(_POLL_S)
        return self._process.returncode, len(alive)

    def _last_words(self) -> str:
        """Why it gave up, if it said so: what the first worker failed of, and what that led to."""
        first_failure = end = ""
        with contextlib.suppress(OSError):
            for line in self._log.read_bytes().splitlines():
                with contextlib.suppress(msgspec.MsgspecError):
                    said = msgspec.json.decode(line, type=_Line)
                    if said.level == "critical":
                        end = said.message
                    elif said.level == "error" and said.logger == _TOLD_TO_PEOPLE:
                        first_failure = first_failure or said.message
        return "; ".join(filter(None, [first_failure, end])) if end else ""

    def log_tail(self) -> str:
        """The last lines of its log, to go behind a message."""
        try:
            lines = self._log.read_text(errors="replace").splitlines()[-_NUM_TAIL_LINES:]
        except OSError:
            return ""
        return "".join(f"\n    {line}" for line in ["the end of its log:", *lines])


def rows_of(loaded: Loaded) -> list[Row]:
    """The user's settings as far as they mean anything to a service that only this host sees.

    It is not traced: whoever watches the user's services would take what is tried for their work.
    """
    return [row for row in loaded.rows() if row[0][0] not in _LEFT_OUT]


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, without the settings, which the file has all that matter of."""
    left_out = (PREFIX, _TELEMETRY)
    kept = {name: value for name, value in environ.items() if not name.startswith(left_out)}
    root = Path(service.__file__).parents[1]
    if root.name != "site-packages":  # a clone that is run where it lies
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), kept.get("PYTHONPATH")]))
    return kept


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def is_alive(process: psutil.Process) -> bool:
    """Whether a process has not ended; its number may be another's by now.

    One that has ended is there until its parent looks, and an orphan's, the host's first process,
    may take its time.
    """
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
