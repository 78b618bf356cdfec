"""Connects the ranks of a group; the front end makes the connections before it starts the ranks.

Private pipes carry messages between ranks, and in `torch.distributed` the ranks find each other
through an anonymous file. Neither needs a port or a path: groups cannot clash, and nothing is left
behind however the processes die.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection

from inferpool.workers.shared.memory import open_anonymous


@dataclass(frozen=True, slots=True)
class RankEnds:
    """Ends of the pipes that one rank holds, by the rank at the other end."""

    rank: int
    num_ranks: int
    readers: Mapping[int, Connection]
    writers: Mapping[int, Connection]
    meeting: "MeetingFile"
    """File that they meet in."""


class MeetingFile:
    """Anonymous file that the ranks meet in; a process that gets it sees it as a path."""

    def __init__(self) -> None:
        self._fd = open_anonymous("meeting")

    def __reduce__(self) -> tuple[object, ...]:
        """Pass the descriptor to the process that is being started."""
        return _path_of, (reduction.DupFd(self._fd),)

    def close(self) -> None:
        """Close it here; it exists as long as a rank has it open."""
        os.close(self._fd)


class Wiring:
    """Pipes and meeting file of one group.

    Each follower has a pipe to the lead and one from it, and each rank has one to the next.
    """

    def __init__(self, num_ranks: int) -> None:
        """Create the pipes.

        Raises:
            OSError: There are too few descriptors.
        """
        self._num_ranks = num_ranks
        self._meeting = MeetingFile()
        pairs = {pair for rank in range(1, num_ranks) for pair in ((0, rank), (rank, 0))}
        pairs |= {(rank, rank + 1) for rank in range(num_ranks - 1)}
        self._pipes = {pair: Pipe(duplex=False) for pair in pairs}

    def ends_of(self, rank: int) -> RankEnds:
        """Return what to pass to that rank."""
        return RankEnds(
            rank,
            self._num_ranks,
            {source: pipe[0] for (source, to), pipe in self._pipes.items() if to == rank},
            {to: pipe[1] for (source, to), pipe in self._pipes.items() if source == rank},
            self._meeting,
        )

    def close(self) -> None:
        """Close our copies, so that each rank sees the end of file when another one dies."""
        pipes, self._pipes = self._pipes, {}
        if pipes:
            self._meeting.close()
        for pipe in pipes.values():
            pipe[0].close()
            pipe[1].close()


def _path_of(descriptor: object) -> str:
    fd: int = descriptor.detach()  # type: ignore[attr-defined]  # DupFd is a factory of two classes
    return f"/proc/self/fd/{fd}"
