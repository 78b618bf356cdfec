"""Reads a worker's inbox, and prepares the streams that begin, beside the steps of others.

One thread reads, and never waits for anything else, so that a stream which nobody reads any more
soon ends. Others prepare. The thread that computes takes what they have left between two steps.
"""

import threading
import time
from queue import Empty, SimpleQueue

import torch

from inferpool.workers.inside.compute import Computer
from inferpool.workers.inside.pools import started_pool
from inferpool.workers.inside.preparing import Prepared
from inferpool.workers.inside.process import BatchReceiver
from inferpool.workers.shared.messages import Batch, Drop


class Arrivals:
    """Prepared batches, and orders to drop streams, in the order in which they are there."""

    def __init__(self, computer: Computer, receiver: BatchReceiver) -> None:
        self._receiver = receiver
        self._preparer = computer.preparer
        self._joins = computer.model.joins
        self._pool = started_pool(computer.preparer.num_threads if self._joins else 1, "receive")
        self._arrived: SimpleQueue[Prepared | Drop | BaseException | None] = SimpleQueue()
        self.preparing: set[int] = set()
        """Ids of the batches that have come, and were not returned by `next` yet."""
        self._has_sentinel = False

    def start(self) -> None:
        """Begin to read, also after the sentinel: streams may be dropped until all are over."""
        threading.Thread(target=self._read, name="read", daemon=True).start()

    @property
    def are_over(self) -> bool:
        """True if the sentinel has come, and all before it was returned."""
        return self._has_sentinel and not self.preparing

    def next(self, timeout_s: float) -> Prepared | Drop | None:
        """Return the next arrival; None if nothing comes in time, or for the sentinel.

        Raises:
            EOFError: The front end is gone.
            BaseException: A thread has failed; this process cannot go on.
        """
        try:
            arrived = self._arrived.get(block=timeout_s > 0, timeout=timeout_s or None)
        except Empty:
            return None
        if isinstance(arrived, BaseException):
            raise arrived
        if isinstance(arrived, Prepared):
            self.preparing.discard(arrived.id)
        return arrived

    def _read(self) -> None:
        try:
            while True:
                message = self._receiver.inbox.get()
                if isinstance(message, Batch):
                    self.preparing.add(message.id)
                    self._receiver.heartbeat.received(message.id)
                    self._pool.submit(self._prepare, message)
                    continue
                self._has_sentinel = self._has_sentinel or message is None
                self._arrived.put(message)
        except BaseException as error:
            self._arrived.put(error)

    def _prepare(self, batch: Batch) -> None:
        try:
            with torch.inference_mode():
                prepared = self._receiver.begin(batch)
                if not prepared.is_canary:
                    self._preprocess(prepared)
        except BaseException as error:
            self._arrived.put(error)
        else:
            self._arrived.put(prepared)

    def _preprocess(self, prepared: Prepared) -> None:
        """Prepare a batch; streams that join others are collated with those, when they do."""
        if not self._joins:
            self._preparer.prepare(prepared)
            return
        prepared.began = time.monotonic()
        self._preparer.preprocess_here(prepared, range(len(prepared.refs)))
        prepared.prepare_s = time.monotonic() - prepared.began
