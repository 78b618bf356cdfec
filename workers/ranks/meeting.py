"""Lets the ranks of a replica meet that are on several hosts. Worker processes only.

They meet at a `TCPStore` in the process of rank 0, where each says at which port it listens. Each
then connects to those that it talks to, and both sides prove that they know the token of the group.
The token itself is never sent, and the keys of the store cannot be guessed without it.
"""

import hashlib
import hmac
import logging
import secrets
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import torch.distributed as dist

from inferpool.workers.ranks.wiring import DistantEnds, RankEnds

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

_LEAST_S = 0.001
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_RANK_BYTES = 4


def meet(ends: DistantEnds) -> "tuple[RankEnds, Store]":
    """Connect to the other ranks, once all of them are there.

    Raises:
        OSError: Another rank cannot be reached, or did not come.
        RuntimeError: The meeting place cannot be reached, or another rank did not come there.
    """
    deadline = time.monotonic() + ends.timeout_s
    store = _store_of(ends)
    peers = dict(_connections(ends, store, deadline))
    return RankEnds(ends.rank, ends.num_ranks, peers, peers), store


def _store_of(ends: DistantEnds) -> "Store":
    door = ends.door
    store = dist.TCPStore(  # type: ignore[attr-defined]  # its module does not export it
        ends.part.address,
        ends.part.port,
        is_master=door is not None,
        wait_for_workers=False,
        timeout=timedelta(seconds=ends.timeout_s),
        master_listen_fd=None if door is None else door.detach(),
    )
    prefix = hashlib.sha256(ends.part.token.encode()).hexdigest()
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]  # its module does not export it


def _connections(
    ends: DistantEnds, store: "Store", deadline: float
) -> Iterator[tuple[int, Connection]]:
    """Connect to the ranks before this one, then let those after it connect."""
    rank, address = ends.rank, ends.part.own_address
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        store.set(f"rank {rank}", f"{address} {listener.getsockname()[1]}")
        for other in sorted({0, rank - 1}) if rank else ():
            host, _, port = store.get(f"rank {other}").decode().partition(" ")
            yield other, _dial((host, int(port)), ends, other, deadline)
        awaited = set(range(1, ends.num_ranks)) if rank == 0 else {rank + 1}
        awaited &= set(range(ends.num_ranks))
        while awaited:
            other, connection = _accept(listener, ends, awaited, deadline)
            awaited.remove(other)
            yield other, connection


def _dial(address: tuple[str, int], ends: DistantEnds, other: int, deadline: float) -> Connection:
    sock = socket.create_connection(address, max(0.1, deadline - time.monotonic()))
    with sock:
        until = max(deadline, time.monotonic() + ends.greet_s)  # it may greet others first
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sock.sendall(nonce + ends.rank.to_bytes(_RANK_BYTES))
        answer = _read(sock, _NONCE_BYTES + _PROOF_BYTES, until)
        both = nonce + answer[:_NONCE_BYTES]
        if not hmac.compare_digest(_proof(ends, b"listens", other, both), answer[_NONCE_BYTES:]):
            raise ConnectionError(f"what listens at {address[0]}:{address[1]} is not rank {other}")
        sock.sendall(_proof(ends, b"dials", ends.rank, both))
        return _connection(sock)


def _accept(
    listener: socket.socket, ends: DistantEnds, awaited: set[int], deadline: float
) -> tuple[int, Connection]:
    """Wait for one of the ranks. Strangers are sent away."""
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"ranks {sorted(awaited)} did not connect")
        listener.settimeout(left_s)
        sock, address = listener.accept()
        with sock:
            try:
                return _greet(sock, ends, awaited)
            except OSError as error:
                logger.warning("a stranger at %s was sent away: %s", address[0], error)


def _greet(sock: socket.socket, ends: DistantEnds, awaited: set[int]) -> tuple[int, Connection]:
    until = time.monotonic() + ends.greet_s
    hello = _read(sock, _NONCE_BYTES + _RANK_BYTES, until)
    other = int.from_bytes(hello[_NONCE_BYTES:])
    nonce = secrets.token_bytes(_NONCE_BYTES)
    both = hello[:_NONCE_BYTES] + nonce
    sock.sendall(nonce + _proof(ends, b"listens", ends.rank, both))
    proof = _read(sock, _PROOF_BYTES, until)
    if not hmac.compare_digest(_proof(ends, b"dials", other, both), proof) or other not in awaited:
        raise ConnectionError("it does not know the token of this group")
    return other, _connection(sock)


def _proof(ends: DistantEnds, side: bytes, rank: int, nonces: bytes) -> bytes:
    said = side + rank.to_bytes(_RANK_BYTES) + nonces
    return hmac.digest(ends.part.token.encode(), said, "sha256")


def _read(sock: socket.socket, num_bytes: int, until: float) -> bytes:
    data = b""
    while len(data) < num_bytes:
        sock.settimeout(max(_LEAST_S, until - time.monotonic()))
        piece = sock.recv(num_bytes - len(data))
        if not piece:
            raise ConnectionError("it has gone")
        data += piece
    return data


def _connection(sock: socket.socket) -> Connection:
    """Return a connection like the end of a pipe."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.settimeout(None)
    return Connection(sock.detach())
