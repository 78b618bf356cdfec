"""A row of shared memory per incarnation, written by the worker's own loop, read by the front end.

No helper thread writes it: a stuck loop must look stuck. Times are CLOCK_MONOTONIC, which all
processes of one boot share.
"""

import mmap
import time

from inferpool.workers.memory import SharedMemory

_BEAT_NS, _RECEIVED, _NUM_BATCHES, _LEAVE, _PROGRESS_NS, _AT_WORK_NS = range(6)
_ROW_BYTES = mmap.PAGESIZE


class Heartbeat:
    """The worker's side."""

    def __init__(self, row: mmap.mmap) -> None:
        self._row = memoryview(row).cast("Q")

    def beat(self) -> None:
        """The loop has come round."""
        self._row[_BEAT_NS] = time.monotonic_ns()

    def received(self, batch_id: int) -> None:
        """Work on a batch begins, in any thread; from here on it may be what ends the process."""
        self._row[_RECEIVED] = batch_id

    def progressed(self) -> None:
        """The next part of the batch that is computed begins."""
        self._row[_BEAT_NS] = self._row[_PROGRESS_NS] = time.monotonic_ns()

    def at_work_since(self, since: float) -> None:
        """Where several batches are under way: the longest has taken what has passed since then."""
        self._row[_AT_WORK_NS] = int(since * 1e9)

    def answered(self) -> None:
        """A batch is done, which was no canary; one thread at a time says so."""
        self._row[_BEAT_NS] = time.monotonic_ns()
        self._row[_NUM_BATCHES] += 1

    @property
    def must_leave(self) -> bool:
        """The front end has said that it no longer waits for what is being computed."""
        return bool(self._row[_LEAVE])


class HeartbeatReader:
    """The front end's side; made before the process, dropped after its exit."""

    def __init__(self) -> None:
        """Make a row.

        Raises:
            SharedMemoryError: There is no page to be had.
        """
        self.memory = SharedMemory(_ROW_BYTES, name="heartbeat", writable=True)
        self._row = memoryview(self.memory.map).cast("Q")
        self._row[_BEAT_NS] = time.monotonic_ns()

    @property
    def age_s(self) -> float:
        """Seconds since the last beat."""
        return (time.monotonic_ns() - self._row[_BEAT_NS]) / 1e9

    @property
    def num_batches(self) -> int:
        """Batches answered in this incarnation."""
        return self._row[_NUM_BATCHES]

    @property
    def last_received(self) -> int:
        """The newest batch that the worker has begun to work on."""
        return self._row[_RECEIVED]

    @property
    def progressed_at(self) -> float:
        """When it last began with a part of a batch, in seconds; 0.0 if it never did."""
        return self._row[_PROGRESS_NS] / 1e9

    @property
    def at_work_since(self) -> float:
        """What the worker says, that has several batches under way; else 0.0."""
        return self._row[_AT_WORK_NS] / 1e9

    def tell_to_leave(self) -> None:
        """From now on SIGTERM ends the worker, which ignores it otherwise."""
        self._row[_LEAVE] = 1

    def close(self) -> None:
        """Unmap the row."""
        self._row.release()
        self.memory.close()
