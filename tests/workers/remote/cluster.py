"""A front end's engine and agents of several hosts, all in the process of a test."""

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from inferpool.models.speed_names import SpeedReport
from inferpool.workers.host.devices import Host
from inferpool.workers.host.engine import WorkerId
from inferpool.workers.host.local import LocalEngine
from inferpool.workers.remote.agent import Agent, Dialing
from inferpool.workers.remote.host import RemoteHost
from inferpool.workers.remote.hosted import HostedWorkers
from inferpool.workers.remote.hosts import RemoteHosts
from inferpool.workers.remote.joining import Dialer, make_instance
from inferpool.workers.remote.wire import Beat, HostFacts, HostVitals, Pulse, ToAgent, Views
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.messages import Ready
from tests.fakes import FakeWorker
from tests.workers.contract import until

if TYPE_CHECKING:
    from inferpool.workers.remote.link import HostLink
    from inferpool.workers.shared.errors import WorkerStartError

KEY = b"a key of 16 bytes or more"
PATIENCE_S = 60.0
"""Seconds that joining may take: none of these tests is about a slow machine."""


class HostNotes:
    """Notes which hosts came and went."""

    def __init__(self) -> None:
        self.joined: list[RemoteHost] = []
        self.lost: list[tuple[str, str]] = []

    def on_joined(self, host: RemoteHost) -> None:
        self.joined.append(host)

    def on_lost(self, host: RemoteHost, reason: str) -> None:
        self.lost.append((host.name, reason))


def facts_of(name: str, **changes: str) -> HostFacts:
    facts = {"version": "1", "torch": "2", "python": "3", "instance": make_instance(), **changes}
    return HostFacts(name=name, pid=1, devices=Host(cpus=(0,), num_cores=1), **facts)


def open_front(
    arena: Arena,
    *,
    port: int = 0,
    tls: ssl.SSLContext | None = None,
    keys: Sequence[bytes] = (KEY,),
    join_s: float = PATIENCE_S,
) -> tuple[RemoteHosts, HostNotes]:
    listener = socket.create_server(("127.0.0.1", port))
    watcher = HostNotes()
    hosts = RemoteHosts(arena, listener, keys, tls, "1", watcher, join_s=join_s, rest_s=0.05)
    hosts.open()
    return hosts, watcher


def make_agent(
    address: tuple[str, int] | Sequence[tuple[str, int]],
    name: str = "h",
    *,
    arena: Arena | None = None,
    tls: ssl.SSLContext | None = None,
    key: bytes = KEY,
    engine: Any = None,
    facts: HostFacts | None = None,
    dialing: Dialing | None = None,
    burst_s: float = 1.0,
) -> Agent:
    arena = arena or Arena(4 << 20)
    return Agent(
        addresses=[address] if isinstance(address[0], str) else address,  # type: ignore[list-item]
        dialer=Dialer(key, tls, facts or facts_of(name), join_s=PATIENCE_S),
        arena=arena,
        workers=HostedWorkers(engine or LocalEngine(arena), None, burst_s=burst_s),
        grace_s=5.0,
        dialing=dialing or Dialing(patience_s=PATIENCE_S),
    )


@contextlib.asynccontextmanager
async def running(*agents: Agent) -> AsyncIterator[None]:
    """Let agents run meanwhile."""
    tasks = [asyncio.create_task(agent.run()) for agent in agents]
    try:
        yield
    finally:
        for agent in agents:
            agent.stop()
        await asyncio.gather(*tasks)


def ready_of(**changes: object) -> Ready:
    return msgspec.structs.replace(
        Ready(1, [], [], "cpu", 0.0, None, True, SpeedReport()), **changes
    )


class LoadedWorker(FakeWorker):
    """A worker of a host that answers when the test says so, or once it is told to stop."""

    has_patience = True
    """It finishes what it holds before it stops, if it is given the time."""

    async def stop(self, grace_s: float) -> None:
        await self.may_stop.wait()
        if grace_s > 0 and self.has_patience:
            while self.batches:
                self.answer()
        if not self.is_gone:
            self.die(started=False)


class LoadingEngine:
    """An engine of a host whose workers load until the test says so."""

    def __init__(self, *, loads: bool = True) -> None:
        self.may_load = asyncio.Event()
        if loads:
            self.may_load.set()
        self.ready = ready_of()
        self.failures: list[WorkerStartError] = []
        self.started: list[LoadedWorker] = []
        self.configs: list[WorkerConfig] = []
        self.num_given_up = 0
        self.is_closed = False

    async def start(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> LoadedWorker:
        self.configs.append(config)
        on_progress("loading")
        if self.failures:
            raise self.failures.pop(0)
        try:
            await self.may_load.wait()
        except asyncio.CancelledError:
            self.num_given_up += 1
            raise
        worker = LoadedWorker(id)
        worker.ready = self.ready
        self.started.append(worker)
        return worker

    def forkserver_vitals(self) -> None:
        return None

    async def close(self) -> None:
        self.is_closed = True


class OtherSide:
    """An agent that does what the test says."""

    def __init__(self, facts: HostFacts, *, tls: ssl.SSLContext | None = None) -> None:
        self.facts = facts
        self.messages: list[ToAgent] = []
        """All that has come, but beats."""
        self.bodies: list[bytes] = []
        self.beats: list[Beat] = []
        self.answers_beats = True
        self.ends: list[str] = []
        self._dialer = Dialer(KEY, tls, facts, join_s=PATIENCE_S)
        self.link: HostLink[ToAgent]

    async def join(self, hosts: RemoteHosts) -> RemoteHost:
        """Join a front end; return what it has of this host."""
        self.link, mailbox, _ = await self._dialer.join(hosts.address, role="agent", term=0)
        mailbox.hand_over(self.link, self)
        return hosts.hosts[self.facts.name]

    async def next(self) -> ToAgent:
        """Wait for the next message, and take it."""
        await until(lambda: self.messages)
        return self.messages.pop(0)

    def room_for(self, message: ToAgent, num_bytes: int) -> Views:
        return [memoryview(bytearray(num_bytes))]

    def on_message(self, message: ToAgent, body: Views) -> None:
        if isinstance(message, Beat):
            self.beats.append(message)
            if self.answers_beats:
                self.link.send(Pulse(message.sent_at, HostVitals(wall_time=time.time()), []))
        else:
            self.messages.append(message)
            self.bodies.append(b"".join(body))

    def on_closed(self, reason: str) -> None:
        self.ends.append(reason)


@contextlib.asynccontextmanager
async def front(
    arena: Arena,
    *,
    tls: ssl.SSLContext | None = None,
    keys: Sequence[bytes] = (KEY,),
    join_s: float = PATIENCE_S,
) -> AsyncIterator[tuple[RemoteHosts, HostNotes]]:
    """Run a front end without any host."""
    hosts, watcher = open_front(arena, tls=tls, keys=keys, join_s=join_s)
    try:
        yield hosts, watcher
    finally:
        await hosts.close()
