"""Authenticates an agent and a front end to each other.

Each proves to the other that it knows the shared key, without sending it: an HMAC (RFC 2104, with
SHA-256) over both sides' random numbers. The agent must be sure of the front end too, since it
loads the code that the front end names. Then they compare versions.
"""

import asyncio
import hmac
import secrets
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

import msgspec

from inferpool.workers.remote.link import HostLink, Mailbox
from inferpool.workers.remote.wire import (
    MAX_BODY_BYTES,
    MAX_HEAD_BYTES,
    MAX_STRANGER_BYTES,
    PROTOCOL,
    Challenge,
    Hello,
    HostFacts,
    Refusal,
    Role,
    ToAgent,
    ToFrontEnd,
    Welcome,
)

JOIN_S = 5.0
"""Seconds that the other side may take for the TLS handshake, and again for the proof."""
_NONCE_BYTES = 32
_MOST_SHOWN = 500
"""Characters of a refusal that are shown."""
_MOST_AT_FIRST = 4096
"""Messages that may come with the welcome: a front end starts all workers of the host at once."""


Address = tuple[str, int]
"""Name or address of a host, and a port."""


class RefusedError(Exception):
    """One side does not work with the other; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A connection with two sides that know each other."""

    term: int
    """Term of the front end."""
    epoch: int
    is_standing_by: bool
    """True if the front end accepts no agents now."""


def make_instance() -> str:
    """Return a random id for `HostFacts.instance`."""
    return secrets.token_hex(8)


def is_private(address: str) -> bool:
    """Return whether an IP address is one of this host or of a private network (RFC 6890)."""
    ip = ip_address(address.partition("%")[0])
    return ip.is_loopback or (ip.is_private and not ip.is_unspecified)


class Dialer:
    """Joins front ends, for an agent or for a standby."""

    def __init__(
        self,
        key: bytes,
        tls: ssl.SSLContext | None,
        facts: HostFacts,
        *,
        insecure: bool = False,
        join_s: float = JOIN_S,
    ) -> None:
        """Store the arguments.

        Args:
            key: The shared key.
            tls: Context with this host's certificate; None for connections in clear text.
            facts: Description of this host for front ends.
            insecure: Also send in clear text to addresses that are not private.
            join_s: Seconds for each step: to connect, to make the TLS handshake, and to prove.
        """
        self.facts = facts
        self._key = key
        self._tls = tls
        self._insecure = insecure
        self._join_s = join_s

    async def join(
        self, address: Address, *, role: Role, term: int
    ) -> tuple[HostLink[ToAgent], Mailbox[ToAgent], Joined]:
        """Dial a front end, prove that we know the key, and have it prove the same.

        Args:
            address: Its name or address, and its cluster port.
            role: What the connection is for.
            term: Largest term of a front end that this process has worked for.

        Raises:
            RefusedError: One of the two does not accept the other.
            OSError: The front end cannot be reached, or has gone.
            TimeoutError: It does not answer.
        """
        sock = await secured(await self._dial(address), self._tls, address[0], self._join_s)
        mailbox: Mailbox[ToAgent] = Mailbox(_MOST_AT_FIRST)
        link = HostLink(sock, ToAgent, mailbox, max_body_bytes=MAX_BODY_BYTES)
        try:
            async with asyncio.timeout(self._join_s):
                joined = await self._prove(link, mailbox, role, term)
        except BaseException:
            link.close()
            raise
        return link, mailbox, joined

    async def _dial(self, address: Address) -> socket.socket:
        loop = asyncio.get_running_loop()
        host, port = address
        async with asyncio.timeout(self._join_s):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            failure = OSError(f"{host} has no address")
            for family, kind, protocol, _, where in found:
                if self._tls is None and not self._insecure and not is_private(str(where[0])):
                    raise RefusedError(
                        f"{where[0]} is not a private address: use TLS (--certificate), or say "
                        "--insecure"
                    )
                sock = socket.socket(family, kind, protocol)
                sock.setblocking(False)
                try:
                    await loop.sock_connect(sock, where)
                except OSError as error:  # a name may have addresses where nobody listens
                    sock.close()
                    failure = error
                except BaseException:
                    sock.close()
                    raise
                else:
                    if sock.getsockname() != sock.getpeername():
                        return sock
                    # A local port where nobody listens, which the kernel chose as our own too.
                    sock.close()
                    failure = OSError(f"nobody listens at {host}:{port}")
        raise failure

    async def _prove(
        self, link: HostLink[ToAgent], mailbox: Mailbox[ToAgent], role: Role, term: int
    ) -> Joined:
        first = await mailbox.get()
        if isinstance(first, Refusal):
            raise RefusedError(_shown(first.reason))
        if not isinstance(first, Challenge):
            raise RefusedError("that is not the cluster port of a front end")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        hello = Hello(PROTOCOL, role, nonce, b"", term, self.facts)
        proof = _of_agent(self._key, first.nonce, hello)
        link.send(msgspec.structs.replace(hello, proof=proof))
        answer = await mailbox.get()
        if isinstance(answer, Refusal):
            raise RefusedError(_shown(answer.reason))
        if not isinstance(answer, Welcome):
            raise RefusedError("that is not the cluster port of a front end")
        if not hmac.compare_digest(_of_front_end(self._key, first.nonce, nonce), answer.proof):
            raise RefusedError("the front end does not know the key (INFERPOOL_CLUSTER_KEYS)")
        if role == "agent" and answer.term < term:
            raise RefusedError("another front end has taken over from it")
        return Joined(term=answer.term, epoch=answer.epoch, is_standing_by=answer.is_standing_by)


