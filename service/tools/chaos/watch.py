"""Watches /health to learn how long workers and hosts take to come back after a fault."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
import psutil

from inferpool.service.client.health import (
    DecoderState,
    ServiceHealth,
    WorkerState,
)
from inferpool.service.tools.trial.connection import (
    Address,
    NoAnswerError,
    TrialConnection,
    connect,
)
from inferpool.service.tools.trial.processes import is_alive

HostKind = Literal["host kill", "host stop", "host end"]
Kind = Literal["kill", "stop", "forkserver", "decoder"] | HostKind
FORKSERVER = "forkserver"
"""Name of the forkserver; those of workers have a slash."""

_FINE_S = 0.004
_COARSE_S = 0.05
_SOON_S = 0.5
"""How long after a fault /health is read often."""


def decoder_name(worker: WorkerState, decoder: DecoderState) -> str:
    """Return the name of a decoder."""
    return f"{worker.name} decoder {decoder.number}"


class Recovery(msgspec.Struct, kw_only=True):
    """A fault of a worker, a decoder, the forkserver or a host, and the moments of its recovery.

    Times are on CLOCK_MONOTONIC.
    """

    kind: Kind
    worker: str
    incarnation: int
    """It differs in the successor. For a decoder it is the process id; for a host it is the number
    of its connection."""
    rank: int | None = None
    processes: Sequence[psutil.Process] = ()
    num_left_behind: int = 0
    """Processes that were still there when the successor was ready."""
    began: float = 0.0
    noticed: float | None = None
    """Moment when the service no longer counted on the worker."""
    freed: float | None = None
    """Moment when a host could go on, or its agent was started anew."""
    recovered: float | None = None
    """Moment when its successor was ready, and every worker that was not struck as well. For a host
    it is when all its own workers were ready."""
    host: str = ""
    """Host of the worker, of several; or the host that was struck."""

    @property
    def is_of_host(self) -> bool:
        """A whole host was struck."""
        return self.kind.startswith("host ")


class _Sight(NamedTuple):
    """The state of a process or host that may be struck."""

    state: str
    incarnation: int
    host: str = ""


_NOT_THERE = _Sight("absent", -1)


class Watch:
    """Reads /health, often after a fault. Lives in the event loop."""

    def __init__(self, address: Address, key: str = "") -> None:
        self.recoveries: list[Recovery] = []
        self._address = address
        self._key = key
        self._connection: TrialConnection | None = None
        self._is_asking = asyncio.Lock()
        self._is_wanted = asyncio.Event()

    @property
    def pending(self) -> Sequence[Recovery]:
        """Faults that are not over."""
        return [each for each in self.recoveries if each.recovered is None]

    async def look(self) -> ServiceHealth:
        """Return the state of all workers now."""
        async with self._is_asking:
            if self._connection is None or not self._connection.is_open:
                self._connection = await connect(self._address, key=self._key)
            return await self._connection.read_health()

    async def seen(self) -> ServiceHealth:
        """Return that state, or an empty one while the service does not answer."""
        with contextlib.suppress(OSError, NoAnswerError):
            return await self.look()
        return ServiceHealth(models=[])

    def add(self, recovery: Recovery) -> None:
        """Watch a recovery. Workers of a struck host are lost in any case."""
        if recovery.is_of_host:
            host = recovery.host
            known = self.recoveries
            known[:] = [each for each in known if each.recovered or each.host != host]
        self.recoveries.append(recovery)
        self._is_wanted.set()

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await self._is_wanted.wait()
            pending = self.pending
            if not pending:
                self._is_wanted.clear()
                continue
            try:
                health = await self.look()
            except (OSError, NoAnswerError):
                await asyncio.sleep(_COARSE_S)
                continue
            now = time.monotonic()
            self._compare(pending, health, now)
            is_soon = now - max(each.began for each in pending) < _SOON_S
            await asyncio.sleep(_FINE_S if is_soon else _COARSE_S)

    async def settle(self, timeout_s: float) -> bool:
        """Wait until all workers are well again, and return whether they are."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            try:
                if not self.pending and (await self.look()).is_full:
                    return True
            except (OSError, NoAnswerError):
                pass
            await asyncio.sleep(_COARSE_S)
        return False

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()

    def _compare(self, pending: Sequence[Recovery], health: ServiceHealth, now: float) -> None:
        self._compare_hosts(pending, health, now)
        pending = [each for each in pending if not each.is_of_host]
        struck = {each.host for each in self.pending if each.is_of_host}
        workers = {w.name: _Sight(w.state, w.incarnation, w.host) for w in health.workers}
        if (forkserver := health.forkserver) is not None:
            workers[FORKSERVER] = _Sight(forkserver.state, forkserver.incarnation)
        living = {
            decoder_name(worker, each): _Sight("ready", each.pid)
            for worker in health.workers
            for each in worker.decoders
        }
        for each in pending:
            if each.kind == "decoder":  # no other decoder has to be there
                workers[each.worker] = living.get(each.worker, _NOT_THERE)
            if each.worker.partition(" decoder ")[0] not in workers:
                if each.kind != "forkserver":
                    self.recoveries.remove(each)  # its version was swapped for another
                continue
            worker = workers[each.worker]
            is_gone = worker.incarnation != each.incarnation or worker.state != "ready"
            if each.noticed is None and is_gone:
                each.noticed = now
        hidden = {each.worker for each in pending if each.noticed is None}
        absent = {
            name
            for name, worker in workers.items()
            if worker.state != "ready" and worker.host not in struck
        }
        for each in pending:
            others = {other.worker for other in pending if other is not each}
            is_back = each.noticed is not None and each.worker not in absent | hidden
            if is_back and not absent - others:
                each.recovered = now
                each.num_left_behind = sum(map(is_alive, each.processes))

    def _compare_hosts(
        self, pending: Sequence[Recovery], health: ServiceHealth, now: float
    ) -> None:
        hosts = {host.name: host for host in health.hosts}
        for each in pending:
            if not each.is_of_host:
                continue
            host = hosts.get(each.host)
            is_same = host is not None and host.is_connected and host.epoch == each.incarnation
            if is_same:
                continue
            if each.noticed is None:
                each.noticed = now
            if each.freed is not None and host is not None and health.is_host_full(host):
                each.recovered = now
                each.num_left_behind = sum(map(is_alive, each.processes))
