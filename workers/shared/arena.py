"""The arena: shared memory. The front end writes each payload there once, and workers read it.

It is a buddy allocator (Knowlton, "A fast storage allocator", CACM 8(10), 1965) over one region. A
short list of recently freed blocks per size avoids splits and merges under a steady load. One event
loop uses an allocator; workers only get offsets. If several processes accept calls, each has a part
of the region with its own allocator.
"""

import mmap
from collections import defaultdict
from collections.abc import Callable, Sequence

from inferpool.workers.shared.memory import SharedMemory

MIN_BLOCK_BYTES = 1024
"""Alignment of slots, which is enough for every dtype and for vector loads."""
_OPEN_SHARE = 0.25
"""The part that slots of unfinished payloads may have, so that slow clients cannot hold it all."""
_MAX_RECENT = 64
"""Freed blocks of one size that are kept for the next request of that size."""


class Slots:
    """Allocator of slots in a part of the arena; sizes are powers of two from 1 KiB."""

    def __init__(self, memory: mmap.mmap, start: int, num_bytes: int) -> None:
        """Begin with a part that is completely free.

        Args:
            memory: The arena, mapped for writing.
            start: Offset of the part, a multiple of 1 KiB.
            num_bytes: Length of the part, a multiple of 1 KiB.
        """
        self.num_bytes = num_bytes
        self.used_bytes = 0
        """Bytes in use, including rounding."""
        self.open_bytes = 0
        """Those of them in slots whose payloads are still to come."""
        self.open_slots: dict[OpenSlot, None] = {}
        """These slots, the oldest first."""
        self.used_by: defaultdict[int, int] = defaultdict(int)
        """The same by caller, where callers are told apart."""
        self._callers: dict[int, int] = {}
        """Callers by the offsets of their slots, where they are told apart."""
        self._map = memory
        self._orders: dict[int, int] = {}
        self._begin(start, num_bytes)

    def _begin(self, start: int, num_bytes: int) -> None:
        """Divide a part that is completely free into blocks."""
        self._start = start
        num_orders = (num_bytes // MIN_BLOCK_BYTES).bit_length()
        self._free: list[set[int]] = [set() for _ in range(num_orders)]
        self._recent: list[list[int]] = [[] for _ in range(num_orders)]
        offset, end = start, start + num_bytes
        for order in reversed(range(num_orders)):
            if end - offset >= MIN_BLOCK_BYTES << order:
                self._free[order].add(offset)
                offset += MIN_BLOCK_BYTES << order

    def can_hold(self, num_bytes: int) -> bool:
        """Return whether there is room for a payload of this size, while nothing else is there."""
        return _order_of(num_bytes) < len(self._recent)

    def put(
        self, chunks: Sequence[bytes | bytearray | memoryview], num_bytes: int, caller: int = 0
    ) -> int | None:
        """Copy a payload into a new slot. Open ones are given up if there is no other room.

        Args:
            chunks: The payload in pieces.
            num_bytes: Their total length.
            caller: The caller to count the slot for; 0 for none.

        Returns:
            The slot's offset, or None if no slot of that size is free.
        """
        offset = self._allocate(num_bytes, caller)
        while offset is None and self.open_slots:
            next(iter(self.open_slots)).give_up()
            offset = self._allocate(num_bytes, caller)
        if offset is None:
            return None
        position = offset
        for chunk in chunks:
            end = position + len(chunk)
            self._map[position:end] = chunk
            position = end
        return offset

    def open(
        self, num_bytes: int, give_up: Callable[[], None], caller: int = 0, share: float = 1.0
    ) -> "OpenSlot | None":
        """Allocate a slot for a payload that is still to come.

        Args:
            num_bytes: Its length.
            give_up: Closes the slot, and keeps what has come elsewhere; a whole payload needs it.
            caller: The caller to count the slot for; 0 for none.
            share: The caller's part of what other callers leave.

        Returns:
            The slot; None if there is no room, or open slots have their part, or the caller has its
            share. Then the payload should wait elsewhere until it is whole.
        """
        size = slot_bytes(num_bytes)
        if self.open_bytes + size > _OPEN_SHARE * self.num_bytes:
            return None
        own = self.used_by[caller] if caller else 0
        if own and own + size > share * (self.num_bytes - self.used_bytes + own):
            return None
        offset = self._allocate(num_bytes, caller)
        if offset is None:
            return None
        slot = OpenSlot(self, offset, memoryview(self._map)[offset : offset + num_bytes], give_up)
        self.open_bytes += size
        self.open_slots[slot] = None
        return slot

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return a copy of the content of a slot."""
        return self._map[offset : offset + num_bytes]

    def free(self, offset: int) -> None:
        """Free a slot. No worker may read it any more."""
        order = self._orders.pop(offset)
        self.used_bytes -= MIN_BLOCK_BYTES << order
        if self._callers and (caller := self._callers.pop(offset, 0)):
            self.used_by[caller] -= MIN_BLOCK_BYTES << order
        recent = self._recent[order]
        if len(recent) < _MAX_RECENT:
            recent.append(offset)
        else:
            self._merge(offset, order)

    def reserve(self, offset: int, num_bytes: int) -> None:
        """Reserve a slot that an earlier allocator of this part gave out and that is in use."""
        order = _order_of(num_bytes)
        for larger in range(order, len(self._free)):
            size = MIN_BLOCK_BYTES << larger
            block = offset - (offset - self._start) % size
            if block in self._free[larger]:
                self._free[larger].remove(block)
                while larger > order:
                    larger -= 1
                    half = block + (MIN_BLOCK_BYTES << larger)
                    self._free[larger].add(block if offset >= half else half)
                    block = half if offset >= half else block
                break
        else:
            raise AssertionError(f"the slot at {offset} is in use or in another part")
        self._orders[offset] = order
        self.used_bytes += MIN_BLOCK_BYTES << order

    def _allocate(self, num_bytes: int, caller: int) -> int | None:
        """Take a slot, and return its offset; None if no slot of that size is free."""
        order = ((num_bytes - 1) >> 10).bit_length() if num_bytes else 0  # inlined `_order_of`
        if order >= len(self._recent):
            return None
        recent = self._recent[order]
        offset = recent.pop() if recent else self._take(order)
        if offset is None:
            return None
        self._orders[offset] = order
        self.used_bytes += MIN_BLOCK_BYTES << order
        if caller:
            self._callers[offset] = caller
            self.used_by[caller] += MIN_BLOCK_BYTES << order
        return offset

    def _take(self, order: int) -> int | None:
        """Split a free block down to this order; merge the recent blocks first if needed."""
        offset = self._split(order)
        if offset is None and any(self._recent):
            for recent_order, recent in enumerate(self._recent):
                while recent:
                    self._merge(recent.pop(), recent_order)
            offset = self._split(order)
        return offset

    def _split(self, order: int) -> int | None:
        free = self._free
        for larger in range(order, len(free)):
            if free[larger]:
                offset = free[larger].pop()
                while larger > order:
                    larger -= 1
                    free[larger].add(offset + (MIN_BLOCK_BYTES << larger))
                return offset
        return None

    def _merge(self, offset: int, order: int) -> None:
        free = self._free
        while order + 1 < len(free):
            buddy = self._start + ((offset - self._start) ^ (MIN_BLOCK_BYTES << order))
            if buddy not in free[order]:
                break
            free[order].remove(buddy)
            offset = min(offset, buddy)
            order += 1
        free[order].add(offset)


class OpenSlot:
    """A slot for a payload that is still to come, and its memory."""

    __slots__ = ("give_up", "is_handed_on", "offset", "slots", "view")

    def __init__(
        self, slots: Slots, offset: int, view: memoryview, give_up: Callable[[], None]
    ) -> None:
        self.slots = slots
        """The allocator that it is from."""
        self.offset = offset
        self.view = view
        self.give_up = give_up
        self.is_handed_on = False
        """The payload is whole, and somebody else frees the slot."""

    def close(self) -> None:
        """Count it as any other if it is handed on; else free it."""
        self.slots.open_bytes -= slot_bytes(len(self.view))
        del self.slots.open_slots[self]
        self.view.release()
        if not self.is_handed_on:
            self.slots.free(self.offset)


class Arena(Slots):
    """Allocator of the whole arena, and owner of its memory."""

    def __init__(self, num_bytes: int) -> None:
        """Reserve the memory.

        Args:
            num_bytes: Size, which is rounded up to whole blocks.

        Raises:
            SharedMemoryError: There is too little memory.
        """
        num_bytes = -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        self.memory = SharedMemory(num_bytes, name="arena", writable=False)
        super().__init__(self.memory.map, 0, num_bytes)

    def give_away(self, num_parts: int, keep_bytes: int = 0) -> list[range]:
        """Divide the arena into equal parts for other allocators; this one keeps its end."""
        assert not self.used_bytes, "only an empty arena can be given away"
        kept = keep_bytes // MIN_BLOCK_BYTES * MIN_BLOCK_BYTES
        self._begin(self.num_bytes - kept, kept)
        size = (self.num_bytes - kept) // num_parts // MIN_BLOCK_BYTES * MIN_BLOCK_BYTES
        return [range(number * size, (number + 1) * size) for number in range(num_parts)]

    def close(self) -> None:
        """Unmap the arena in this process."""
        self.memory.close()


def slot_bytes(num_bytes: int) -> int:
    """Return the bytes that a payload takes in an arena, including rounding."""
    return MIN_BLOCK_BYTES << _order_of(num_bytes)


def _order_of(num_bytes: int) -> int:
    return ((num_bytes - 1) >> 10).bit_length() if num_bytes else 0
