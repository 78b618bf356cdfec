"""Shares of what clients use together, so that no client can use up everything.

An owner is an API key, or the address of a client where keys do not tell clients apart. It may have
a part of what the other owners leave, the same rule as in the queue (`KeyShare`): alone it gets
that part of the whole, several that ask for more have equal parts, and some stays free for one
more. An owner that has nothing is refused only if nothing at all is left. In the event loop.
"""

import asyncio
import ipaddress
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from inferpool.service.errors import OverloadedError, OverShareError

_NETWORK_BITS = 64
"""A client may have all IPv6 addresses that begin with the same bits (RFC 6177)."""


class Shares:
    """Places that owners share, such as uploads at once."""

    def __init__(self, most: int, share: float, what: str) -> None:
        """Begin with all places free.

        Args:
            most: All places.
            share: The part of what others leave that one owner may have; 1 for all of it.
            what: What has the places, in the plural, for a person.
        """
        self.most = most
        self.share = share
        self.num = 0
        """Places that are taken."""
        self._what = what
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Those that wait for a place, by owner. The owner that was served last comes last."""

    def may_take(self, owner: str) -> bool:
        """Return whether an owner may have one place more."""
        own, left = self._held[owner], self.most - self.num
        return left > 0 and (not own or allowance(own, left, self.share) >= 1)

    @contextmanager
    def place(self, owner: str, retry_after_s: int = 5) -> Iterator[None]:
        """Hold a place for an owner.

        Raises:
            OverShareError: It has its share.
            OverloadedError: Nothing is left.
        """
        if not self.may_take(owner):
            raise self._error(owner, retry_after_s)
        self.take(owner)
        try:
            yield
        finally:
            self.give_back(owner)

    @asynccontextmanager
    async def place_in_line(self, owner: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it. The waiting owner that has the fewest is next."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(waiter)
        self._serve()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give_back(owner)
            else:
                self._forget(owner, waiter)
            raise
        try:
            yield
        finally:
            self.give_back(owner)

    def take(self, owner: str) -> None:
        """Count a place as taken by an owner that may have one; `give_back` follows."""
        self._held[owner] += 1
        self.num += 1

    def give_back(self, owner: str) -> None:
        """Free a place, and serve those that wait."""
        self.num -= 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        self._serve()

    def _serve(self) -> None:
        """Give places to waiting owners, as long as any may have one."""
        while waiting := [owner for owner in self._waiting if self.may_take(owner)]:
            owner = min(waiting, key=self._held.__getitem__)
            line = self._waiting.pop(owner)
            waiter = line.popleft()
            if line:
                self._waiting[owner] = line
            if not waiter.done():  # else it was cancelled
                self.take(owner)
                waiter.set_result(None)

    def _forget(self, owner: str, waiter: "asyncio.Future[None]") -> None:
        line = self._waiting.get(owner)
        if line is not None and waiter in line:
            line.remove(waiter)
            if not line:
                del self._waiting[owner]

    def _error(self, owner: str, retry_after_s: int) -> OverloadedError:
        if self.num >= self.most:
            text = f"all {self.most} places for {self._what} are taken; try again later"
            return OverloadedError(text, retry_after_s=retry_after_s)
        return OverShareError(
            f"the {self._held[owner]} {self._what} of this key or address have its share "
            f"(per_key_share = {self.share:g} of what others leave)",
            retry_after_s=retry_after_s,
        )


def allowance(own: float, left: float, share: float) -> float:
    """Return how much more an owner may have.

    Args:
        own: What it has.
        left: What is free.
        share: The part of what others leave that it may have.
    """
    return share * (left + own) - own


def owner_of_address(host: str | None) -> str:
    """Return the owner that the address of a client stands for; "" for one without an address."""
    try:
        ip = ipaddress.ip_address((host or "").partition("%")[0])
    except ValueError:
        return host or ""
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return str(ip.ipv4_mapped)
        return str(ipaddress.IPv6Network((ip, _NETWORK_BITS), strict=False))
    return str(ip)
