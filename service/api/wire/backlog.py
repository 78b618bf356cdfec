"""Accepts the last connections of a listening socket before it is closed.

Closing a listening socket resets every connection that waits to be accepted or is in its handshake,
though its client may have sent a request already.
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
"""How long handshakes under way may take to end: some round trips, and the second after which the
kernel sends a lost packet again."""
_PAUSE_S = 0.001
_SO_ATTACH_FILTER = 26
"""asm-generic/socket.h; the `socket` module does not name it."""
_NO_NEWCOMERS = (
    (0x30, 0, 0, 13),  # load byte 13 of the TCP header: its flags
    (0x54, 0, 0, 0x12),  # mask out all but SYN and ACK
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


async def take_last(
    listener: socket.socket, accept: Callable[[], object], *, last_in_s: float = _LAST_IN_S
) -> None:
    """Accept all clients that have connected, and no others; then the socket can be closed.

    On Linux the kernel first drops requests for new connections: their clients ask again after a
    second, and are refused. Elsewhere a connection that comes at this very moment may be reset. The
    socket must not block; `accept` accepts all that wait, or as many as can be taken now.

    Args:
        listener: The socket.
        accept: Accepts from it.
        last_in_s: How long handshakes under way may take to end.
    """
    arrivals = select.poll()
    arrivals.register(listener, select.POLLIN)
    accept()  # most of them now: those that come once newcomers are dropped lose a second
    _turn_newcomers_away(listener)
    accept()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(last_in_s):
            # In this order: a handshake that ends between the two checks then waits to be accepted.
            while _num_half_open(listener) or arrivals.poll(0):
                await asyncio.sleep(_PAUSE_S)
                accept()


def _turn_newcomers_away(listener: socket.socket) -> None:
    """Have the kernel drop requests for new connections (Linux; elsewhere nothing)."""
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
    """Return the number of handshakes under way (Linux; elsewhere 0)."""
    if sys.platform != "linux":
        return 0
    port = listener.getsockname()[1]
    # struct inet_diag_req_v2 (linux/inet_diag.h): the states, and an address with only a port.
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
