"""How long a worker takes for a batch of each size, learned from those that it has answered.

Pure: the dispatcher tells it what it has measured. A note costs a microsecond, once per batch.
"""

from bisect import bisect_left

_LEVEL_WEIGHT = 0.1
"""Of the newest batch in how slow the worker is now, whatever the size."""
_SHAPE_WEIGHT = 0.02
"""Of the newest batch of a size in how that size compares with others, once there were many."""
_MOST_UP, _MOST_DOWN = 3.0, 0.25
"""A batch tells no more than so many times what was expected: the next may not have its bad luck,
and a worker that has become slower for good is believed within a dozen batches."""
_UNKNOWN_FIXED = 0.5
"""Of the time of the only size that was seen, what is taken to be the same for all sizes."""
_REDRAWN_AFTER = 32
"""Batches, or fewer after a size is new; until then the curve is moved up and down as a whole."""
_FORGOTTEN_AFTER = 1024
"""Batches; a size that was not used for longer may be tried again."""


class CostCurve:
    """Seconds by batch size: a level, which moves fast, times a shape, which moves slowly.

    So a worker that slows down (a busy host, larger inputs) is known to be slow at the sizes that
    it is not given at the moment, too. Between the sizes seen the shape is a straight line, and it
    never falls: where it did, neighbours are averaged (pool adjacent violators; Ayer et al., "An
    empirical distribution function for sampling with incomplete information", 1955).
    """

    def __init__(self) -> None:
        self._level = 1.0
        self._seen: dict[int, _Seen] = {}
        self._num_notes = 0
        self._redraw_at = 0
        self._redraw_after = 1
        self._sizes: list[float] = []
        self._times_s: list[float] = []
        """The corners of the shape; the last two add what lies beyond."""

    @property
    def is_known(self) -> bool:
        """A batch has been noted."""
        return bool(self._seen)

    def note(self, size: int, took_s: float) -> None:
        """A batch took this long."""
        self._num_notes += 1
        seen = self._seen.get(_class_of(size))
        if seen is None:
            self._add(size, took_s)
            return
        ratio = took_s / (self._level * seen.time_s) if seen.time_s else 1.0
        ratio = _MOST_UP if ratio > _MOST_UP else _MOST_DOWN if ratio < _MOST_DOWN else ratio
        seen.num += 1
        weight = max(1 / seen.num, _SHAPE_WEIGHT)
        seen.size += weight * (size - seen.size)
        seen.time_s *= 1 + weight * (ratio - 1)
        seen.noted_at = self._num_notes
        self._level *= 1 + _LEVEL_WEIGHT * (ratio - 1)

    def time_s(self, size: int) -> float:
        """What a batch of that size will probably take; 0 if nothing is known."""
        if self._num_notes >= self._redraw_at:
            self._redraw()
        sizes, times_s = self._sizes, self._times_s
        if not sizes:
            return 0.0
        right = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        left = right - 1
        slope = (times_s[right] - times_s[left]) / (sizes[right] - sizes[left])
        return self._level * (times_s[left] + slope * (size - sizes[left]))

    def size_within(self, limit_s: float, most: int) -> int:
        """The largest size up to `most` that will probably not take longer; 0 if there is none."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.time_s(middle) <= limit_s:
                low = middle
            else:
                high = middle - 1
        return low

    def _add(self, size: int, took_s: float) -> None:
        """Begin with a size. Its first batch may have been slow by chance, or the first of all."""
        if self._seen:
            largest = max(self._seen.values(), key=lambda each: each.size)
            share = min(size, largest.size)
            in_proportion_s = self.time_s(round(share)) * size / share
            took_s = min(took_s, _MOST_UP * in_proportion_s)
        self._seen[_class_of(size)] = _Seen(size, took_s / self._level, self._num_notes)
        self._redraw_at, self._redraw_after = 0, 1

    def _redraw(self) -> None:
        self._redraw_at = self._num_notes + self._redraw_after
        self._redraw_after = min(2 * self._redraw_after, _REDRAWN_AFTER)
        oldest = self._num_notes - _FORGOTTEN_AFTER
        self._seen = {key: each for key, each in self._seen.items() if each.noted_at > oldest}
        blocks: list[_Block] = []
        for each in sorted(self._seen.values(), key=lambda each: each.size):
            blocks.append(_Block([each.size], each.time_s, min(each.num, 1 / _SHAPE_WEIGHT)))
            while len(blocks) > 1 and blocks[-2].time_s > blocks[-1].time_s:
                last = blocks.pop()
                blocks[-1].take(last)
        self._sizes = [size for block in blocks for size in block.sizes]
        self._times_s = [block.time_s for block in blocks for _ in block.sizes]
        if self._sizes:
            self._extend()

    def _extend(self) -> None:
        """Say what lies beyond the sizes seen: a straight line through the smallest and largest."""
        sizes, times_s = self._sizes, self._times_s
        slope = (1 - _UNKNOWN_FIXED) * times_s[-1] / sizes[-1]
        if len(sizes) > 1:
            slope = (times_s[-1] - times_s[0]) / (sizes[-1] - sizes[0])
        times_s.insert(0, max(0.0, times_s[0] - slope * sizes[0]))
        sizes.insert(0, 0.0)
        times_s.append(times_s[-1] + slope)
        sizes.append(sizes[-1] + 1)


class BatchCosts:
    """What the batches of one worker take: of one that was idle, and of one that was at work.

    The former includes their preparation, which the latter has done meanwhile, as far as it went.
    """

    def __init__(self) -> None:
        self._idle = CostCurve()
        self._ahead = CostCurve()

    def curve(self, *, is_idle: bool) -> CostCurve:
        """From the moment when it is sent, if the worker is idle, or else from when its turn comes.

        Where one of the two has not been seen yet, it is the other.
        """
        own, other = (self._idle, self._ahead) if is_idle else (self._ahead, self._idle)
        return own if own.is_known or not other.is_known else other

    def time_s(self, size: int, *, is_idle: bool) -> float:
        """What a batch of that size will probably take; 0 if nothing is known."""
        return self.curve(is_idle=is_idle).time_s(size)

    def note(self, size: int, took_s: float, *, was_idle: bool) -> None:
        """A batch took this long."""
        (self._idle if was_idle else self._ahead).note(size, took_s)


class _Seen:
    """Batches of about one size."""

    __slots__ = ("noted_at", "num", "size", "time_s")

    def __init__(self, size: float, time_s: float, noted_at: int) -> None:
        self.size = size
        self.time_s = time_s
        self.num = 1
        self.noted_at = noted_at


class _Block:
    """Neighbouring sizes that take the same time."""

    def __init__(self, sizes: list[float], time_s: float, weight: float) -> None:
        self.sizes = sizes
        self.time_s = time_s
        self.weight = weight

    def take(self, other: "_Block") -> None:
        """Become one with the next block."""
        weight = self.weight + other.weight
        self.time_s = (self.time_s * self.weight + other.time_s * other.weight) / weight
        self.weight = weight
        self.sizes += other.sizes


def _class_of(size: int) -> int:
    """Sizes above 8 are the same if they have the first three binary digits in common."""
    shift = max(0, size.bit_length() - 3)
    return size >> shift << shift
