"""The engine for several hosts: agents dial in, and each worker runs on the host of its config.

Runs in the front end's event loop. It listens on the cluster port, and knows a host from the moment
at which its agent has joined until the connection ends.
"""

import asyncio
import logging
import re
import socket
import ssl
import time
from asyncio import Task
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Protocol

from inferpool.workers.host.engine import WorkerHandle, WorkerId
from inferpool.workers.remote.host import RemoteHost
from inferpool.workers.remote.joining import (
    JOIN_S,
    Address,
    RefusedError,
    challenge,
    secured,
)
from inferpool.workers.remote.link import HostLink, Mailbox
from inferpool.workers.remote.wire import MAX_BODY_BYTES, Beat, Hello, Refusal, ToFrontEnd, Welcome
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.errors import WorkerStartError

logger = logging.getLogger(__name__)

_MOST_JOINING = 64
"""Connections that have not proved themselves yet; the oldest makes way for one more."""
_REST_S = 0.5
_NAME = re.compile(r"[\w.-]{1,253}")


class HostWatcher(Protocol):
    """Listener to hosts that come and go."""

    def on_joined(self, host: RemoteHost) -> None:
        """Handle a host that accepts workers now."""

    def on_lost(self, host: RemoteHost, reason: str) -> None:
        """Handle the loss of a host; all its workers have failed by then."""


