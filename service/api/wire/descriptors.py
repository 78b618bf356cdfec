"""File descriptors: a connection costs one, a worker's process some, and all fails without."""

import resource

MAX_AUTO_CONNECTIONS = 10_000
"""Each costs some 20 KB here besides its buffers in the kernel."""
MIN_CONNECTIONS = 8
_RESERVE = 64
"""For the log, the listener, the arena, the event loop, and connections that are being closed."""
_RESERVE_PER_PROCESS = 18
"""Its pipes and memory, twice over: its successor's are open before its own are closed."""
_ENOUGH = 1 << 20
"""Where there is no limit, one is still made: some libraries walk through all numbers below it."""


def raise_limit() -> int:
    """Raise the limit of this process to what it may have at most, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = limit_to_be()
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def limit_to_be() -> int:
    """What `raise_limit` makes of the limit of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or hard == resource.RLIM_INFINITY:
        return max(_ENOUGH, soft)
    return max(soft, min(hard, _ENOUGH))


def max_connections(limit: int, num_processes: int) -> int:
    """How many connections fit under a limit of descriptors beside all that must work on."""
    room = limit - _RESERVE - _RESERVE_PER_PROCESS * num_processes
    return max(MIN_CONNECTIONS, min(room, MAX_AUTO_CONNECTIONS))
