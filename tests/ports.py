"""Free ports, for servers that must be given one."""

import os
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_NUM = 15_000


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free, and that the kernel gives to nobody who asks for any port.

    Processes that run tests side by side get different ones, though no server has them yet.
    """
    first = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32768
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    step = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    for _ in range(100):
        port = random.randrange(max(1024, first - _NUM) + number, first, step)
        with socket.socket() as listener:
            try:
                listener.bind((host, port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")
