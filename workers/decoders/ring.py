"""The ring and the messages between a worker and its decoders. Imports no torch.

The ring is shared memory for what the decoders of one worker make. It begins with one number for
each decoder: its present task, the only one to blame if the decoder dies. Then come equal slots,
one for each instance. The worker sends a slot's number with each task, and reuses the slot only
after the decoder's answer, or after its exit is confirmed.

Each decoder has two pipes of its own, with one writer and one reader each. Messages are msgpack,
and are decoded by type.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from inferpool.models.spec import TensorHeader
from inferpool.workers.shared.messages import ItemError, ItemRef

MAX_TASK_BYTES = 2048
"""Longest task. A pipe has room for all that a decoder may hold, so the worker never blocks."""
MAX_ANSWER_BYTES = 1 << 18
"""Longest message of a decoder; the longest texts of errors are a tenth of it."""
TASKS_AT_ONCE = 2
"""Tasks that a decoder may hold: one runs, and the next is ready, so that it never waits."""
MAX_RING_BYTES = 1 << 30
SLOT_ALIGNMENT = 64
"""A cache line, which is enough for vector loads."""


class Task(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Worker to decoder: prepare an instance, and write what comes out to a slot."""

    id: int
    slot: int
    ref: ItemRef


class DecoderReady(msgspec.Struct, frozen=True, array_like=True, tag="ready", gc=False):
    """Decoder to worker, first of all: what it makes of the model's samples."""

    digest: bytes


class SlotFilled(msgspec.Struct, frozen=True, array_like=True, tag="filled", gc=False):
    """Decoder to worker: the tensors of an instance are in its slot."""

    id: int
    headers: tuple[TensorHeader, ...]


class Settled(msgspec.Struct, frozen=True, array_like=True, tag="refused", gc=False):
    """Decoder to worker: the instance has this outcome, and goes into no batch."""

    id: int
    outcome: bytes | ItemError


class Unfit(msgspec.Struct, frozen=True, array_like=True, tag="unfit", gc=False):
    """Decoder to worker: what came out does not fit into a slot; prepare the instance yourself."""

    id: int


FromDecoder = DecoderReady | SlotFilled | Settled | Unfit


class DecodingPlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Worker to front end: decoders may prepare its instances, in slots of this size."""

    num_slots: int
    slot_bytes: int


class NewRing(msgspec.Struct, frozen=True, array_like=True, tag="ring", gc=False):
    """Front end to worker, with a descriptor of the ring."""

    num_bytes: int


class NewDecoder(msgspec.Struct, frozen=True, array_like=True, tag="decoder", gc=False):
    """Front end to worker: a decoder was started.

    It comes with three descriptors: the pipe for tasks, the pipe for answers, and the process.
    """

    number: int
    pid: int


ControlMessage = NewRing | NewDecoder
"""Messages to a worker through the socket that also carries descriptors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingLayout:
    """Places in a ring."""

    num_decoders: int
    """Decoders that may write to it."""
    num_slots: int
    slot_bytes: int

    @property
    def start(self) -> int:
        """Bytes before the first slot, which are whole pages."""
        return -(-8 * self.num_decoders // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def num_bytes(self) -> int:
        """Size of the ring."""
        return self.start + self.num_slots * self.slot_bytes

    def offset_of(self, slot: int) -> int:
        """Return where a slot begins."""
        return self.start + slot * self.slot_bytes


def laid_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where tensors of these sizes begin in a slot, and the bytes that they take.

    A single tensor takes no padding, so that those of neighbouring slots lie side by side.
    """
    offsets, end = [], 0
    for size in sizes:
        begin = -(-end // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        offsets.append(begin)
        end = begin + size
    return offsets, end


def is_short(ref: ItemRef) -> bool:
    """Return True if a task with this instance is surely not too long for a pipe."""
    return len(ref.parameters) + len(ref.request_id) + len(ref.trace) < MAX_TASK_BYTES - 200


class RingRuns:
    """Allocator of runs of slots that lie side by side. One thread uses it."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._next = 0
        self._taken: list[range] = []

    def take(self, num: int, *, or_less: bool = False) -> range | None:
        """Allocate free slots after the newest run, or from the start; None if neither is free.

        Runs go round in circles, since batches are answered in about the order of their arrival.

        Args:
            num: Length of the run.
            or_less: Take the longest one of these if both are shorter.
        """
        run = max((self._free_from(begin, num) for begin in (self._next, 0)), key=len)
        if len(run) < (1 if or_less else num):
            return None
        self._taken.append(run)
        self._next = run.stop
        return run

    def free(self, run: range) -> None:
        """Free a run that was allocated."""
        self._taken.remove(run)

    def _free_from(self, begin: int, num: int) -> range:
        ends = [max(begin, each.start) for each in self._taken if each.stop > begin]
        return range(begin, min([begin + num, self._num_slots, *ends]))
