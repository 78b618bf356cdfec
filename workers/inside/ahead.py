"""Main loop of a worker on an accelerator: several batches are under way at once.

Two threads receive and prepare batches, each on a stream of its own. The main thread launches them
in the order of their arrival, two at a time, and answers each as soon as its outputs are there. So
the device has work while one batch is prepared, the next one too, and a third is rendered.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from threading import Event
from typing import Any

import torch

from inferpool.workers.inside.compute import Computer
from inferpool.workers.inside.pools import started_pool
from inferpool.workers.inside.preparing import Prepared
from inferpool.workers.inside.process import BEAT_S, WorkerLoop

_MOST_LAUNCHED = 2
"""Batches that the device may have at once. One that fails is computed anew behind the other."""
_FIRST_SHARE = 0.25
"""Part of its launch's time that a batch gets to be over before the next one is launched."""


class LaunchedBatch:
    """A batch that was launched on the device. Used by the worker's main thread."""

    def __init__(
        self,
        prepared: Prepared,
        computer: Computer,
        waiting: Executor,
        on_over: Callable[[object], None],
    ) -> None:
        """Launch a batch.

        Args:
            prepared: The batch.
            computer: Launches it.
            waiting: Has a thread that waits for the device.
            on_over: Called in that thread once the device is done with it.

        Raises:
            torch.AcceleratorError: The device's context is lost.
        """
        self.prepared = prepared
        began = time.monotonic()
        computer.launch(prepared)
        now = time.monotonic()
        self.is_whole = all(group.launch is not None for group in prepared.groups)
        """Nothing of it is left to compute, unless it fails."""
        self.first_until = now + _FIRST_SHARE * (now - began)
        """Until then the next batch waits. If the model waits for the device itself, or launches
        slower than the device computes, this one is over soon, and is answered first."""
        self._over = waiting.submit(computer.wait, prepared)
        self._over.add_done_callback(on_over)

    @property
    def is_over(self) -> bool:
        """The device is done with it."""
        return self._over.done()

    def wait(self) -> None:
        """Wait until the device is done with it.

        There is no timeout: the front end ends a worker if its batch takes too long.
        """
        self._over.result()


class AheadLoop(WorkerLoop):
    """Loop of a worker whose model runs ahead of its device."""

    num_receiving = 2

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._waiting = started_pool(1, "device")
        self._coming: deque[Future[Prepared | None]] = deque()
        """Batches that are received and prepared, in the order of their arrival."""
        self._launched: deque[LaunchedBatch] = deque()
        self._has_news = Event()
        """Set when a batch has been prepared, or is over."""
        self._last_taken = Event()
        """Set once the last of those that are coming has been taken from the queue."""
        self._last_taken.set()
        self._has_ended = False
        """The sentinel has arrived."""

    def run(self) -> None:
        """Answer batches in the order of their arrival, until the sentinel."""
        coming, launched = self._coming, self._launched
        with torch.inference_mode():
            while True:
                if launched and launched[0].is_over:
                    self._answer_launched()
                    continue
                if coming or launched:
                    if (wait_s := self._next_in_s()) > 0:
                        self._wait(min(wait_s, BEAT_S))
                        continue
                    prepared = coming.popleft().result()
                else:
                    prepared = self._receive_here()
                if prepared is None:
                    break
                self._begin(prepared)
                del prepared  # it is answered, and freed, while this waits for others
            while launched:
                self._answer_launched()

    def _next_in_s(self) -> float:
        """Return the seconds until the next batch may be launched; infinite until an event."""
        if not (self._coming and self._coming[0].done()):
            return math.inf
        if not self._launched:
            return 0.0
        newest = self._launched[-1]
        if len(self._launched) >= _MOST_LAUNCHED or not newest.is_whole:
            return math.inf
        return newest.first_until - time.monotonic()

    def _wait(self, timeout_s: float) -> None:
        """Wait for an event; beat if there is none while the device has no batch."""
        if not self._has_news.wait(timeout_s) and not self._launched:
            self._heartbeat.beat()
            self._spare_memory.idle(time.monotonic())
        self._has_news.clear()  # what happens from now on sets it again

    def _wake(self, _: object) -> None:
        self._has_news.set()

    def _begin(self, prepared: Prepared) -> None:
        """Launch a batch; or answer it at once, if batches are too short to overlap."""
        if self._overlaps(prepared):
            while len(self._coming) < self.num_receiving:
                self._receive_next()
            batch = LaunchedBatch(prepared, self._computer, self._waiting, self._wake)
            self._launched.append(batch)
            return
        while self._launched:
            self._answer_launched()
        self._answer_now(prepared)

    def _receive_next(self) -> None:
        before, self._last_taken = self._last_taken, Event()
        coming = self._ahead.submit(self._receive_after, before, self._last_taken)
        coming.add_done_callback(self._wake)
        self._coming.append(coming)

    def _receive_after(self, before: Event, taken: Event) -> Prepared | None:
        """Receive and prepare a batch, once the one before has been taken from the queue."""
        before.wait()
        with torch.inference_mode():
            try:
                batch = None if self._has_ended else self._batches.take()
                self._has_ended = batch is None
            finally:
                taken.set()
            return batch and self._batches.prepare(batch)

    def _answer_launched(self) -> None:
        """Answer the oldest batch that was launched."""
        batch = self._launched.popleft()
        batch.wait()
        self._answer_now(batch.prepared)
