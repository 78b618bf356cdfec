"""Order and clocks of the calls that are in a pipeline at once, each in a thread of the lead."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class BatchClock:
    """A batch's compute time, without its waits for other batches. Used by one thread."""

    def __init__(self, show: Callable[[float], None] = lambda since: None) -> None:
        """Start the clock.

        Args:
            show: Called at each change with the moment at which the clock would have started if it
                had never stopped, in seconds of CLOCK_MONOTONIC; infinity while it is stopped.
        """
        self.waited_s = 0.0
        """Seconds that it was stopped."""
        self._show = show
        self._since = time.monotonic()
        show(self._since)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock while the batch waits for another; the clock of that one runs."""
        began = time.monotonic()
        self._show(math.inf)
        try:
            yield
        finally:
            self._shift(time.monotonic() - began)

    def take_back(self, seconds: float) -> None:
        """Count some of the stopped time after all: the batch was computed meanwhile."""
        self._shift(-seconds)

    def progressed(self) -> None:
        """Start anew: the next part of the batch has all the time of a batch."""
        self._since = time.monotonic()
        self._show(self._since)

    def end(self) -> None:
        """Stop the clock for good."""
        self._show(math.inf)

    def _shift(self, seconds: float) -> None:
        self.waited_s += seconds
        self._since += seconds
        self._show(self._since)


class FairLock:
    """A lock that threads get in the order of asking; any thread may release it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_asked = 0
        self._num_released = 0

    def acquire(self) -> None:
        """Wait until all that asked before have released it."""
        with self._changed:
            ticket = self._num_asked
            self._num_asked += 1
            self._changed.wait_for(lambda: self._num_released == ticket)

    def release(self) -> None:
        """Hand it to the next thread."""
        with self._changed:
            self._num_released += 1
            self._changed.notify_all()


class PipelineCall:
    """One call on its way through the pipeline."""

    def __init__(self, before: "PipelineCall | None", clock: BatchClock) -> None:
        self._left = threading.Event()
        self.is_alone = before is None or before.has_left
        """No other call was inside when this one entered."""
        self._before = None if self.is_alone else before
        self._clock = clock
        self._behind_s = 0.0
        self._began = time.perf_counter()
        self._ended = 0.0

    @property
    def has_left(self) -> bool:
        """All results of this call are out of the pipeline."""
        return self._left.is_set()

    @property
    def seconds(self) -> float:
        """Time from its entry, or from when the call before it left, until it left."""
        return self._ended - self._began

    def wait_for_others(self) -> None:
        """Wait until the calls before have left: what comes out next belongs to this one."""
        if self._before is not None:
            asked = time.perf_counter()
            with self._clock.stopped():
                self._before._left.wait()
            self._behind_s += time.perf_counter() - asked
            self._began = max(self._began, self._before._ended)
            self._before = None

    def was_held_up(self, seconds: float) -> None:
        """Record for how long stages were busy with earlier calls while this one waited.

        In the rest of `wait_for_others` a stage computed this call, beside others.
        """
        self._clock.take_back(max(0.0, self._behind_s - seconds))
        self._behind_s = 0.0

    def leave(self) -> None:
        """Allow the next call to have what comes out."""
        self.wait_for_others()  # this call may have sent nothing, and so have received nothing
        self._ended = time.perf_counter()
        self._left.set()


class Turnstile:
    """Admits calls one after the other, and releases them in the same order."""

    def __init__(self) -> None:
        self._entrance = FairLock()
        self._last: PipelineCall | None = None

    @property
    def is_empty(self) -> bool:
        """No call is inside."""
        return self._last is None or self._last.has_left

    def enter(self, clock: BatchClock) -> PipelineCall:
        """Wait until the call before has sent all its pieces; the batch's clock stops meanwhile."""
        with clock.stopped():
            self._entrance.acquire()
        self._last = call = PipelineCall(self._last, clock)
        return call

    def let_next_in(self) -> None:
        """Open the entrance: the call that entered last sends no more."""
        self._entrance.release()
