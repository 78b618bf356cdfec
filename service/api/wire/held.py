"""The bytes that clients make several processes keep, counted by owner in memory that these share.

Each process writes to its own rows alone and reads all, so there is no lock that a killed process
could hold. The rows of one that died are cleared by the main process. An owner is an API key, or
the address of a client; see `Shares`.
"""

from collections.abc import Sequence
from mmap import mmap
from zlib import crc32

_NUM_OWNERS = 1024
"""Owners that are told apart; two of more may happen to share a place, and so a share."""
_COUNT_BYTES = 8
_ROW_LENGTH = _NUM_OWNERS + 1
"""A count for each owner, and their sum."""
_KINDS = ("unfinished", "unread")


class HeldBytes:
    """One kind of such bytes, as one of the processes counts and sees them."""

    def __init__(self, rows: Sequence[memoryview] | None = None, number: int = 0) -> None:
        """Count in the row with this number; without any rows, this process is alone."""
        self._rows = rows or [memoryview(bytearray(_ROW_LENGTH * _COUNT_BYTES)).cast("q")]
        self._own = self._rows[number]
        self.is_shared = len(self._rows) > 1

    @property
    def total(self) -> int:
        """The bytes of all owners in all processes."""
        return sum([row[_NUM_OWNERS] for row in self._rows])

    def of(self, owner: int) -> int:
        """Return the bytes of one owner in all processes."""
        return sum([row[owner] for row in self._rows])

    def add(self, owner: int, num_bytes: int) -> None:
        """Count more bytes of an owner, or fewer."""
        self._own[owner] += num_bytes
        self._own[_NUM_OWNERS] += num_bytes

    def greatest(self) -> int:
        """Return the owner that has the most."""
        sums = [sum(counts) for counts in zip(*self._rows, strict=True)]
        return max(range(_NUM_OWNERS), key=sums.__getitem__)


def place_of(owner: str) -> int:
    """Return the place of an owner in each row; it is the same in every process."""
    return crc32(owner.encode()) % _NUM_OWNERS


def num_bytes_for(num_processes: int) -> int:
    """Return the size of the memory that counts all kinds of bytes for several processes."""
    return len(_KINDS) * num_processes * _ROW_LENGTH * _COUNT_BYTES


def held_bytes(memory: mmap | None, number: int) -> tuple[HeldBytes, HeldBytes]:
    """Return the counts of unfinished requests and of unread answers, for one process of several.

    Args:
        memory: Its size says how many processes there are; None: one.
        number: The number of this one.
    """
    if memory is None:
        return HeldBytes(), HeldBytes()
    unfinished, unread = (HeldBytes(rows, number) for rows in _rows_in(memory))
    return unfinished, unread


def clear(memory: mmap, number: int) -> None:
    """Subtract everything that a process has counted. It must have ended."""
    for rows in _rows_in(memory):
        rows[number][:] = memoryview(bytes(_ROW_LENGTH * _COUNT_BYTES)).cast("q")


def _rows_in(memory: mmap) -> list[list[memoryview]]:
    counts = memoryview(memory).cast("q")
    num = len(counts) // (len(_KINDS) * _ROW_LENGTH)
    rows = [counts[start : start + _ROW_LENGTH] for start in range(0, len(counts), _ROW_LENGTH)]
    return [rows[kind * num : (kind + 1) * num] for kind in range(len(_KINDS))]
