"""The service on trial, started as a user would start it, on a free port of this host."""

import asyncio
import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from inferpool.service.client.health import ServiceHealth
from inferpool.service.settings.loader import LoadedSettings, Row, write_toml
from inferpool.service.settings.names import KEY_SETTINGS, PREFIX
from inferpool.service.settings.settings import Settings
from inferpool.service.tools.trial.bound import bound_command
from inferpool.service.tools.trial.connection import Address, NoAnswerError, TrialError, connected
from inferpool.service.tools.trial.processes import Family, LogReader

HOST = "127.0.0.1"
_HINT = "\n`inferpool serve` tells more of it"
_POLL_S = 0.05
_STOP_S = 30.0
_LINGER_S = 2.0
"""How long the other processes of a service may outlive its front end."""
_TELEMETRY = "OTEL_"
_LEFT_OUT = (
    *KEY_SETTINGS,
    *(f"{name}_file" for name in KEY_SETTINGS),
    "tls_certificate",
    "tls_key",
    "host",
    "port",
    "log_format",
    "job_store",
    *(name for name in Settings.model_fields if name.startswith(("trace_", "cluster_", "standby"))),
)


class TrialService:
    """A service while it runs. A context manager: leaving it kills all its processes."""

    def __init__(
        self,
        rows: Sequence[Row],
        admin_key: str = "",
        predict_keys: Sequence[str] = (),
        *,
        keeps_jobs: bool = False,
    ) -> None:
        """Store the settings, without the service's address and log.

        Args:
            rows: The settings.
            admin_key: Key of administration; without it, the service has no such paths.
            predict_keys: Keys for calls; the first of them reads the state of the service.
            keeps_jobs: It has a store of jobs, in a folder of its own.
        """
        self.key = predict_keys[0] if predict_keys else ""
        self.address: Address = (HOST, free_port())
        own: list[Row] = [
            (("host",), HOST, "trial"),
            (("port",), self.address[1], "trial"),
            (("log_format",), "json", "trial"),
        ]
        self._folder = tempfile.TemporaryDirectory(prefix="inferpool-trial-")
        self.job_store = Path(self._folder.name, "jobs") if keeps_jobs else None
        own.append((("job_store",), str(self.job_store or "none"), "trial"))
        for kind, keys in (("admin", [admin_key] if admin_key else []), ("predict", predict_keys)):
            if keys:
                file = Path(self._folder.name, f"{kind}-keys")
                file.touch(mode=0o600)
                file.write_text("\n".join(keys), encoding="utf-8")
                own.append(((f"{kind}_keys_file",), str(file), "trial"))
        self._rows = [*own, *rows]
        self._log = Path(self._folder.name, "service.log")
        self._process: subprocess.Popen[bytes] | None = None
        self._family: Family | None = None

    def __enter__(self) -> "TrialService":
        """Start the service."""
        config = Path(self._folder.name, "inferpool.toml")
        with config.open("w", encoding="utf-8") as file:
            write_toml(self._rows, file)
        command = bound_command(["serve", "--config", str(config)])
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=clean_environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._family = Family(self._process)
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the remaining processes."""
        if self._process is not None and self._family is not None:
            self._family.kill()
            self._process.wait()
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        """Process id of the front end."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """The front end is alive."""
        return self._process is not None and self._process.poll() is None

    def family(self) -> list[psutil.Process]:
        """Return its living processes, of all that were seen now or at an earlier call."""
        return [] if self._family is None else self._family.alive()

    async def health(self) -> ServiceHealth:
        """Return the state of its workers."""
        async with connected(self.address, key=self.key) as connection:
            return await connection.read_health()

    async def until_ready(self, timeout_s: float) -> None:
        """Wait until every worker of every model is ready.

        Raises:
            TrialError: The service or a worker ended, or is not ready in time.
        """
        waited_s = 0.0
        while True:
            if not self.is_running:
                assert self._process is not None
                if reason := self._said().last_words():
                    raise TrialError(f"{reason}{_HINT}")
                code = self._process.returncode
                raise TrialError(f"the service ended with exit code {code}{self.log_tail()}")
            try:
                health = await self.health()
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

    async def stop(
        self, stop_s: float = _STOP_S, linger_s: float = _LINGER_S
    ) -> tuple[int | None, int]:
        """Stop the service, and wait for its end.

        Args:
            stop_s: How long it may take.
            linger_s: How long its processes may outlive it.

        Returns:
            Its exit code, None if it did not leave in time; and how many of its processes were
            still there a moment later.
        """
        assert self._process is not None
        self.family()
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, stop_s)
        except subprocess.TimeoutExpired:
            return None, len(self.family())
        until = time.monotonic() + linger_s
        while (alive := self.family()) and time.monotonic() < until:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(_POLL_S)
        return self._process.returncode, len(alive)

    def log_tail(self) -> str:
        """Return the last lines of its log, to append to a message."""
        return self._said().tail()

    def _said(self) -> LogReader:
        said = LogReader()
        with contextlib.suppress(OSError):
            for line in self._log.read_bytes().splitlines():
                said.take(line)
        return said


def rows_of(loaded: LoadedSettings) -> list[Row]:
    """Return the user's settings that matter for a service that only this host sees.

    It sends no traces, which would look like real work of the user's services. It does not have the
    user's store of jobs, since it would compute those jobs.
    """
    return [row for row in loaded.rows() if row[0][0] not in _LEFT_OUT]


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without settings: the file has those that matter."""
    left_out = (PREFIX, _TELEMETRY)
    kept = {name: value for name, value in environ.items() if not name.startswith(left_out)}
    root = Path(__file__).absolute().parents[4]  # where `inferpool` lies
    if root.name != "site-packages":  # a clone that is run where it lies
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), kept.get("PYTHONPATH")]))
    return kept


def free_port() -> int:
    """Return a free port of this host."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
