"""The service on trial, started as a user would start it, on a free port of this host."""

import asyncio
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from inferpool.service.client.health import ServiceHealth
from inferpool.service.settings.loader import LoadedSettings, Row, write_toml
from inferpool.service.settings.names import KEY_SETTINGS
from inferpool.service.settings.settings import Settings
from inferpool.service.tools.trial.connection import Address, NoAnswerError, TrialError, connected
from inferpool.service.tools.trial.processes import LINGER_S, POLL_S, TrialProcess, num_left_over

HOST = "127.0.0.1"
_HINT = "\n`inferpool serve` tells more of it"
_STOP_S = 30.0
_LEFT_OUT = (
    *KEY_SETTINGS,
    *(f"{name}_file" for name in KEY_SETTINGS),
    "tls_certificate",
    "tls_key",
    "host",
    "port",
    "grpc_port",
    "log_format",
    "job_store",
    "torchserve",  # its file names addresses; the models that it loads are settings too
    "only_predictions",  # a trial asks for its health
    *(name for name in Settings.model_fields if name.startswith(("trace_", "cluster_", "standby"))),
)


class TrialService(TrialProcess):
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
        self._config = Path(self._folder.name, "inferpool.toml")
        host, port = self.address
        arguments = ["serve", "--config", str(self._config), "--host", host, "--port", str(port)]
        super().__init__(arguments, Path(self._folder.name, "service.log"))

    def __enter__(self) -> "TrialService":
        """Start the service."""
        with self._config.open("w", encoding="utf-8") as file:
            write_toml(self._rows, file)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the remaining processes."""
        self.destroy()
        self._folder.cleanup()

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
            await asyncio.sleep(POLL_S)
            waited_s += POLL_S

    async def stop(
        self, stop_s: float = _STOP_S, linger_s: float = LINGER_S
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
        return self._process.returncode, await num_left_over(self.family, linger_s)


def rows_of(loaded: LoadedSettings) -> list[Row]:
    """Return the user's settings that matter for a service that only this host sees.

    It sends no traces, which would look like real work of the user's services. It does not have the
    user's store of jobs, since it would compute those jobs.
    """
    return [row for row in loaded.rows() if row[0][0] not in _LEFT_OUT]


def free_port() -> int:
    """Return a free port of this host."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
