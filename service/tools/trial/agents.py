"""The hosts of a service on trial: agents on this machine, each with processes of its own."""

import asyncio
import contextlib
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from inferpool.service.tools.trial.connection import NoAnswerError, TrialError
from inferpool.service.tools.trial.processes import (
    LINGER_S,
    POLL_S,
    TrialProcess,
    num_left_over,
)
from inferpool.service.tools.trial.service import HOST, TrialService, free_port

if TYPE_CHECKING:
    from inferpool.service.settings.loader import Row

_STOP_S = 60.0
"""How long an agent may take to end its workers."""
_MAX_SWEEPS = 20


class TrialAgent(TrialProcess):
    """The agent of one host, and all processes under it."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path) -> None:
        """Store the arguments of `inferpool agent`, and the file for its log."""
        super().__init__(["agent", "--name", name, *arguments], log)
        self.name = name

    def kill(self) -> None:
        """Kill the agent alone: its workers must end by themselves."""
        assert self._process is not None
        self._process.kill()

    def pause(self) -> None:
        """Stop the agent, and then all processes under it, as if the host stood still."""
        stopped: set[int] = set()
        for _ in range(_MAX_SWEEPS):  # the next one finds processes forked meanwhile
            found = [each for each in self._from_agent_on() if each.pid not in stopped]
            if not found:
                return
            for process in found:
                stopped.add(process.pid)
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue all of them."""
        for process in self._from_agent_on():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Ask the agent to finish its work and end."""
        assert self._process is not None
        self._process.terminate()

    async def ended(self) -> int:
        """Wait for its end, and return its exit code.

        Raises:
            TrialError: It does not end.
        """
        assert self._process is not None
        try:
            return await asyncio.to_thread(self._process.wait, _STOP_S)
        except subprocess.TimeoutExpired:
            text = f"the agent {self.name} did not end in {_STOP_S:g} s{self.log_tail()}"
            raise TrialError(text) from None

    def _from_agent_on(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            agent = psutil.Process(self.pid)
            return [agent, *agent.children(recursive=True)]
        return []


class TrialAgents:
    """The agents of a trial. A context manager: it starts all, and leaving it kills all."""

    def __init__(self, num_hosts: int) -> None:
        """Create a key for agents and front end, and choose the cluster port."""
        self._folder = tempfile.TemporaryDirectory(prefix="inferpool-agents-")
        folder = Path(self._folder.name)
        key = folder / "key"
        key.touch(mode=0o600)
        key.write_text(secrets.token_urlsafe(24), encoding="utf-8")
        port = free_port()
        arguments = ["--join", f"{HOST}:{port}", "--key-file", str(key), "--log-format", "json"]
        self.agents = [
            TrialAgent(name, arguments, folder / f"{name}.log")
            for name in (f"host-{number}" for number in range(num_hosts))
        ]
        self.rows: list[Row] = [
            (("cluster_port",), port, "trial"),
            (("cluster_host",), HOST, "trial"),
            (("cluster_keys_file",), str(key), "trial"),
        ]
        """Settings of the front end, to go before those of models; none without hosts."""
        if not num_hosts:
            self.rows = []

    def __enter__(self) -> "TrialAgents":
        """Start all agents. They dial until the front end is there."""
        for agent in self.agents:
            agent.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the remaining processes."""
        for agent in self.agents:
            agent.destroy()
        self._folder.cleanup()

    def family(self) -> list[psutil.Process]:
        """Return all processes that are alive."""
        return [process for agent in self.agents for process in agent.family()]

    async def until_ready(self, service: TrialService, timeout_s: float) -> None:
        """Wait until each host has joined, and all its workers are ready.

        Raises:
            TrialError: They are not in time, or an agent or a worker has failed.
        """
        if not self.agents:
            return
        until = time.monotonic() + timeout_s
        names = {agent.name for agent in self.agents}
        while True:
            for agent in self.agents:
                if not agent.is_running:
                    raise TrialError(f"the agent {agent.name} ended{agent.log_tail()}")
            with contextlib.suppress(OSError, NoAnswerError):
                health = await service.health()
                if health.failure:
                    raise TrialError(f"a worker failed: {health.failure}{service.log_tail()}")
                if health.is_full and {worker.host for worker in health.workers} == names:
                    return
            if time.monotonic() > until:
                tail = self.agents[0].log_tail() + service.log_tail()
                raise TrialError(f"the hosts are not ready in {timeout_s:g} s{tail}")
            await asyncio.sleep(POLL_S)

    async def stop(self) -> tuple[list[str], int]:
        """Stop all agents, and wait for their ends.

        Returns:
            Problems with their ends; and how many of their processes were still there a
            moment later.
        """
        self.family()
        for agent in self.agents:
            agent.end()
        complaints = []
        for agent in self.agents:
            try:
                code = await agent.ended()
            except TrialError as error:
                complaints.append(str(error))
                continue
            if code != 0:
                complaints.append(f"the agent {agent.name} exited with {code}")
        return complaints, await num_left_over(self.family, LINGER_S)
