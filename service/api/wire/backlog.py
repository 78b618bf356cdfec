"""The last connections of a listening socket: all that the kernel has accepted are taken.

To close a listening socket resets each connection that waits to be accepted, and each whose
handshake is under way, though its client may have sent its request already.
"""

import asyncio
import contextlib
import ctypes
import logging
import select
import socket
import struct
import sys
from collections.abc import Callable

logger = logging.getLogger(__name__)

_LAST_IN_S = 1.5
"""How long handshakes that are under way may take to end: some round trips of the client's, and the
second after which the kernel sends again what was lost."""
_PAUSE_S = 0.001
_SO_ATTACH_FILTER = 26
"""asm-generic/socket.h; the `socket` module does not name it."""
_NO_NEWCOMERS = (
    (0x30, 0, 0, 13),  # load byte 13 of the TCP header: its flags
    (0x54, 0, 0, 0x12),  # of which SYN and ACK
    (0x15, 0, 1, 0x02),  # is it SYN alone? If not, skip one
    (0x06, 0, 0, 0),  # drop the packet
    (0x06, 0, 0, 0xFFFF),  # take it
)
"""A program of the classic BPF (linux/filter.h): code, two jumps, operand."""
_AF_NETLINK, _NETLINK_SOCK_DIAG = 16, 4
_SOCK_DIAG_BY_FAMILY, _NLMSG_ERROR, _NLMSG_DONE = 20, 2, 3
_REQUEST_DUMP = 0x301
_SYN_RECEIVED = 1 << 3 | 1 << 12
"""The states TCP_SYN_RECV and TCP_NEW_SYN_RECV (net/tcp_states.h)."""


async def take_last(listener: socket.socket, accept: Callable[[], object]) -> None:
    """Let nobody else connect, and accept all who have connected; then the socket can be closed.

    On Linux the kernel first drops what asks for a new connection: its client asks again after a
    second, and is refused. Elsewhere a connection that comes at this very moment may be reset.

    Args:
        listener: Does not block.
        accept: Accepts all that wait, or as many as can be taken now.
    """
    arrivals = select.poll()
    arrivals.register(listener, select.POLLIN)
    accept()  # most of them now, since those that come once newcomers are dropped lose a second
    _turn_newcomers_away(listener)
    accept()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LAST_IN_S):
            # In this order: who ends a handshake between the two looks waits to be accepted.
            while _num_half_open(listener) or arrivals.poll(0):
                await asyncio.sleep(_PAUSE_S)
                accept()


def _turn_newcomers_away(listener: socket.socket) -> None:
    """Have the kernel drop what asks for a new connection (Linux; elsewhere nothing)."""
    if sys.platform != "linux":
        return
    program = ctypes.create_string_buffer(
        b"".join(struct.pack("=HBBI", *op) for op in _NO_NEWCOMERS)
    )
    about = struct.pack("@HP", len(_NO_NEWCOMERS), ctypes.addressof(program))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, about)
    except OSError as error:
        logger.debug("the kernel cannot turn newcomers away: %s", error)


def _num_half_open(listener: socket.socket) -> int:
    """Clients whose handshake is under way, as far as the kernel tells (Linux)."""
    if sys.platform != "linux":
        return 0
    port = listener.getsockname()[1]
    # struct inet_diag_req_v2 (linux/inet_diag.h): what is asked for, and a socket's address, of
    # which the port alone is given.
    about = struct.pack(
        "=BBxxI H", listener.family, socket.IPPROTO_TCP, _SYN_RECEIVED, socket.htons(port)
    )
    about += bytes(56 - len(about))
    head = struct.pack("=IHHII", 16 + len(about), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0)
    num = 0
    try:
        with socket.socket(_AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(_LAST_IN_S)
            kernel.send(head + about)
            while True:
                data = kernel.recv(1 << 16)
                while data:
                    num_bytes, kind = struct.unpack_from("=IH", data)
                    if kind in (_NLMSG_DONE, _NLMSG_ERROR):
                        return num
                    num += 1
                    data = data[num_bytes + 3 & ~3 :]
    except OSError as error:
        logger.debug("the kernel does not tell of handshakes: %s", error)
        return 0
