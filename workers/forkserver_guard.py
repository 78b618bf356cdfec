"""Imported first by the forkserver: from here on it lives as long as the front end, and no less."""

import errno
import os
import signal
import socket
import sys
from multiprocessing import reduction

from workers.guard import die_with_parent
from workers.threads import spin_briefly

FORKSERVER_PID = os.getpid()


def outlive_failed_forks() -> None:
    """Have a fork that the kernel refuses end one start, and not the forkserver.

    `multiprocessing.forkserver.main` leaves by any OSError but ECONNABORTED, and its end would be
    the end of every worker. Here such a fork closes what the front end had sent for the new
    process, which it sees as the end of file, and the forkserver waits for the next request.
    """
    fork, receive = os.fork, reduction.recvfds
    received: list[int] = []

    def remember(sock: socket.socket, size: int) -> list[int]:
        received[:] = receive(sock, size)
        return list(received)

    def fork_or_refuse() -> int:
        try:
            return fork()
        except OSError as error:
            if os.getpid() != FORKSERVER_PID:
                raise
            sys.stderr.write(f"the forkserver cannot fork: {error.strerror}\n")
            while received:
                os.close(received.pop())
            raise OSError(errno.ECONNABORTED, error.strerror) from error

    reduction.recvfds = remember
    os.fork = fork_or_refuse


os.environ.pop("PYTHONSAFEPATH", None)  # meant for this process, not for what a model may start

spin_briefly()
die_with_parent(os.getppid())
outlive_failed_forks()
# A stop of the whole process group or cgroup reaches the forkserver too; the front end drains first
# and then lets it go by closing its pipe.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
