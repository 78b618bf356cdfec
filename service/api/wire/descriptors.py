"""Bounds connections by file descriptors: connections and workers' processes need them."""

import resource

MAX_AUTO_CONNECTIONS = 10_000
"""Each costs some 20 KB here besides its buffers in the kernel."""
MIN_CONNECTIONS = 8
_RESERVE = 80
"""For the log, the listener and its handles, the arena, the event loop, and connections that are
being closed."""
_RESERVE_PER_PROCESS = 18
"""A process's pipes and memory, twice: its successor's are open before its own are closed."""
_ENOUGH = 1 << 20
"""The limit where there is none: some libraries walk through all numbers below the limit."""


def raise_limit() -> int:
    """Raise this process's limit as far as allowed, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = limit_to_be()
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def limit_to_be() -> int:
    """Return the limit that `raise_limit` would set."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or hard == resource.RLIM_INFINITY:
        return max(_ENOUGH, soft)
    return max(soft, min(hard, _ENOUGH))


def max_connections(limit: int, num_processes: int) -> int:
    """Return how many connections fit under a limit of descriptors, with room for the processes."""
    room = limit - _RESERVE - _RESERVE_PER_PROCESS * num_processes
    return max(MIN_CONNECTIONS, min(room, MAX_AUTO_CONNECTIONS))
