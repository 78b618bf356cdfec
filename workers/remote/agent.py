"""The agent of a host: dials the front end, and runs the workers that it asks for.

It dials again whenever the connection ends, for as long as it runs. It knows all addresses of
front ends, and begins with the one that it has worked for last.
"""

import asyncio
import logging
import random
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inferpool.workers.host.engine import GpuHealth
from inferpool.workers.remote.hosted import HostedWorkers
from inferpool.workers.remote.joining import Address, Dialer, Joined, RefusedError
from inferpool.workers.remote.link import HostLink, Mailbox
from inferpool.workers.remote.session import AgentSession
from inferpool.workers.remote.wire import ToAgent
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.backoff import Backoff

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialing:
    """How often an agent dials front ends, and how long it waits for each."""

    once: bool = False
    """End when the first connection ends, or when all front ends refuse."""
    first_pause_s: float = 0.1
    """Seconds before it tries all front ends again; they double each time."""
    most_pause_s: float = 1.0
    """Most seconds of such a pause. A connection that lasts longer begins with the first again."""
    refused_pause_s: float = 5.0
    """Seconds before an agent that was refused tries again: somebody must mend something first."""
    patience_s: float = 1.0
    """Seconds that a front end may take at first to admit an agent that knows others, too. It may
    have lost its power, or stand still. They double while no front end can be joined."""
    most_patience_s: float = 30.0


class Agent:
    """The agent of one host, from `run` to `stop`."""

    def __init__(
        self,
        *,
        addresses: Sequence[Address],
        dialer: Dialer,
        arena: Arena,
        workers: HostedWorkers,
        gpus: Callable[[], Sequence[GpuHealth]] = tuple,
        grace_s: float = 30.0,
        dialing: Dialing | None = None,
    ) -> None:
        """Store the arguments; dial nobody yet.

        Args:
            addresses: Names or addresses of front ends, and their cluster ports.
            dialer: Joins front ends for this host.
            arena: Gets the payloads.
            workers: The workers of this host.
            gpus: Returns the state of its GPUs.
            grace_s: Seconds that workers may take to finish at the end.
            dialing: How often to dial, and how long to wait; None for the defaults.
        """
        self.term = 0
        """Largest term of the front ends that it has worked for."""
        self._addresses = list(addresses)
        self._dialer = dialer
        self._arena = arena
        self._workers = workers
        self._gpus = gpus
        self._grace_s = grace_s
        self._dialing = dialing or Dialing()
        self._stopped = asyncio.Event()
        self._hurried = asyncio.Event()
        self._session: AgentSession | None = None
        self._patience_s = self._dialing.patience_s
        """Seconds that each front end may take in this round, if there are several."""
        self._told: dict[Address, str] = {}
        """Last log line of each address, so that it is logged once."""

    async def run(self) -> int:
        """Work for front ends until `stop`; return the exit status."""
        stopped = asyncio.ensure_future(self._stopped.wait())
        working = asyncio.ensure_future(self._work())
        try:
            await asyncio.wait([stopped, working], return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and self._session is not None:
                await self._leave(self._session)
            working.cancel()
            await asyncio.wait([working])
            return working.result() if not working.cancelled() else 0
        finally:
            stopped.cancel()
            await self._workers.stop(0.0 if self._grace_s <= 0 else 5.0)

    def stop(self, *, at_once: bool = False) -> None:
        """End once workers have finished what they hold, or at once."""
        if at_once:
            self._grace_s = 0.0
            self._hurried.set()
        self._stopped.set()

    async def _leave(self, session: AgentSession) -> None:
        """Leave the front end, at once when `stop` says so."""
        reason = "its agent was told to stop"
        leaving = asyncio.ensure_future(session.leave(self._grace_s, reason))
        hurried = asyncio.ensure_future(self._hurried.wait())
        await asyncio.wait([leaving, hurried], return_when=asyncio.FIRST_COMPLETED)
        is_hurried = not leaving.done()
        for each in (leaving, hurried):
            each.cancel()
        await asyncio.gather(leaving, hurried, return_exceptions=True)
        if is_hurried:
            await session.leave(0.0, reason)

    async def _work(self) -> int:
        loop, dialing = asyncio.get_running_loop(), self._dialing
        pauses = Backoff(dialing.first_pause_s, dialing.most_pause_s)
        while True:
            num_refused = 0
            for address in list(self._addresses):
                try:
                    link, mailbox, joined = await self._join(address)
                except RefusedError as error:
                    num_refused += 1
                    self._tell(address, logging.WARNING, f"refused: {error}")
                except (OSError, TimeoutError, UnicodeError) as error:
                    text = f"cannot be joined: {_explained(error)}"
                    self._tell(address, logging.WARNING, text)
                else:
                    self._addresses.remove(address)
                    self._addresses.insert(0, address)
                    began = loop.time()
                    await self._serve(address, link, mailbox, joined)
                    if dialing.once or self._stopped.is_set():
                        return 0
                    if loop.time() - began > dialing.most_pause_s:
                        pauses.reset()
                        self._patience_s = dialing.patience_s
                    break
            else:
                self._patience_s = min(2 * self._patience_s, dialing.most_patience_s)
            is_refused = num_refused == len(self._addresses)
            if dialing.once and is_refused:
                return 1
            pause_s = pauses.next_s()
            # Of several front ends, one that stands by may take over at any moment.
            if is_refused and num_refused == 1:
                pause_s = dialing.refused_pause_s
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))

    async def _join(self, address: Address) -> tuple[HostLink[ToAgent], Mailbox[ToAgent], Joined]:
        """Join a front end; give up a silent one, so that this host can join the others."""
        is_only_one = len(self._addresses) == 1
        async with asyncio.timeout(None if is_only_one else self._patience_s):
            return await self._dialer.join(address, role="agent", term=self.term)

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
        logger.info("joined the front end at %s:%d as %s", *address, self._dialer.facts.name)
        self._workers.begin()
        session = AgentSession(link, self._arena, self._workers, self._gpus)
        self._session = session
        mailbox.hand_over(link, session)
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


def _explained(error: Exception) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "it does not answer (if it expects TLS: --certificate, --key and --authority)"
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return "it does not speak TLS: leave out --certificate, or set its cluster_certificate"
    return getattr(error, "strerror", None) or str(error)
