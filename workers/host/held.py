"""The batches that one incarnation holds, and whether the oldest has taken too long. Front end.

Pure but for what it reads of the heartbeat: the caller has the clock.
"""

from asyncio import Future  # noqa: TC003  # as everywhere else
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from inferpool.workers.heartbeat import HeartbeatReader
from inferpool.workers.messages import BatchDone, ItemRef

_UNKNOWN_TIMEOUT_S = 60.0
_MIN_TIMEOUT_S = 10.0
_SLOWER = 10.0
"""A batch may take this many times longer than the longest batch of the warm-up."""
_LOOK_EVERY = 0.25
"""Of a batch's time, where several are under way."""


def batch_timeout_s(wanted_s: float | None, warmup_s: float | None) -> float:
    """How long a batch may run.

    Args:
        wanted_s: What the user has set; None: find out.
        warmup_s: What the longest batch of the warm-up took; None where there was none (yet).
    """
    if wanted_s is not None:
        return wanted_s
    if warmup_s is None:
        return _UNKNOWN_TIMEOUT_S
    return max(_MIN_TIMEOUT_S, warmup_s * _SLOWER)


@dataclass(frozen=True, slots=True)
class Held:
    """One batch, which is a canary if nobody waits for it."""

    items: Sequence[ItemRef]
    future: "Future[BatchDone] | None"
    limit_s: float


class HeldBatches:
    """By id, oldest first: the oldest alone has the worker's clock.

    A pipeline computes several at once, and each has a clock of its own there, which stands still
    while it waits for another; the worker tells of the one that has taken longest. So what hangs is
    seen, also one that calls the network again and again and lets others pass, and one that waits
    behind many others has all its time.
    """

    def __init__(
        self, heartbeat: HeartbeatReader, *, batch_timeout_s: float, patience_s: float
    ) -> None:
        """Hold nothing yet.

        Args:
            heartbeat: Which batch has been begun, and when it last got on.
            batch_timeout_s: How long a batch may run.
            patience_s: How long an idle worker may take to begin with one.
        """
        self.batch_timeout_s = batch_timeout_s
        self._heartbeat = heartbeat
        self._patience_s = patience_s
        self._batches: dict[int, Held] = {}
        self._oldest_since = self._forgiven_at = 0.0

    def __len__(self) -> int:
        """How many there are."""
        return len(self._batches)

    @property
    def has_canary(self) -> bool:
        """One of them is a canary."""
        return any(batch.future is None for batch in self._batches.values())

    @property
    def is_oldest_canary(self) -> bool:
        """The worker is at work on a canary."""
        return any(batch.future is None for _, batch in self._oldest())

    @property
    def is_any_begun(self) -> bool:
        """The worker is at work."""
        return any(self._is_begun(id) for id, _ in self._oldest())

    def add(self, id: int, batch: Held, now: float) -> None:
        """It has been sent."""
        if not self._batches:
            self._oldest_since = now
        self._batches[id] = batch

    def get(self, id: int) -> Held | None:
        """The batch of that id, if it is held."""
        return self._batches.get(id)

    def remove(self, id: int, now: float) -> None:
        """It has been answered; if it was the oldest, the next one's time begins.

        Not where that has a clock of its own, which may have run for long, and not through a pause.
        """
        was_oldest = id == next(iter(self._batches))
        del self._batches[id]
        has_clock = self._heartbeat.at_work_since > self._forgiven_at
        if was_oldest and not (has_clock and self.is_any_begun):
            self._oldest_since = now

    def take_all(self) -> dict[int, Held]:
        """Hold nothing any more."""
        batches, self._batches = self._batches, {}
        return batches

    def forgive(self, pause_s: float, now: float) -> None:
        """The whole host stood still for that long."""
        self._oldest_since = min(now, self._since() + pause_s)
        self._forgiven_at = now

    def oldest_age_s(self, now: float) -> float:
        """How long the oldest has had the worker, since it last got on; 0 if there is none."""
        return max(0.0, now - self._since()) if self._batches else 0.0

    def next_due_s(self, now: float) -> float:
        """How soon the oldest may have taken too long; infinite if there is none."""
        for id, batch in self._oldest():
            limit_s = self._limit_s(id, batch)
            due_s = self._since() + limit_s - now
            if self._heartbeat.at_work_since:  # a clock that stands still may have run before
                due_s = min(due_s, limit_s * _LOOK_EVERY)
            return due_s
        return float("inf")

    def hang(self, now: float) -> str:
        """What the oldest says of the worker, if it has taken too long."""
        for id, batch in self._oldest():
            limit_s = self._limit_s(id, batch)
            if now - self._since() <= limit_s:
                return ""
            if not self._is_begun(id):
                return f"hung: it was idle, and took up no work for {limit_s:g} s"
            what = "a sample of its own" if batch.future is None else "a batch"
            return f"hung: {what} ran for more than {limit_s:g} s"
        return ""

    def request_ids(self) -> list[str]:
        """Of the items that it has begun to work on, each once."""
        ids = {
            item.request_id: None
            for id, batch in self._batches.items()
            if self._is_begun(id)
            for item in batch.items
            if item.request_id
        }
        return list(ids)

    def _oldest(self) -> Iterator[tuple[int, Held]]:
        for each in self._batches.items():
            yield each
            return

    def _is_begun(self, id: int) -> bool:
        return id <= self._heartbeat.last_received

    def _since(self) -> float:
        # Parts of a batch that are computed one after another each have the time of a batch.
        heartbeat = self._heartbeat
        return max(self._oldest_since, heartbeat.progressed_at, heartbeat.at_work_since)

    def _limit_s(self, id: int, batch: Held) -> float:
        if not self._is_begun(id):
            return self._patience_s
        if batch.future is None and id < self._heartbeat.last_received:
            return self.batch_timeout_s  # a later one is being prepared, which may hold it up
        return batch.limit_s
