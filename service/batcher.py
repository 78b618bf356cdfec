"""Which requests form the next batch: by priority, then deadline class, then first come.

Pure: it holds no clock, no future and no process. Taking a request out from the middle costs the
same as from the front.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from itertools import islice
from math import inf
from typing import Generic, Protocol, TypeVar

_CLASS_EDGES_S = (0.1, 1.0, 10.0)
"""Time left at arrival, below which a request belongs to a more urgent class."""
_LOOKS = 4
"""For each request that is taken from the end, how many may be looked at."""


class Queueable(Protocol, Hashable):
    """What the batcher looks at."""

    priority: int
    """1 goes first, 9 last."""
    deadline: float
    arrived: float
    is_solo: bool
    """It makes a batch of its own: the last one it was in did not survive."""
    lane: int
    """Written by the batcher."""


Q = TypeVar("Q", bound=Queueable)


class Batcher(Generic[Q]):
    """The queue of one model."""

    def __init__(self) -> None:
        self._lanes: dict[int, OrderedDict[Q, None]] = {}
        self._order: list[int] = []
        self._length = 0

    def __len__(self) -> int:
        """Requests that wait."""
        return self._length

    def __iter__(self) -> Iterator[Q]:
        """Those that wait, the best first."""
        for key in self._order:
            yield from self._lanes[key]

    def num_ahead(self, priority: int, deadline: float, now: float) -> int:
        """How many of those that wait would go before a request that came now."""
        lane = _lane_of(priority, deadline, now)
        return sum(len(self._lanes[key]) for key in self._order if key <= lane)

    def push(self, request: Q, now: float) -> None:
        """Add a request behind its equals."""
        request.lane = lane = _lane_of(request.priority, request.deadline, now)
        self._lane(lane)[request] = None
        self._length += 1

    def push_front(self, request: Q) -> None:
        """Put back a request that was taken before, ahead of its equals."""
        lane = self._lane(request.lane)
        lane[request] = None
        lane.move_to_end(request, last=False)
        self._length += 1

    def remove(self, request: Q) -> None:
        """Take out a request that waits."""
        del self._lanes[request.lane][request]
        self._length -= 1

    def next_batch(self, max_size: int) -> list[Q]:
        """Take the best requests, at most `max_size`; a solo request comes alone."""
        batch: list[Q] = []
        for key in self._order:
            lane = self._lanes[key]
            while lane and len(batch) < max_size:
                request = next(iter(lane))
                if request.is_solo and batch:
                    break
                del lane[request]
                batch.append(request)
                if request.is_solo:
                    break
            if batch and (batch[-1].is_solo or lane or len(batch) == max_size):
                break
        self._length -= len(batch)
        return batch

    def last_batch(self, max_size: int, fits: Callable[[Q], bool]) -> list[Q]:
        """Take the requests whose turn is furthest off, at most `max_size`; no solo requests.

        Args:
            max_size: How many.
            fits: Says of each whether it may be taken. Few that may not are passed over.
        """
        batch: list[Q] = []
        looked_at = (r for key in reversed(self._order) for r in reversed(self._lanes[key]))
        for request in islice(looked_at, _LOOKS * max_size):
            if not request.is_solo and fits(request):
                batch.append(request)
                if len(batch) == max_size:
                    break
        for request in batch:
            self.remove(request)
        batch.reverse()
        return batch

    def oldest(self) -> Q | None:
        """The request that a batch formed now would begin with."""
        for key in self._order:
            if self._lanes[key]:
                return next(iter(self._lanes[key]))
        return None

    def soonest(self) -> float:
        """No request that waits has an earlier deadline than this; infinite where none waits.

        A bound, from the first of each class: to know better, one would have to look at each.
        """
        soonest = inf
        for key, lane in self._lanes.items():
            if lane:
                edge_s = _CLASS_EDGES_S[key % 4 - 1] if key % 4 else 0.0
                soonest = min(soonest, next(iter(lane)).arrived + edge_s)
        return soonest

    def _lane(self, key: int) -> "OrderedDict[Q, None]":
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = OrderedDict()
            self._order = sorted(self._lanes)
        return lane


def _lane_of(priority: int, deadline: float, now: float) -> int:
    left_s = deadline - now
    if left_s > _CLASS_EDGES_S[-1]:
        return priority * 4 + 3
    for number, edge_s in enumerate(_CLASS_EDGES_S):
        if left_s <= edge_s:
            return priority * 4 + number
    return priority * 4 + 3
