"""A real front end and the real agents of some hosts, each a process of its own on this machine."""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from tests.e2e import forked
from tests.e2e.running import ROOT, Running, ended_after, running, status_of, until
from tests.ports import free_port

KEY = "a-key-of-this-cluster-alone"
KEYS = {"INFERPOOL_CLUSTER_KEYS": KEY}
_JOIN_TIMEOUT_S = 90.0


class RunningCluster:
    """A front end and the agents that join it, until the end of a block; both may be replaced."""

    def __init__(
        self,
        stack: ExitStack,
        *,
        arguments: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        agent_arguments: Sequence[str] = (),
    ) -> None:
        self.port = free_port()
        """The cluster port, which the next front end has too."""
        self.http_port = free_port()
        self.service: Running
        self.agents: dict[str, Running] = {}
        """The agents that were started, by the names of their hosts."""
        self._stack = stack
        self._arguments = arguments
        self._settings = settings
        self._env = {**KEYS, **(env or {})}
        self._agent_arguments = agent_arguments

    def start_service(self) -> Running:
        """Start the front end, or the next one at the same ports."""
        service = running(
            *self._arguments,
            "--cluster-port",
            str(self.port),
            settings=self._settings,
            env=self._env,
            port=self.http_port,
            ready=False,
        )
        self.service = self._stack.enter_context(service)
        self.service.url = f"http://127.0.0.1:{self.http_port}"  # logged once a host serves
        until(self._is_listening)
        return self.service

    def _is_listening(self) -> bool:
        assert self.service.process.poll() is None, self.service.log
        return status_of(f"{self.service.url}/health/live") == 200

    def start_agent(self, name: str, *arguments: str) -> Running:
        """Start the agent of a host, or the next one with the same name."""
        agent = agent_at(
            f"127.0.0.1:{self.port}", name, *self._agent_arguments, *arguments, env=self._env
        )
        self.agents[name] = self._stack.enter_context(agent)
        return self.agents[name]

    def hosts(self) -> dict[str, dict[str, Any]]:
        """Return what /health says about each host, by name."""
        return {host["name"]: host for host in self.service.get("/health").json()["hosts"]}

    def workers_of(self, name: str) -> list[dict[str, Any]]:
        """Return what /health says about the workers of a host."""
        return [worker for worker in self.service.workers() if worker["host"] == name]

    def wait_until_full(self, *names: str) -> None:
        """Wait until these hosts alone are connected, or all that have an agent, and have loaded.

        Each host has at least one worker then, and all workers are ready.
        """
        wanted = set(names or self.agents)

        def is_full() -> bool:
            try:
                hosts = [host for host in self.hosts().values() if host["state"] != "lost"]
            except httpx.TransportError:
                return False
            loaded = all(0 < each["workers_ready"] == each["workers"] for each in hosts)
            return loaded and {host["name"] for host in hosts} == wanted

        until(is_full, _JOIN_TIMEOUT_S)

    def wait_until_lost(self, name: str) -> None:
        """Wait until the front end knows that a host is lost."""

        def is_lost() -> bool:
            host = self.hosts().get(name)
            return host is None or host["state"] == "lost"

        until(is_lost)


@contextlib.contextmanager
def cluster(
    *names: str,
    arguments: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    agent_arguments: Sequence[str] = (),
    ready: bool = True,
) -> Iterator[RunningCluster]:
    """Start a front end and an agent for each name, and end them however the test left them.

    Args:
        names: Names of the hosts.
        arguments: Arguments of `inferpool serve`.
        settings: Settings of the front end, for its file.
        env: Variables for all of these processes.
        agent_arguments: Arguments of `inferpool agent`.
        ready: Wait until all workers of all hosts are up.
    """
    with contextlib.ExitStack() as stack:
        made = RunningCluster(
            stack,
            arguments=arguments,
            settings=settings,
            env=env,
            agent_arguments=agent_arguments,
        )
        made.start_service()
        for name in names:
            made.start_agent(name)
        if ready:
            made.wait_until_full()
        yield made


@contextlib.contextmanager
def agent_at(
    address: str,
    name: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> Iterator[Running]:
    """Start `inferpool agent`, and end it and its workers however the test left it.

    Args:
        address: Where it joins: HOST:PORT, or several with commas.
        name: Name of its host.
        arguments: More arguments.
        env: Variables in addition to ours; the key of `cluster` by default.
        cwd: Folder in which it starts.
    """
    command = [*forked.COMMAND, "agent", "--join", address, "--name", name]
    process = forked.popen(
        [*command, *arguments, "--log-format", "json"],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": forked.python_path(), **KEYS, **(env or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with ended_after(process) as agent:
        yield agent
