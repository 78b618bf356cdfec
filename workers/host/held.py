"""Keeps track of the batches that one worker holds, and detects one that takes too long.

Runs in the front end. The caller has the clock.
"""

from asyncio import Future  # noqa: TC003  # as everywhere else
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from inferpool.workers.shared.heartbeat import HeartbeatReader
from inferpool.workers.shared.messages import BatchDone, ItemRef

_UNKNOWN_TIMEOUT_S = 60.0
_MIN_TIMEOUT_S = 10.0
_SLOWER = 10.0
"""Factor by which a batch may take longer than the longest batch of the warm-up."""
_LEAST_COUNTED = 2
"""Instances that a smaller batch counts as: two decoders may hang on one of them."""
_LOOK_EVERY = 0.25
"""Interval of checks while several batches are computed, as a share of a batch's timeout."""


def batch_timeout_s(wanted_s: float | None, warmup_s: float | None) -> float:
    """Return the seconds that a batch may run.

    Args:
        wanted_s: The user's setting; None derives it from the warm-up.
        warmup_s: Seconds of the longest batch of the warm-up; None if there was none (yet).
    """
    if wanted_s is not None:
        return wanted_s
    if warmup_s is None:
        return _UNKNOWN_TIMEOUT_S
    return max(_MIN_TIMEOUT_S, warmup_s * _SLOWER)


@dataclass(frozen=True, slots=True)
class HeldBatch:
    """A batch that a worker holds; a canary if it has no future."""

    items: Sequence[ItemRef]
    future: "Future[BatchDone] | None"
    limit_s: float


class HeldBatches:
    """Batches of one worker by id, oldest first.

    The time of a batch runs only while it is the oldest. A pipeline computes several at once: there
    the worker measures the time that each of them has computed, not waited, and reports the longest
    in its heartbeat. So a batch that hangs is found even if others pass it, and a batch that waits
    behind many others still has its whole time.

    What the worker reports is written by its own process, and so maybe by a model's code. So there
    is a second bound, which only answers move: the time of a batch for each instance of the oldest,
    and that as often as there are batches that may be computed at once.
    """

    def __init__(
        self,
        heartbeat: HeartbeatReader,
        *,
        batch_timeout_s: float,
        patience_s: float,
        num_at_once: int = 1,
    ) -> None:
        self.batch_timeout_s = batch_timeout_s
        self._heartbeat = heartbeat
        self.patience_s = patience_s
        self._num_at_once = num_at_once
        self._batches: dict[int, HeldBatch] = {}
        self._oldest_since = self._forgiven_at = self._answered_at = 0.0

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._batches)

    @property
    def has_canary(self) -> bool:
        """True if one of them is a canary."""
        return any(batch.future is None for batch in self._batches.values())

    @property
    def is_oldest_canary(self) -> bool:
        """True if the oldest batch is a canary."""
        return any(batch.future is None for _, batch in self._oldest())

    @property
    def is_any_begun(self) -> bool:
        """True if the worker has begun the oldest batch."""
        return any(self._is_begun(id) for id, _ in self._oldest())

    def add(self, id: int, batch: HeldBatch, now: float) -> None:
        """Add a batch that has been sent."""
        if not self._batches:
            self._oldest_since = self._answered_at = now
        self._batches[id] = batch

    def get(self, id: int) -> HeldBatch | None:
        """Return the batch with that id, if the worker holds it."""
        return self._batches.get(id)

    def remove(self, id: int, now: float) -> None:
        """Remove a batch that has been answered; if it was the oldest, start the time of the next.

        In a pipeline the next may have computed for long already: then the worker's own measurement
        counts, unless it includes a pause of the whole host.
        """
        was_oldest = id == next(iter(self._batches))
        del self._batches[id]
        self._answered_at = now
        has_clock = self._heartbeat.at_work_since > self._forgiven_at
        if was_oldest and not (has_clock and self.is_any_begun):
            self._oldest_since = now

    def take_all(self) -> dict[int, HeldBatch]:
        """Remove and return all batches."""
        batches, self._batches = self._batches, {}
        return batches

    def forgive(self, pause_s: float, now: float) -> None:
        """Do not count a pause of the whole host as time of a batch."""
        self._oldest_since = min(now, self._since() + pause_s)
        self._answered_at = min(now, self._answered_at + pause_s)
        self._forgiven_at = now

    def oldest_age_s(self, now: float) -> float:
        """Return the seconds for which the oldest has made no progress; 0 if there is none."""
        return max(0.0, now - self._since()) if self._batches else 0.0

    def next_due_s(self, now: float) -> float:
        """Return the seconds until the next check is due; infinite if no batch is held."""
        for id, batch in self._oldest():
            limit_s = self._limit_s(id, batch)
            due_s = self._since() + limit_s - now
            if self._heartbeat.at_work_since:  # the next batch may have used up some of its time
                due_s = min(due_s, limit_s * _LOOK_EVERY)
            return min(due_s, self._answered_at + self._most_s(batch) - now)
        return float("inf")

    def hang(self, now: float) -> str:
        """Return why the worker counts as hung, if the oldest batch takes too long; else ""."""
        for id, batch in self._oldest():
            limit_s, most_s = self._limit_s(id, batch), self._most_s(batch)
            if now - self._since() <= limit_s:
                if now - self._answered_at <= most_s:
                    return ""
                return f"hung: it reports progress, and has answered nothing for {most_s:g} s"
            if not self._is_begun(id):
                return f"hung: it was idle, and took up no work for {limit_s:g} s"
            what = "a sample of its own" if batch.future is None else "a batch"
            return f"hung: {what} ran for more than {limit_s:g} s"
        return ""

    def request_ids(self) -> list[str]:
        """Return the ids of the requests that the worker has begun, each once."""
        ids = {
            item.request_id: None
            for id, batch in self._batches.items()
            if self._is_begun(id)
            for item in batch.items
            if item.request_id
        }
        return list(ids)

    def _oldest(self) -> Iterator[tuple[int, HeldBatch]]:
        for each in self._batches.items():
            yield each
            return

    def _is_begun(self, id: int) -> bool:
        return id <= self._heartbeat.last_received

    def _since(self) -> float:
        # A batch may be computed in parts: each part has the time of a batch.
        heartbeat = self._heartbeat
        return max(self._oldest_since, heartbeat.progressed_at, heartbeat.at_work_since)

    def _limit_s(self, id: int, batch: HeldBatch) -> float:
        if not self._is_begun(id):
            return self.patience_s
        if batch.future is None and id < self._heartbeat.last_received:
            return self.batch_timeout_s  # preparing a later batch may delay it
        return batch.limit_s

    def _most_s(self, batch: HeldBatch) -> float:
        """Return the seconds that the oldest batch may take, whatever the worker reports."""
        return self.batch_timeout_s * max(_LEAST_COUNTED, len(batch.items)) * self._num_at_once
