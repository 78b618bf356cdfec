"""A histogram that is cheap to count in, and fine enough to read percentiles from."""

import functools
import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from prometheus_client.samples import Exemplar as RenderedExemplar
from prometheus_client.utils import floatToGoString

MAX_PENDING = 4096
"""Values kept before they are counted."""

Bucket = tuple[str, float] | tuple[str, float, RenderedExemplar]
"""The upper bound, the number of values up to it, and perhaps an exemplar."""


class Distribution:
    """A histogram. `observe` only appends, and numpy counts many values at once later."""

    __slots__ = ("_counts", "_edges", "_parts", "_sum", "pending")

    def __init__(self, edges: Sequence[float], parts: int = 1) -> None:
        """Start empty.

        Args:
            edges: Inclusive upper bounds of the buckets, ascending. One without a bound follows.
            parts: The number of parts that each bucket is counted in.
        """
        self._edges = _edges_of(tuple(edges), parts)
        self._parts = parts
        self._counts = np.zeros(len(self._edges) + 1, dtype=np.int64)
        self._sum = 0.0
        self.pending: list[float] = []
        """Values that are not counted yet. Who appends here calls `fold` at `MAX_PENDING`."""

    def observe(self, value: float) -> None:
        """Count one value."""
        pending = self.pending
        pending.append(value)
        if len(pending) >= MAX_PENDING:
            self.fold()

    def take(self) -> tuple[list[int], float]:
        """Return the number of values in each part, and their sum; start again at zero."""
        self.fold()
        taken = self._counts.tolist(), self._sum
        self._counts[:] = 0
        self._sum = 0.0
        return taken

    def add(self, counts: Sequence[int], sum: float) -> None:
        """Add what another process has counted in the same parts."""
        self._counts += np.array(counts, dtype=np.int64)
        self._sum += sum

    @property
    def count(self) -> int:
        """The number of values."""
        return int(self._counts.sum()) + len(self.pending)

    @property
    def sum(self) -> float:
        """The sum of the values."""
        self.fold()
        return self._sum

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, values up to it) as Prometheus has them: cumulative, "+Inf" last."""
        self.fold()
        last = self._parts - 1
        bounds = [*map(floatToGoString, self._edges[last :: self._parts].tolist()), "+Inf"]
        cumulative = self._counts.cumsum()
        upto = [*cumulative[last : len(self._edges) : self._parts].tolist(), int(cumulative[-1])]
        return list(zip(bounds, upto, strict=True))

    def __add__(self, other: "Distribution") -> "Distribution":
        """Return the sum of two distributions with the same parts."""
        both = Distribution(())
        both._edges, both._parts = self._edges, self._parts
        self.fold()
        other.fold()
        both._counts = self._counts + other._counts
        both._sum = self._sum + other._sum
        return both

    def __sub__(self, before: "Distribution") -> "Recent":
        """Return what was counted after a copy of this distribution was made."""
        self.fold()
        before.fold()
        return Recent(self._edges, self._counts - before._counts)

    def fold(self) -> None:
        """Count the values that are pending."""
        if not self.pending:
            return
        values = np.array(self.pending, dtype=np.float64)
        self.pending.clear()
        self._sum += float(values.sum())
        places = self._edges.searchsorted(values, side="left")
        self._counts += np.bincount(places, minlength=len(self._counts))


class Recent:
    """The values of a time span, as counts by part."""

    def __init__(self, edges: "np.ndarray", counts: "np.ndarray") -> None:
        self._edges = edges
        self._counts = counts

    def percentiles(self, *percents: float) -> list[float] | None:
        """Return the percentiles of the values, each to within its part; None without values.

        Values count as evenly spread within a part, and as on the last edge beyond it.
        """
        cumulative = self._counts.cumsum()
        total = int(cumulative[-1])
        if not total:
            return None
        found = []
        for percent in percents:
            rank = total * percent / 100
            place = int(cumulative.searchsorted(rank, side="left"))
            if place == len(self._edges):
                found.append(float(self._edges[-1]))
                continue
            low = float(self._edges[place - 1]) if place else 0.0
            high = float(self._edges[place])
            inside = int(self._counts[place])
            before = int(cumulative[place]) - inside
            found.append(low + (high - low) * (rank - before) / inside)
        return found

    def by_edge(self) -> dict[str, int]:
        """Return the number of values in each part that has any, by its upper edge."""
        names = [*(f"{edge:g}" for edge in self._edges.tolist()), "+Inf"]
        counts = self._counts.tolist()
        return {name: count for name, count in zip(names, counts, strict=True) if count}


class Exemplar(NamedTuple):
    """One value, and the trace of the call that it was measured in."""

    trace_id: str
    value: float
    time: float
    """Seconds since the epoch."""


class Exemplars:
    """The newest exemplar of each bucket (OpenMetrics 1.0, "Exemplars")."""

    __slots__ = ("_edges", "_newest")

    def __init__(self, edges: Sequence[float]) -> None:
        self._edges = edges
        self._newest: dict[int, Exemplar] = {}

    def note(self, value: float, trace_id: str) -> None:
        """Store the trace of a value."""
        place = bisect_left(self._edges, value)
        self._newest[place] = Exemplar(trace_id, value, time.time())

    def take(self) -> list[tuple[int, Exemplar]]:
        """Return all exemplars by bucket, and start again with none."""
        taken = list(self._newest.items())
        self._newest.clear()
        return taken

    def add(self, taken: Sequence[tuple[int, Exemplar]]) -> None:
        """Add what another process has taken."""
        self._newest.update(taken)

    def put_on(self, buckets: Sequence[tuple[str, float]]) -> list[Bucket]:
        """Return the buckets of a histogram with the exemplars on them."""
        found: list[Bucket] = list(buckets)
        for place, (trace_id, value, at) in self._newest.items():
            found[place] = (*buckets[place], RenderedExemplar({"trace_id": trace_id}, value, at))
        return found


@functools.lru_cache(maxsize=64)
def _edges_of(edges: tuple[float, ...], parts: int) -> np.ndarray:
    """Return the edges of all parts, which distributions with the same buckets share."""
    fine = np.array(_divided(edges, parts), dtype=np.float64)
    fine.flags.writeable = False
    return fine


def _divided(edges: Sequence[float], parts: int) -> list[float]:
    """Divide buckets by edges at equal ratios; the first one by edges at equal distances."""
    fine: list[float] = []
    low = 0.0
    for high in edges:
        steps = [part / parts for part in range(1, parts)]
        fine += [low * (high / low) ** step if low else high * step for step in steps]
        fine.append(high)
        low = high
    return fine
