"""The agent of a host: dials the front end, and runs the workers that it asks for.

It dials again whenever the connection ends, for as long as it runs. It knows all addresses at which
a front end may be, and begins with the one that it has worked for last.
"""

import asyncio
import logging
import random
import secrets
import socket
import ssl
from collections.abc import Callable, Sequence

from inferpool.workers.arena import Arena
from inferpool.workers.host.gpu_watch import GpuVitals
from inferpool.workers.messages import MAX_FRAME_BYTES
from inferpool.workers.remote.hosted import HostedWorkers
from inferpool.workers.remote.joining import (
    JOIN_S,
    Joined,
    RefusedError,
    is_private,
    join,
    secured,
)
from inferpool.workers.remote.link import HostLink, Mailbox
from inferpool.workers.remote.session import AgentSession
from inferpool.workers.remote.wire import HostFacts, ToAgent

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_MOST_PAUSE_S = 2.0
_REFUSED_PAUSE_S = 5.0
"""Seconds before an agent that was refused tries again: somebody must mend something first."""

Address = tuple[str, int]


class Agent:
    """The agent of one host, from `run` to `stop`."""

    def __init__(
        self,
        *,
        addresses: Sequence[Address],
        keys: Sequence[bytes],
        tls: ssl.SSLContext | None,
        insecure: bool,
        facts: HostFacts,
        arena: Arena,
        workers: HostedWorkers,
        gpus: Callable[[], Sequence[GpuVitals]] = tuple,
        grace_s: float = 30.0,
        once: bool = False,
    ) -> None:
        """Store the arguments; dial nobody yet.

        Args:
            addresses: Names or addresses of front ends, and their cluster ports.
            keys: Keys shared with the front ends; the first one is used.
            tls: Context with this host's certificate; None for connections in clear text.
            insecure: Also send in clear text to addresses that are not private.
            facts: What front ends are told of this host.
            arena: Gets the payloads.
            workers: The workers of this host.
            gpus: Returns the state of its GPUs.
            grace_s: Seconds that workers may take to finish at the end.
            once: End when the first connection ends, or when all front ends refuse.
        """
        self.term = 0
        """Largest term of the front ends that it has worked for."""
        self._addresses = list(addresses)
        self._key = keys[0]
        self._tls = tls
        self._insecure = insecure
        self._facts = facts
        self._arena = arena
        self._workers = workers
        self._gpus = gpus
        self._grace_s = grace_s
        self._once = once
        self._stopped = asyncio.Event()
        self._session: AgentSession | None = None
        self._told: dict[Address, str] = {}
        """What was logged of each address, so that it is logged once."""

    async def run(self) -> int:
        """Work for front ends until `stop`; return the exit status."""
        stopped = asyncio.ensure_future(self._stopped.wait())
        working = asyncio.ensure_future(self._work())
        try:
            await asyncio.wait([stopped, working], return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and self._session is not None:
                await self._session.leave(self._grace_s, "its agent was told to stop")
            working.cancel()
            await asyncio.wait([working])
            return working.result() if not working.cancelled() else 0
        finally:
            stopped.cancel()
            await self._workers.stop(0.0 if self._grace_s <= 0 else 5.0)

    def stop(self, *, at_once: bool = False) -> None:
        """Let workers finish what they hold, and end; or end at once."""
        if at_once:
            self._grace_s = 0.0
        self._stopped.set()

    async def _work(self) -> int:
        pause_s = _FIRST_PAUSE_S
        while True:
            num_refused = 0
            for address in list(self._addresses):
                try:
                    link, mailbox, joined = await self._join(address)
                except RefusedError as error:
                    num_refused += 1
                    self._tell(address, logging.ERROR, f"refused: {error}")
                except (OSError, TimeoutError) as error:
                    text = f"cannot be joined: {_explained(error)}"
                    self._tell(address, logging.WARNING, text)
                else:
                    self._addresses.remove(address)
                    self._addresses.insert(0, address)
                    await self._serve(address, link, mailbox, joined)
                    pause_s, num_refused = _FIRST_PAUSE_S, 0
                    if self._once:
                        return 0
                    break
            else:
                if self._once and num_refused == len(self._addresses):
                    return 1
                is_refused = num_refused == len(self._addresses)
                wait_s = _REFUSED_PAUSE_S if is_refused else pause_s
                await asyncio.sleep(wait_s * random.uniform(0.8, 1.2))
                pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    async def _join(self, address: Address) -> tuple[HostLink[ToAgent], Mailbox[ToAgent], Joined]:
        """Dial a front end.

        Raises:
            RefusedError: One side does not work with the other.
            OSError: The front end cannot be reached.
            TimeoutError: It does not answer.
        """
        sock = await self._dial(address)
        sock = await secured(sock, self._tls, address[0])
        mailbox: Mailbox[ToAgent] = Mailbox()
        link = HostLink(sock, ToAgent, mailbox, max_body_bytes=MAX_FRAME_BYTES)
        try:
            joined = await join(link, mailbox, self._key, self._facts, role="agent", term=self.term)
        except BaseException:
            link.close()
            raise
        return link, mailbox, joined

    async def _dial(self, address: Address) -> socket.socket:
        loop = asyncio.get_running_loop()
        host, port = address
        async with asyncio.timeout(JOIN_S):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, where = found[0]
            if self._tls is None and not self._insecure and not is_private(str(where[0])):
                raise RefusedError(
                    f"{where[0]} is not a private address: use TLS (--certificate), or say "
                    "--insecure"
                )
            sock = socket.socket(family, kind, protocol)
            sock.setblocking(False)
            try:
                await loop.sock_connect(sock, where)
            except BaseException:
                sock.close()
                raise
        return sock

    async def _serve(
        self,
        address: Address,
        link: HostLink[ToAgent],
        mailbox: Mailbox[ToAgent],
        joined: Joined,
    ) -> None:
        """Do what a front end asks for, until the connection ends."""
        self.term = joined.term
        self._told.clear()
        logger.info("joined the front end at %s:%d as %s", *address, self._facts.name)
        self._workers.begin()
        session = AgentSession(link, self._arena, self._workers, self._gpus)
        self._session = link.listener = session
        mailbox.hand_over(session)
        try:
            reason = await session.until_over()
            if not session.is_leaving:
                logger.warning("the front end at %s:%d is lost: %s", *address, reason)
        finally:
            link.close()
            self._session = None
            await session.wind_up()

    def _tell(self, address: Address, level: int, text: str) -> None:
        if self._told.get(address) != text:
            self._told[address] = text
            logger.log(level, "%s:%d %s", *address, text)


def make_instance() -> str:
    """Return a random id for `HostFacts.instance`."""
    return secrets.token_hex(8)


def _explained(error: Exception) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "it does not answer"
    return getattr(error, "strerror", None) or str(error)
