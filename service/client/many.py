"""Bookkeeping of `predict_many` for both clients. No input or output."""

from collections import deque

from .errors import InferpoolError
from .options import ManyOptions, Progress, check_names
from .results import Prediction

Outcome = Prediction | InferpoolError

_MAX_AHEAD = 4
"""Results that may wait for an earlier one, as a multiple of the inputs that may run."""


class Window:
    """Limits how many inputs run and how many results wait. One thread or task uses it."""

    def __init__(self, options: ManyOptions, max_concurrency: int) -> None:
        check_names(options, ManyOptions)
        asked = options.get("max_concurrency", max_concurrency)
        if asked < 1:
            raise ValueError("max_concurrency must be at least 1")
        self.limit = min(asked, max_concurrency)
        self._is_ordered = options.get("is_ordered", True)
        self._on_progress = options.get("on_progress")
        self._ready: deque[Outcome] = deque()
        self._early: dict[int, Outcome] = {}
        """Results that wait for an earlier one."""
        self._next = 0
        self._num_started = 0
        self._num_done = 0
        self._num_failed = 0

    @property
    def has_room(self) -> bool:
        """True if another input may start."""
        running = self._num_started - self._num_done
        return running < self.limit and running + len(self._early) < self.limit * _MAX_AHEAD

    def start(self) -> int:
        """Count an input that starts; return its index."""
        self._num_started += 1
        return self._num_started - 1

    def finish(self, index: int, outcome: Outcome) -> None:
        """Store the result of an input."""
        self._num_done += 1
        self._num_failed += isinstance(outcome, InferpoolError)
        if self._is_ordered:
            self._early[index] = outcome
            while (early := self._early.pop(self._next, None)) is not None:
                self._ready.append(early)
                self._next += 1
        else:
            self._ready.append(outcome)
        if self._on_progress is not None:
            running = self._num_started - self._num_done
            self._on_progress(
                Progress(num_done=self._num_done, num_failed=self._num_failed, num_running=running)
            )

    def take(self, *, return_errors: bool) -> Outcome | None:
        """Return the next result to yield, or None if it is not there yet.

        Raises:
            InferpoolError: The next result is this error, and errors are not returned.
        """
        outcome = self._ready.popleft() if self._ready else None
        if isinstance(outcome, InferpoolError) and not return_errors:
            raise outcome
        return outcome