async def secured(
    sock: socket.socket,
    tls: ssl.SSLContext | None,
    server_name: str | None,
    timeout_s: float = JOIN_S,
) -> socket.socket:
    """Complete the TLS handshake over a connected socket, if there is a context.

    Args:
        sock: A socket that does not block.
        tls: The context; None leaves the socket as it is.
        server_name: Name of the server in its certificate; None for the server's side.
        timeout_s: Seconds that the other side may take.

    Raises:
        OSError: The other side does not take part, or its certificate is not good.
        TimeoutError: It took too long.
    """
    if tls is None:
        return sock
    is_server = server_name is None
    wrapped = tls.wrap_socket(
        sock,
        server_side=is_server,
        do_handshake_on_connect=False,
        server_hostname=server_name,
    )
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    wrapped.do_handshake()
                except ssl.SSLWantReadError:
                    await _until(wrapped, writable=False)
                except ssl.SSLWantWriteError:
                    await _until(wrapped, writable=True)
                else:
                    return wrapped
    except BaseException:
        wrapped.close()
        raise


async def challenge(
    link: HostLink[ToFrontEnd],
    mailbox: Mailbox[ToFrontEnd],
    keys: Sequence[bytes],
    timeout_s: float = JOIN_S,
) -> tuple[Hello, bytes]:
    """Ask the other side to prove itself within some time, as a front end.

    Returns:
        Its first message, and the proof that the front end knows the key too.

    Raises:
        RefusedError: It did not prove itself, or has another version of the protocol.
        ConnectionError: It has gone.
        TimeoutError: It took too long.
    """
    link.max_head_bytes = MAX_STRANGER_BYTES
    nonce = secrets.token_bytes(_NONCE_BYTES)
    link.send(Challenge(nonce))
    async with asyncio.timeout(timeout_s):
        hello = await mailbox.get()
    if not isinstance(hello, Hello):
        raise RefusedError("it did not say who it is")
    # Each key is tried, so that the time does not tell which one is right.
    right = [key for key in keys if hmac.compare_digest(_of_agent(key, nonce, hello), hello.proof)]
    if not right:
        raise RefusedError("it does not know the key of this front end (cluster_keys)")
    if hello.protocol != PROTOCOL:
        raise RefusedError(f"it speaks protocol {hello.protocol}, and the front end {PROTOCOL}")
    link.max_head_bytes = MAX_HEAD_BYTES
    return hello, _of_front_end(right[0], nonce, hello.nonce)


def _shown(reason: str) -> str:
    """Return a text of a side that has not proved itself, for the log: one short line."""
    return "".join(each if each.isprintable() else " " for each in reason[:_MOST_SHOWN])


def _of_agent(key: bytes, nonce: bytes, hello: Hello) -> bytes:
    return hmac.digest(key, b"agent" + nonce + hello.nonce, "sha256")


def _of_front_end(key: bytes, nonce: bytes, its_nonce: bytes) -> bytes:
    return hmac.digest(key, b"front end" + its_nonce + nonce, "sha256")


async def _until(sock: socket.socket, *, writable: bool) -> None:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    add = loop.add_writer if writable else loop.add_reader
    remove = loop.remove_writer if writable else loop.remove_reader

    def on_ready() -> None:
        if not future.done():
            future.set_result(None)

    add(sock.fileno(), on_ready)
    try:
        await future
    finally:
        remove(sock.fileno())
