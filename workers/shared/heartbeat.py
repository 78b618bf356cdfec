"""Heartbeats: numbers in shared memory that a worker's main loop writes and the front end reads.

No helper thread writes them, so that a stuck loop looks stuck. Times are CLOCK_MONOTONIC, which all
processes of a host share.
"""

import mmap
import time

from inferpool.workers.shared.memory import SharedMemory

_BEAT_NS, _RECEIVED, _NUM_BATCHES, _LEAVE, _PROGRESS_NS, _AT_WORK_NS = range(6)
_ROW_BYTES = mmap.PAGESIZE


class Heartbeat:
    """The worker's side of a heartbeat."""

    def __init__(self, row: mmap.mmap) -> None:
        self._row = memoryview(row).cast("Q")

    def beat(self) -> None:
        """Report that the loop runs."""
        self._row[_BEAT_NS] = time.monotonic_ns()

    def received(self, batch_id: int) -> None:
        """Report the begin of a batch, from any thread; from now on it may cause the end."""
        self._row[_RECEIVED] = batch_id

    def progressed(self) -> None:
        """Report the begin of the next part of a batch."""
        self._row[_BEAT_NS] = self._row[_PROGRESS_NS] = time.monotonic_ns()

    def at_work_since(self, since: float) -> None:
        """Report the begin of the batch that has computed longest, not counting its waits."""
        self._row[_AT_WORK_NS] = int(since * 1e9)

    def answered(self) -> None:
        """Report the answer to a batch, not to a canary. One thread at a time may call it."""
        self._row[_BEAT_NS] = time.monotonic_ns()
        self._row[_NUM_BATCHES] += 1

    @property
    def must_leave(self) -> bool:
        """True once the front end does not wait for the present batch any more."""
        return bool(self._row[_LEAVE])


class HeartbeatReader:
    """The front end's side of a heartbeat, from before the start until after the exit."""

    def __init__(self) -> None:
        """Create the shared memory.

        Raises:
            SharedMemoryError: There is too little memory.
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
        """Number of batches answered by this incarnation."""
        return self._row[_NUM_BATCHES]

    @property
    def last_received(self) -> int:
        """Id of the newest batch that the worker has begun."""
        return self._row[_RECEIVED]

    @property
    def progressed_at(self) -> float:
        """Time at which it last began a part of a batch; 0.0 if it never did."""
        return self._row[_PROGRESS_NS] / 1e9

    @property
    def at_work_since(self) -> float:
        """Value of `Heartbeat.at_work_since` if it computes several batches at once; else 0.0."""
        return self._row[_AT_WORK_NS] / 1e9

    def tell_to_leave(self) -> None:
        """Allow SIGTERM to end the worker, which else ignores it."""
        self._row[_LEAVE] = 1

    def close(self) -> None:
        """Unmap the shared memory."""
        self._row.release()
        self.memory.close()
