"""The number of pieces to cut a batch into for a pipeline: found by measuring. On the lead.

With one piece each stage waits for the one before it; with many each piece costs its messages, and
small ones compute less efficiently. Which number is best depends on the network, on the devices and
on the batch, so several are tried in the service itself: the answers are the same. Once a number
takes clearly longer than a smaller one, larger numbers are not tried: where a stage reads its
weights as long for one row as for eight, eight pieces take eight times as long as one.
"""

import math
from dataclasses import dataclass, field

_NUMBERS = (1, 2, 4, 8, 16)
_NUM_TRIALS = 3
"""Trials of each number, before one is chosen; the first of them is not counted."""
_HOPELESS = 1.25
"""Times the best time so far: beyond it, larger numbers are not tried."""
_TRY_AGAIN = 100
"""Batches between looks at whether another number would be better by now."""
_WEIGHT = 0.2
"""Weight of a new measurement in the average."""


@dataclass(slots=True)
class _Measured:
    """Measurements of batches of about one size; both by the number of pieces."""

    num_calls: int = 0
    num_trials: dict[int, int] = field(default_factory=dict)
    row_s: dict[int, float] = field(default_factory=dict)


class MicroBatches:
    """Chooses the number of pieces for batches of each size."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Measured] = {}

    def choose(self, num_rows: int) -> int:
        """Return the number of pieces, a power of two, to cut a batch into."""
        size = self._sizes.setdefault(num_rows.bit_length(), _Measured())
        size.num_calls += 1
        choices = [n for n in _NUMBERS if n <= max(num_rows, 1)]
        least_s = math.inf
        for number in choices:
            if size.num_trials.get(number, 0) < _NUM_TRIALS:
                return number
            if size.row_s[number] > _HOPELESS * least_s:
                break
            least_s = min(least_s, size.row_s[number])
        best = min((n for n in choices if n in size.row_s), key=lambda number: size.row_s[number])
        near = [n for n in choices if n in (best // 2, best * 2)]
        if size.num_calls % _TRY_AGAIN or not near:
            return best
        return near[size.num_calls // _TRY_AGAIN % len(near)]

    def note(self, num_rows: int, num_pieces: int, seconds: float) -> None:
        """Record how long a batch took."""
        size = self._sizes[num_rows.bit_length()]
        num_trials = size.num_trials.get(num_pieces, 0) + 1
        size.num_trials[num_pieces] = num_trials
        row_s = seconds / max(num_rows, 1)
        known = size.row_s.get(num_pieces)
        if num_trials <= 2 or known is None:
            size.row_s[num_pieces] = row_s
        elif num_trials <= _NUM_TRIALS:
            size.row_s[num_pieces] = min(known, row_s)
        else:
            size.row_s[num_pieces] = known + _WEIGHT * (row_s - known)
