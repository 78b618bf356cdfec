"""Numbers the workers of one pool. Used by the event loop's thread alone."""

from itertools import count

_NUM_KEPT = 64
"""Hosts that are gone and whose numbers are kept for them."""


class SlotNumbers:
    """The numbers of the workers on each host. A host that comes back gets its own again."""

    def __init__(self) -> None:
        self._numbers: dict[str, list[int]] = {}
        self._absent: dict[str, None] = {}
        """Hosts that are gone, the one that has been away the longest first."""

    def take(self, host: str, num: int) -> list[int]:
        """Return the numbers of so many workers on a host: its own, then the lowest free ones."""
        self._absent.pop(host, None)
        own = self._numbers.setdefault(host, [])
        taken = {number for numbers in self._numbers.values() for number in numbers}
        free = (number for number in count() if number not in taken)
        own += [next(free) for _ in range(num - len(own))]
        return own[:num]

    def leave(self, host: str) -> None:
        """Keep the numbers of a host that is gone, as long as few others go after it."""
        if host not in self._numbers:
            return
        self._absent.pop(host, None)
        self._absent[host] = None
        if len(self._absent) > _NUM_KEPT:
            oldest = next(iter(self._absent))
            del self._absent[oldest], self._numbers[oldest]
