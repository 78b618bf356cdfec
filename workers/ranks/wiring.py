"""Connects the ranks of a group; the front end makes the connections before it starts the ranks.

Private pipes carry messages between ranks, and `torch.distributed` lets the ranks find each other
through an anonymous file. Neither needs a port or a path: groups cannot clash, and nothing is left
behind however the processes die. Ranks on several hosts need an address instead, and connect to
each other themselves: see `workers.inside.meeting`.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection

from inferpool.workers.shared.config import HostPart, WorkerConfig
from inferpool.workers.shared.memory import open_anonymous


@dataclass(frozen=True, slots=True)
class RankEnds:
    """Ends of the pipes that one rank holds, by the rank at the other end."""

    rank: int
    num_ranks: int
    readers: Mapping[int, Connection]
    writers: Mapping[int, Connection]
    meeting: "MeetingFile | None" = None
    """File in which they meet; None if they have met."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistantEnds:
    """The way of one rank to others on other hosts."""

    rank: int
    num_ranks: int
    part: HostPart
    """Place and token of the meeting, and address of this host."""
    timeout_s: float
    """Seconds after which a rank gives up to meet the others."""
    door: socket.socket | None
    """Socket that listens at the meeting place, for rank 0."""
    greet_s: float = 5.0
    """Seconds that whoever connects may take for its greeting: meanwhile no other rank is heard."""


class MeetingFile:
    """Anonymous file in which the ranks meet; a process that gets it sees it as a path."""

    def __init__(self) -> None:
        self._fd = open_anonymous("meeting")

    def __reduce__(self) -> tuple[object, ...]:
        """Pass the descriptor to the process that is being started."""
        return _path_of, (reduction.DupFd(self._fd),)

    def close(self) -> None:
        """Close it here; it exists as long as a rank has it open."""
        os.close(self._fd)


class Wiring:
    """Pipes and meeting file of one group; empty for a single process.

    Each follower has a pipe to the lead and one from it, and each rank has one to the next.
    """

    def __init__(self, num_ranks: int) -> None:
        """Make the pipes.

        Raises:
            OSError: There are too few descriptors.
        """
        self._num_ranks = num_ranks
        self._meeting = MeetingFile() if num_ranks > 1 else None
        pairs = {pair for rank in range(1, num_ranks) for pair in ((0, rank), (rank, 0))}
        pairs |= {(rank, rank + 1) for rank in range(num_ranks - 1)}
        self._pipes = {pair: Pipe(duplex=False) for pair in pairs}

    def ends_of(self, rank: int) -> RankEnds | None:
        """Return what to pass to that rank; None if it is the only one."""
        if self._meeting is None:
            return None
        return RankEnds(
            rank,
            self._num_ranks,
            {source: pipe[0] for (source, to), pipe in self._pipes.items() if to == rank},
            {to: pipe[1] for (source, to), pipe in self._pipes.items() if source == rank},
            self._meeting,
        )

    def close(self) -> None:
        """Close our copies, so that each rank sees the end of file when another one dies."""
        if self._meeting is not None:
            self._meeting.close()
        for pipe in self._pipes.values():
            pipe[0].close()
            pipe[1].close()
        self._meeting, self._pipes = None, {}


class DistantWiring:
    """The ways of the ranks of this host to those of other hosts."""

    def __init__(self, part: HostPart, num_ranks: int, timeout_s: float) -> None:
        """Take a copy of the socket at the meeting place, if rank 0 is here.

        Raises:
            OSError: There are too few descriptors.
        """
        self._part, self._num_ranks, self._timeout_s = part, num_ranks, timeout_s
        self._door = None if part.door < 0 else socket.socket(fileno=os.dup(part.door))

    def ends_of(self, rank: int) -> DistantEnds:
        """Return what to pass to that rank."""
        return DistantEnds(
            rank=rank,
            num_ranks=self._num_ranks,
            part=self._part,
            timeout_s=self._timeout_s,
            door=self._door if rank == 0 else None,
        )

    def close(self) -> None:
        """Close our copy of the socket, so that nobody can connect once rank 0 has ended."""
        if self._door is not None:
            self._door.close()


def wiring_of(config: WorkerConfig) -> Wiring | DistantWiring:
    """Make the wiring of the ranks of a worker that this host runs.

    Raises:
        OSError: There are too few descriptors.
    """
    num_ranks = config.placement.num_ranks
    if config.part is None:
        return Wiring(num_ranks)
    return DistantWiring(config.part, num_ranks, config.load_timeout_s)


def _path_of(descriptor: object) -> str:
    fd: int = descriptor.detach()  # type: ignore[attr-defined]  # DupFd is a factory of two classes
    return f"/proc/self/fd/{fd}"
