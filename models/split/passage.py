"""The order in which several calls are in a pipeline at once, each in a thread. On the lead."""

import threading
import time
from collections import deque

from inferpool.models.split.own_time import OwnTime


class FairLock:
    """A lock that is had in the order of asking, where `threading.Lock` is had by the quickest."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._is_held = False
        self._waiting: deque[threading.Lock] = deque()
        """One for each thread that waits, which waits for that to be released."""

    def acquire(self) -> None:
        """Wait until those that came before have had it."""
        with self._mutex:
            if not self._is_held:
                self._is_held = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        mine.acquire()

    def release(self) -> None:
        """Hand it to the next; any thread may."""
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_held = False


class Transit:
    """One call's way through the pipeline."""

    def __init__(self, before: "Transit | None", own_time: OwnTime) -> None:
        self._is_out = threading.Event()
        self.is_alone = before is None or before.is_out
        """No other was inside when it entered."""
        self._before = None if self.is_alone else before
        self._own_time = own_time
        self._behind_s = 0.0
        self._began = time.perf_counter()
        self._ended = 0.0

    @property
    def is_out(self) -> bool:
        """All that came of it is out."""
        return self._is_out.is_set()

    @property
    def seconds(self) -> float:
        """What it took, once it is out: from its entry, or from when the one before was out.

        So of calls that follow close on each other, each has the time that it took from the next.
        """
        return self._ended - self._began

    def wait_for_others(self) -> None:
        """Until those that entered before are out: what comes out next is this call's."""
        if self._before is not None:
            asked = time.perf_counter()
            with self._own_time.stopped():
                self._before._is_out.wait()
            self._behind_s += time.perf_counter() - asked
            self._began = max(self._began, self._before._ended)
            self._before = None

    def was_held_up(self, seconds: float) -> None:
        """What came out had to wait for so long: the stages had the calls before in their hands.

        In the rest of `wait_for_others`, one stage worked on this call and another on those.
        """
        self._own_time.take_back(max(0.0, self._behind_s - seconds))
        self._behind_s = 0.0

    def leave(self) -> None:
        """Let the next one have what comes out."""
        self.wait_for_others()  # of which it may have sent nothing that came back
        self._ended = time.perf_counter()
        self._is_out.set()


class Passage:
    """Lets calls in one after the other, and out in the same order."""

    def __init__(self) -> None:
        self._entrance = FairLock()
        self._last: Transit | None = None

    @property
    def is_empty(self) -> bool:
        """No call is inside."""
        return self._last is None or self._last.is_out

    def enter(self, own_time: OwnTime) -> Transit:
        """Wait until the call before has sent all that it has to send.

        Args:
            own_time: Of the batch that it is a call of.
        """
        with own_time.stopped():
            self._entrance.acquire()
        self._last = call = Transit(self._last, own_time)
        return call

    def let_next_in(self) -> None:
        """The call that entered last sends no more."""
        self._entrance.release()
