"""The part of the arena that a front writes to, as the main process keeps account of it."""

import mmap
from typing import TYPE_CHECKING

from workers.arena import slot_bytes
from workers.queues import FrameError

if TYPE_CHECKING:
    from collections.abc import Callable


class Part:
    """Knows which slots are in use, whichever life of the front gave them out.

    A front that dies leaves slots that workers read yet; its successor begins with those taken.
    """

    def __init__(self, memory: mmap.mmap, where: range) -> None:
        """Begin with all of it free.

        Args:
            memory: The arena.
            where: The part of it.
        """
        self.where = where
        self.held: dict[int, int] = {}
        """Offsets of the slots in use, and the lengths of their payloads."""
        self.on_freed: Callable[[int], None] | None = None
        """Told of each slot that comes back, while there is a front to be told."""
        self._memory = memoryview(memory)

    @property
    def used_bytes(self) -> int:
        """Of the slots in use, rounding included."""
        return sum(map(slot_bytes, self.held.values()))

    def take(self, offset: int, num_bytes: int) -> memoryview:
        """Note that a slot is in use, and show what lies in it.

        Raises:
            FrameError: There can be no such slot.
        """
        end = offset + num_bytes
        if offset < self.where.start or end > self.where.stop or offset in self.held:
            raise FrameError(f"a slot at {offset} that cannot be")
        self.held[offset] = num_bytes
        return self._memory[offset:end]

    def free(self, offset: int) -> None:
        """No worker reads this slot any more."""
        del self.held[offset]
        if self.on_freed is not None:
            self.on_freed(offset)

    def close(self) -> None:
        """Let go of the memory, so that it can be unmapped."""
        self._memory.release()
