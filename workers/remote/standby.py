"""Two front ends, one that serves, and one that watches it and takes over when it is lost.

Runs in the event loop of each front end that names another one. The rules are the same for both, so
both may name each other, and each may be started again at any time. Agents follow the front end of
the latest term, so one that has lost its hosts cannot get them back by mistake.
"""

import asyncio
import contextlib
import logging
import ssl
import time
from asyncio import Future, Task

from inferpool.workers.remote.hosts import RemoteHosts
from inferpool.workers.remote.joining import Address, Dialer, RefusedError
from inferpool.workers.remote.lease import BEAT_S, LEASE_S, Lease
from inferpool.workers.remote.link import HostLink, LinkListener
from inferpool.workers.remote.wire import Beat, HostVitals, Pulse, Refusal, ToAgent, Views

logger = logging.getLogger(__name__)

_GONE_S = 0.7
"""Seconds without an answer after which a front end without a connection counts as gone. It is
stopped for good then, or needs longer to start again."""
_NEVER_SEEN_S = 2 * LEASE_S
_RETRY_S = 0.1
_REFUSED_S = 2.0


class Standby:
    """The watch of the other front end, from `start` to `stop`."""

    def __init__(
        self,
        hosts: RemoteHosts,
        other: Address,
        dialer: Dialer,
        *,
        never_seen_s: float = _NEVER_SEEN_S,
        refused_s: float = _REFUSED_S,
    ) -> None:
        """Refuse agents at first.

        Args:
            hosts: The hosts of this front end.
            other: Name or address of the other front end, and its cluster port.
            dialer: Joins it.
            never_seen_s: Seconds after which the other one counts as gone if it never answered:
                it may be about to start.
            refused_s: Seconds before one that has refused this one is dialed again.
        """
        self._hosts = hosts
        self._other = other
        self._dialer = dialer
        self._never_seen_s = never_seen_s
        self._refused_s = refused_s
        self._reason = f"standing by for the front end at {other[0]}:{other[1]}"
        self._watching: Task[None] | None = None
        self._told = ""
        self._others_term = 0
        """Term of the other front end, when it was last heard; 0 if it never was."""
        hosts.stand_by(self._reason)

    @property
    def is_serving(self) -> bool:
        """True if this front end has taken over."""
        return not self._hosts.standby_reason

    def start(self) -> None:
        """Begin to watch the other front end."""
        self._watching = asyncio.create_task(self._watch(), name="watch the other front end")

    async def stop(self) -> None:
        """End the watch."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def _watch(self) -> None:
        seen_at, patience_s = time.monotonic(), self._never_seen_s
        while True:
            try:
                link, mailbox, joined = await self._dialer.join(self._other, role="standby", term=0)
                if joined.term == self._hosts.term:
                    link.close()
                    await asyncio.sleep(self._refused_s)
                    raise ConnectionError("it is this front end itself (standby_of)")
            except (RefusedError, ssl.SSLError) as error:  # it is there, so this one must wait
                self._tell(f"it refuses this front end, or is refused: {error}")
                await asyncio.sleep(self._refused_s)
            except (OSError, TimeoutError, UnicodeError) as error:
                self._tell(f"it cannot be reached: {error or 'it does not answer'}")
                if not self.is_serving and time.monotonic() - seen_at > patience_s:
                    self._take_over("it is gone")
                await asyncio.sleep(_RETRY_S if not self.is_serving else BEAT_S)
            else:
                self._told = ""
                logger.info("connected to the front end at %s:%d", *self._other)
                observed = _Observed(link)
                mailbox.hand_over(link, observed)
                self._judge(joined.term, is_standing_by=joined.is_standing_by)
                await self._observe(observed)
                seen_at, patience_s = time.monotonic(), _GONE_S
                if not self.is_serving and not observed.has_ended:
                    self._take_over(f"no sign of life for {LEASE_S:g} s")

    async def _observe(self, observed: "_Observed") -> None:
        """Follow what the other front end says of itself, until it is no longer heard."""
        try:
            while not observed.is_over:
                if (beat := observed.beat) is not None:
                    self._judge(beat.term, is_standing_by=beat.is_standing_by)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_S):
                        await asyncio.shield(observed.over)
                observed.look()
        finally:
            observed.close()

    def _judge(self, term: int, *, is_standing_by: bool) -> None:
        """Decide which front end serves, by what the other one says of itself."""
        hosts, self._others_term = self._hosts, term
        if self.is_serving and not is_standing_by and term > hosts.term:
            logger.warning("the front end at %s:%d has taken over", *self._other)
            hosts.stand_by(self._reason)
        elif not self.is_serving and is_standing_by and hosts.term < term:
            self._take_over("it stands by too, and began later")

    def _take_over(self, why: str) -> None:
        logger.warning("taking over from the front end at %s:%d: %s", *self._other, why)
        self._hosts.take_over(self._others_term)

    def _tell(self, text: str) -> None:
        if text != self._told:
            self._told = text
            logger.warning("the front end at %s:%d: %s", *self._other, text)


class _Observed(LinkListener[ToAgent]):
    """A connection to the other front end that only asks for beats."""

    def __init__(self, link: HostLink[ToAgent]) -> None:
        self.over: Future[None] = asyncio.get_running_loop().create_future()
        self.beat: Beat | None = None
        """The latest one."""
        self.has_ended = False
        """True if the other side has closed the connection."""
        self._link = link
        self._lease = Lease(time.monotonic())

    @property
    def is_over(self) -> bool:
        """True once nothing more will be heard."""
        return self.over.done()

    def look(self) -> None:
        """End it if the lease has run out."""
        if not self.is_over and self._lease.is_out(time.monotonic(), BEAT_S):
            self.over.set_result(None)

    def close(self) -> None:
        self._link.close()

    def room_for(self, message: ToAgent, num_bytes: int) -> Views:
        raise ValueError("a body, for a standby")

    def on_message(self, message: ToAgent, body: Views) -> None:
        self._lease.renew(time.monotonic())
        match message:
            case Beat():
                self.beat = message
                self._link.send(Pulse(message.sent_at, HostVitals(wall_time=time.time()), []))
            case Refusal():
                self._link.close(message.reason)
            case _:
                raise ValueError(f"{type(message).__name__}, for a standby")

    def on_closed(self, reason: str) -> None:
        if not self.is_over:
            self.has_ended = True
            self.over.set_result(None)
