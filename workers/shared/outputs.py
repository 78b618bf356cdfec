"""Passes large outputs from a worker to the front end through shared memory.

Each incarnation has a region of blocks, and one flag byte per block that says whether it is taken.
Only the worker takes blocks; only the front end frees them, once nothing refers to their content.
So no message goes back and there is no lock that a killed process could hold. The region lives as
long as its last reader. An output that finds no room goes through the queue.
"""

import ctypes
import mmap
import pickle
import weakref

import msgspec

from inferpool.workers.shared.memory import SharedMemory
from inferpool.workers.shared.messages import BatchDone, ContentBlob, Outcome, Stored, TensorBlob

MIN_STORED_BYTES = 1 << 16
"""Least size for this to be cheaper than the queue (`python -m tests.bench outputs`)."""
_BLOCK_BYTES = 1 << 16
NUM_BLOCKS = 2047
"""Number of blocks: 128 MiB with the flags. Pages that are never written take no memory."""
_FREE, _TAKEN = b"\0", b"\1"


class StoredError(Exception):
    """A worker named a place that cannot hold an output."""


class OutputStore:
    """The worker's side of a region."""

    def __init__(self, region: mmap.mmap, *, min_stored_bytes: int = MIN_STORED_BYTES) -> None:
        self._region = region
        self._min_stored_bytes = min_stored_bytes
        self.num_stored = 0
        """Number of outputs stored so far."""

    def keep(self, data: memoryview) -> bytes | Stored:
        """Copy an output into the region if it is large and there is room, else into bytes."""
        num_bytes = len(data)
        if num_bytes < self._min_stored_bytes:
            return bytes(data)
        num_blocks = _num_blocks(num_bytes)
        first = self._region.find(_FREE * num_blocks, 0, NUM_BLOCKS)
        if first < 0:
            return bytes(data)
        self._region[first : first + num_blocks] = _TAKEN * num_blocks
        start = _start(first)
        self._region[start : start + num_bytes] = data
        self.num_stored += 1
        return Stored(first, num_bytes)


class OutputRegion:
    """The front end's side of a region; made before the process starts."""

    def __init__(self) -> None:
        """Create a region.

        Raises:
            SharedMemoryError: There are too few descriptors.
        """
        num_bytes = _start(NUM_BLOCKS)
        self.memory = SharedMemory(num_bytes, name="outputs", writable=True, is_reserved=False)
        self._region = self.memory.map

    @property
    def num_taken(self) -> int:
        """Number of blocks in use."""
        return self._region[:NUM_BLOCKS].count(_TAKEN)

    def find(self, done: BatchDone) -> BatchDone:
        """Replace the places of stored outputs by views; blocks are freed with their last view.

        Raises:
            StoredError: A place does not exist.
        """
        outcomes = [self._found(outcome) for outcome in done.outcomes]
        return msgspec.structs.replace(done, outcomes=outcomes, num_stored=0)

    def close(self) -> None:
        """Release the region after the worker's exit; it lives on until its last view is gone."""
        self.memory.close()

    def _found(self, outcome: Outcome) -> Outcome:
        if isinstance(outcome, ContentBlob) and isinstance(outcome.data, Stored):
            return msgspec.structs.replace(outcome, data=self._view(outcome.data))
        if not isinstance(outcome, list):
            return outcome
        return [
            TensorBlob(blob.name, blob.dtype, blob.shape, self._view(blob.data), blob.is_ragged)
            if isinstance(blob.data, Stored)
            else blob
            for blob in outcome
        ]

    def _view(self, stored: Stored) -> bytes:
        first, num_bytes = stored.first_block, stored.num_bytes
        num_blocks = _num_blocks(num_bytes)
        if num_bytes < 1 or first < 0 or first + num_blocks > NUM_BLOCKS:
            raise StoredError(f"outputs of {num_bytes} bytes at block {first}")
        # Views keep a ctypes array alive, and its end can trigger the release of the blocks.
        part = (ctypes.c_char * num_bytes).from_buffer(self._region, _start(first))
        weakref.finalize(part, _give_back, self._region, first, num_blocks).atexit = False
        return pickle.PickleBuffer(part).raw()  # type: ignore[return-value]  # all that is done with the bytes of outputs, its readers do with views too


def _give_back(region: mmap.mmap, first: int, num_blocks: int) -> None:
    region[first : first + num_blocks] = _FREE * num_blocks


def _num_blocks(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK_BYTES)


def _start(block: int) -> int:
    """Return the offset of a block; the first block of the region holds the flags."""
    return (block + 1) * _BLOCK_BYTES
