"""Exemplars of a histogram: for each bucket, the trace of a value that fell into it lately.

OpenMetrics 1.0, "Exemplars". Used by one thread, as the histogram is.
"""

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from prometheus_client.samples import Exemplar as Rendered

Bucket = tuple[str, float] | tuple[str, float, Rendered]
"""Upper bound, values up to it, and perhaps one of them."""


class Exemplar(NamedTuple):
    """One value."""

    trace_id: str
    value: float
    time: float
    """Seconds since the epoch."""


class Exemplars:
    """The newest of each bucket."""

    __slots__ = ("_edges", "_newest")

    def __init__(self, edges: Sequence[float]) -> None:
        """Begin with none.

        Args:
            edges: Of the histogram; see `Distribution`.
        """
        self._edges = edges
        self._newest: dict[int, Exemplar] = {}

    def note(self, value: float, trace_id: str) -> None:
        """A value belongs to a trace that can be looked up."""
        place = bisect_left(self._edges, value)
        self._newest[place] = Exemplar(trace_id, value, time.time())

    def take(self) -> list[tuple[int, Exemplar]]:
        """Those that there are, by bucket; begins again with none."""
        taken = list(self._newest.items())
        self._newest.clear()
        return taken

    def add(self, taken: Sequence[tuple[int, Exemplar]]) -> None:
        """Put in what another process has taken."""
        self._newest.update(taken)

    def put_on(self, buckets: Sequence[tuple[str, float]]) -> list[Bucket]:
        """The buckets of the histogram with them."""
        found: list[Bucket] = list(buckets)
        for place, (trace_id, value, at) in self._newest.items():
            found[place] = (*buckets[place], Rendered({"trace_id": trace_id}, value, at))
        return found