class RemoteHosts:
    """The hosts with connected agents, as one engine."""

    def __init__(
        self,
        arena: Arena,
        listener: socket.socket,
        keys: Sequence[bytes],
        tls: ssl.SSLContext | None,
        version: str,
        watcher: HostWatcher,
        *,
        join_s: float = JOIN_S,
        rest_s: float = _REST_S,
    ) -> None:
        """Accept nothing yet.

        Args:
            arena: Holds the payloads.
            listener: A socket that listens on the cluster port.
            keys: Keys; an agent must know one of them.
            tls: Context of a server; None for connections in clear text.
            version: Version of this program, which agents must have too.
            watcher: Told of hosts that come and go.
            join_s: Seconds that an agent may take for the TLS handshake, and again to prove
                itself.
            rest_s: Seconds without accepting once there are too few descriptors.
        """
        self.hosts: dict[str, RemoteHost] = {}
        """Connected hosts by name."""
        self.standby_reason = ""
        """Why no agent may join now; empty if they may."""
        self.term = time.time_ns()
        """Number of this front end's time of service: a later one is larger."""
        self.address: Address = listener.getsockname()[:2]
        """Address of the cluster port."""
        self._arena = memoryview(arena.memory.map)
        self._listener = listener
        self._keys = keys
        self._tls = tls
        self._version = version
        self._watcher = watcher
        self._join_s = join_s
        self._rest_s = rest_s
        self._epochs = count(1)
        self._has_served = False
        """A host has joined since this process began."""
        self._joining: dict[Task[None], None] = {}
        """Connections that have not proved themselves yet, the oldest first."""
        self._observers: set[RemoteHost] = set()
        """Connections of standby front ends."""
        self._resting: asyncio.TimerHandle | None = None
        self._told_refusals: dict[str, str] = {}
        """The last refusal by address, so that each is logged once."""

    def open(self) -> None:
        """Begin to accept agents."""
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    async def start(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> WorkerHandle:
        """Start a worker on the host of its config, and return once it is ready.

        Raises:
            WorkerStartError: It did not become ready, or its host is not connected.
        """
        host = self.hosts.get(config.host)
        if host is None:
            raise WorkerStartError(f"{config.host or 'no host'} is not connected", permanent=False)
        return await host.start(id, config, on_progress)

    def stand_by(self, reason: str) -> None:
        """Refuse agents until `take_over`, and end all connections of agents."""
        self.standby_reason = reason
        for host in list(self.hosts.values()):
            host.refuse(reason)

    def take_over(self, after: int = 0) -> None:
        """Accept agents, in a term that follows this one and `after`, the other front end's."""
        self.term = max(time.time_ns(), self.term + 1, after + 1)
        self.standby_reason = ""

    async def close(self) -> None:
        """Accept no more agents, and end all connections. Agents keep their models for a while.

        Another call does nothing.
        """
        if self._listener.fileno() < 0:
            return
        if self._resting is not None:
            self._resting.cancel()
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()
        for task in self._joining:
            task.cancel()
        await asyncio.gather(*self._joining, return_exceptions=True)
        for host in (*self.hosts.values(), *self._observers):
            host.close("the front end has stopped")
        await asyncio.sleep(0)  # the links report their ends

    def _beat(self) -> Beat:
        return Beat(time.monotonic(), self.term, bool(self.standby_reason))

    def _on_lost(self, host: RemoteHost, reason: str) -> None:
        """Remove a host after the end of its connection."""
        if host in self._observers:
            self._observers.remove(host)
            logger.warning("standby %s at %s has gone: %s", host.name, host.address, reason)
            return
        if self.hosts.get(host.name) is host:
            del self.hosts[host.name]
        text, level = "host %s at %s is lost: %s", logging.WARNING
        if host.has_left:
            text, level = "host %s at %s has left: %s", logging.INFO
        logger.log(level, text, host.name, host.address, reason, extra={"host": host.name})
        try:
            self._watcher.on_lost(host, reason)
        except Exception:  # other hosts must not suffer from it
            logger.exception("the loss of host %s could not be handled", host.name)

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):  # it has gone already
            return
        except OSError as error:  # too few descriptors: it would be announced again at once
            logger.error("no agent can be accepted now: %s", error.strerror)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener.fileno())
            self._resting = loop.call_later(self._rest_s, self.open)
            return
        if len(self._joining) >= _MOST_JOINING:
            oldest = next(iter(self._joining))  # agents take milliseconds, and strangers may dawdle
            del self._joining[oldest]
            oldest.cancel()
        sock.setblocking(False)
        shown = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "local"
        task = asyncio.create_task(self._receive(sock, shown), name=f"join {shown}")
        self._joining[task] = None
        task.add_done_callback(partial(self._on_received, sock))

    def _on_received(self, sock: socket.socket, task: "Task[None]") -> None:
        self._joining.pop(task, None)
        if task.cancelled():
            sock.close()
        elif error := task.exception():
            logger.error("an agent could not join", exc_info=error)

    async def _receive(self, sock: socket.socket, address: str) -> None:
        """Accept one agent, or refuse it."""
        link = None
        mailbox: Mailbox[ToFrontEnd] = Mailbox()
        try:
            sock = await secured(sock, self._tls, None, self._join_s)
            link = HostLink(sock, ToFrontEnd, mailbox, max_body_bytes=MAX_BODY_BYTES)
            hello, proof = await challenge(link, mailbox, self._keys, self._join_s)
            await self._check(hello)
        except RefusedError as error:
            assert link is not None
            self._refuse(link, address, str(error))
            return
        except (OSError, TimeoutError) as error:
            self._note_refusal(address, f"it did not join: {str(error) or 'it took too long'}")
            if link is None:
                sock.close()
            else:
                link.close()
            return
        except BaseException:
            if link is not None:
                link.close()
            raise
        self._told_refusals.pop(address.rpartition(":")[0], None)
        self._take(link, mailbox, hello, proof, address)

    async def _check(self, hello: Hello) -> None:
        """Check that an agent may join now; end an earlier connection of the same agent.

        Raises:
            RefusedError: It may not.
        """
        facts = hello.facts
        if facts.version != self._version:
            raise RefusedError(
                f"{facts.name} has inferpool {facts.version}, and the front end {self._version}: "
                "install the same version on all hosts"
            )
        if hello.term > self.term and not self.standby_reason:
            if self._has_served:
                raise RefusedError("another front end has taken over from this one")
            self.term = hello.term + 1  # this one began later, by a clock that is behind
        if hello.role == "standby":
            return
        if not _NAME.fullmatch(facts.name):
            raise RefusedError("its name is not one of letters, digits, '.', '-' and '_' (--name)")
        while (earlier := self.hosts.get(facts.name)) is not None:
            if earlier.facts.instance != facts.instance:
                raise RefusedError(
                    f"another agent is connected as {facts.name} from {earlier.address}: give each "
                    "host a name of its own (--name)"
                )
            earlier.close("its agent has joined anew")
            await asyncio.sleep(0)  # its link reports its end in the next step of the loop
        if self.standby_reason:
            raise RefusedError(self.standby_reason)

    def _take(
        self,
        link: HostLink[ToFrontEnd],
        mailbox: Mailbox[ToFrontEnd],
        hello: Hello,
        proof: bytes,
        address: str,
    ) -> None:
        epoch = next(self._epochs)
        link.send(Welcome(proof, self.term, epoch, bool(self.standby_reason)))
        facts, arena = hello.facts, self._arena
        host = RemoteHost(link, facts, address, epoch, arena, self._beat, self._on_lost)
        if hello.role == "standby":
            self._observers.add(host)
            logger.info("standby %s has connected from %s", host.name, address)
        else:
            self._warn_of_differences(host)
            self.hosts[host.name] = host
            self._has_served = True
            devices = ", ".join(hello.facts.devices.describe())
            about = {"host": host.name}
            logger.info("host %s has joined from %s: %s", host.name, address, devices, extra=about)
            try:
                self._watcher.on_joined(host)
            except Exception as error:  # it would be connected, and have no work
                logger.exception("host %s could not be taken on", host.name)
                host.refuse(f"the front end has made a mistake: {error!r}")
        mailbox.hand_over(link, host)

    def _warn_of_differences(self, host: RemoteHost) -> None:
        """Log other versions of torch or Python: the same model may answer otherwise with them."""
        ours = (host.facts.torch, host.facts.python)
        for other in self.hosts.values():
            theirs = (other.facts.torch, other.facts.python)
            if theirs != ours:
                text = (
                    "host %s has torch %s and Python %s, and %s has %s and %s: answers may differ"
                )
                logger.warning(text, host.name, *ours, other.name, *theirs)
                return

    def _refuse(self, link: HostLink[ToFrontEnd], address: str, reason: str) -> None:
        self._note_refusal(address, reason)
        link.send(Refusal(reason))
        link.close(reason)

    def _note_refusal(self, address: str, reason: str) -> None:
        host = address.rpartition(":")[0]
        if self._told_refusals.get(host) == reason:
            return
        if len(self._told_refusals) >= _MOST_JOINING:
            self._told_refusals.clear()
        self._told_refusals[host] = reason
        level = logging.INFO if reason == self.standby_reason else logging.WARNING
        logger.log(level, "an agent at %s was refused: %s", address, reason)
