"""What the ranks of a group find each other by, made by the front end before it starts them.

Private pipes carry the messages between ranks, and an anonymous file is where `torch.distributed`
has them meet. No port and no path is chosen, so that several groups cannot clash, and nothing of it
is left behind however its owners die.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection

from inferpool.workers.memory import open_anonymous


@dataclass(frozen=True, slots=True)
class RankEnds:
    """What one rank holds of the wiring, by the rank at the other end."""

    rank: int
    num_ranks: int
    readers: Mapping[int, Connection]
    writers: Mapping[int, Connection]
    meeting: "MeetingFile"


class MeetingFile:
    """The anonymous file; in the process that it is passed to it is a path."""

    def __init__(self) -> None:
        self._fd = open_anonymous("meeting")

    def __reduce__(self) -> tuple[object, ...]:
        """Hand the descriptor to the process that is being started."""
        return _path_of, (reduction.DupFd(self._fd),)

    def close(self) -> None:
        """Close it here; ranks that still have it keep it alive."""
        os.close(self._fd)


class Wiring:
    """Of one group; of a single process it is nothing.

    Each follower is wired to the lead both ways, and each rank to the next.
    """

    def __init__(self, num_ranks: int) -> None:
        """Make the pipes.

        Raises:
            OSError: There are no descriptors to be had.
        """
        self._num_ranks = num_ranks
        self._meeting = MeetingFile() if num_ranks > 1 else None
        pairs = {pair for rank in range(1, num_ranks) for pair in ((0, rank), (rank, 0))}
        pairs |= {(rank, rank + 1) for rank in range(num_ranks - 1)}
        self._pipes = {pair: Pipe(duplex=False) for pair in pairs}

    def ends_of(self, rank: int) -> RankEnds | None:
        """What to pass to that rank; None where there is no other."""
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
        """Close our copies of its ends, so that each rank sees the end of another."""
        if self._meeting is not None:
            self._meeting.close()
        for pipe in self._pipes.values():
            pipe[0].close()
            pipe[1].close()
        self._meeting, self._pipes = None, {}


def _path_of(descriptor: object) -> str:
    fd: int = descriptor.detach()  # type: ignore[attr-defined]  # DupFd is a factory of two classes
    return f"/proc/self/fd/{fd}"
