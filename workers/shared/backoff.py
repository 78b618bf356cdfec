"""Pauses between attempts at what keeps failing, such as a start or a connection."""

_MOST_DOUBLINGS = 64
"""No pause needs more, and a float holds the result."""


class Backoff:
    """Pauses that double from one attempt to the next.

    Args:
        first_s: Seconds of the first pause.
        most_s: Seconds of the longest.
    """

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._num_pauses = 0

    def pause_s(self, num_before: int) -> float:
        """Return the seconds of the pause that comes after a number of others."""
        return min(self._first_s * 2.0 ** min(num_before, _MOST_DOUBLINGS), self._most_s)

    def next_s(self) -> float:
        """Return the seconds of the next pause, and count it."""
        self._num_pauses += 1
        return self.pause_s(self._num_pauses - 1)

    def reset(self) -> None:
        """Begin with the first pause again, after a success."""
        self._num_pauses = 0
