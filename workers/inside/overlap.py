"""Several batches under way at once, so that all stages of a pipeline are busy. Worker processes.

Each batch is computed in a thread. What a model's author writes need not be safe in threads: one
thread has the *turn*, and runs the model's code (`forward`, `postprocess`, `render_batch`) or this
package's, until its batch is answered. Only while a call of the network is on its way through the
stages does it give the turn to another. So between two batches nothing is shared but what `forward`
keeps on the model across its call of the network. The time of a batch is its own: its clock stands
still while it waits for the turn, or for others that are in the stages before it.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from inferpool.models.split.turnstile import BatchClock, FairLock
from inferpool.workers.inside.compute import Prepared
from inferpool.workers.inside.pools import started_pool


class ModelTurn:
    """Whose turn it is to run the model's code, and what each batch has taken of its own."""

    def __init__(self, tell: Callable[[float], None]) -> None:
        """Nobody has it.

        Args:
            tell: Is told since when the batch has been at work that has taken longest of its own;
                while no clock runs, since when none does.
        """
        self._lock = FairLock()
        self._owner: int | None = None
        self._own_time = BatchClock()
        """Of who has it."""
        self._tell = tell
        self._telling = threading.Lock()
        self._clocks: dict[int, float] = {}
        """By thread, since when those have run that run now."""

    @contextmanager
    def had(self) -> Iterator[BatchClock]:
        """Wait for it, and have it for a batch, whose time begins then."""
        self._take()
        self._own_time = own_time = BatchClock(partial(self._show, threading.get_ident()))
        try:
            yield own_time
        finally:
            own_time.end()
            self._pass_on()

    @contextmanager
    def given_up(self) -> Iterator[BatchClock]:
        """Let others have it meanwhile; does nothing in a thread that has not got it."""
        if self._owner != threading.get_ident():
            yield BatchClock()
            return
        own_time = self._own_time
        self._pass_on()
        try:
            yield own_time
        finally:
            with own_time.stopped():
                self._take()
            self._own_time = own_time

    def progressed(self) -> None:
        """The next part of the batch begins that has it."""
        self._own_time.progressed()

    def _take(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()

    def _pass_on(self) -> None:
        self._owner = None
        self._lock.release()

    def _show(self, thread: int, since: float) -> None:
        """See `BatchClock`."""
        with self._telling:
            if since == math.inf:
                self._clocks.pop(thread, None)
            else:
                self._clocks[thread] = since
            self._tell(min(self._clocks.values(), default=time.monotonic()))


class Overlap:
    """The batches that are under way. Used by the worker's main thread."""

    def __init__(
        self,
        num_at_once: int,
        turn: ModelTurn,
        answer: Callable[[Prepared, BatchClock], None],
    ) -> None:
        """Start the threads.

        Args:
            num_at_once: How many there may be.
            turn: Had by whoever answers.
            answer: Computes a batch and answers it.
        """
        self._num_at_once = num_at_once
        self._turn = turn
        self._answer = answer
        self._pool = started_pool(num_at_once, "compute")
        self._under_way: set[Future[bool]] = set()
        """Of each, in the end, whether it was more than a canary."""

    def __len__(self) -> int:
        """How many there are."""
        return len(self._under_way)

    @property
    def is_full(self) -> bool:
        """There may be no more."""
        return len(self._under_way) >= self._num_at_once

    def begin(self, prepared: Prepared) -> None:
        """Have one more computed."""
        assert not self.is_full
        self._under_way.add(self._pool.submit(self._compute, prepared))

    def wait(self, coming: "Future[Prepared | None] | None", timeout_s: float) -> bool:
        """Wait until one of them is answered, or until another is there that could be begun.

        Returns:
            Whether one was answered that was no canary.

        Raises:
            BaseException: What computing one of them has raised: this process cannot go on.
        """
        awaited: set[Future[Any]] = {*self._under_way}
        if coming is not None and not self.is_full:
            awaited.add(coming)
        wait(awaited, timeout_s, FIRST_COMPLETED)
        done = {each for each in self._under_way if each.done()}
        self._under_way -= done
        answered = [each.result() for each in done]  # of each, for what it may raise
        return any(answered)

    def _compute(self, prepared: Prepared) -> bool:
        with torch.inference_mode(), self._turn.had() as own_time:
            self._answer(prepared, own_time)
        return not prepared.is_canary
