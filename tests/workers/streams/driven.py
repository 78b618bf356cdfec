"""Drives the loop of a worker that streams, in a thread, by the messages that it would be sent."""

import json
import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from mmap import mmap
from typing import Any

from inferpool.models.base import Model, load_model
from inferpool.models.border import checked
from inferpool.workers.inside.compute import Computer
from inferpool.workers.inside.process import BatchReceiver
from inferpool.workers.shared.heartbeat import Heartbeat
from inferpool.workers.shared.messages import (
    Batch,
    BatchDone,
    Drop,
    ItemError,
    ItemRef,
    StreamParts,
)
from inferpool.workers.streams.worker_side import StreamLoop
from tests.models.items import CPU

_WAIT_S = 60.0


class Inbox:
    """An inbox that a test fills."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Batch | Drop | None] = queue.SimpleQueue()
        self.put = self._messages.put
        self.get = self._messages.get

    def wait(self, timeout_s: float) -> bool:
        raise AssertionError("a loop for streams reads without looking first")


class DrivenLoop:
    """A loop in a thread of this process, and what it has sent."""

    def __init__(self, model: Model) -> None:
        load_model(checked(model), CPU)
        self.model = model
        self.arena = memoryview(bytearray(1 << 20))
        self._used = 0
        self._ids = 0
        self.inbox = Inbox()
        self._told = threading.Condition()
        self.steps: list[list[tuple[int, int]]] = []
        """Streams with parts, of each message."""
        self.parts: dict[tuple[int, int], list[Any]] = defaultdict(list)
        """Parts of each stream, by its batch and its place there."""
        self.ends: dict[tuple[int, int], ItemError | None] = {}
        self.done: dict[int, BatchDone] = {}
        self.heartbeat = Heartbeat(mmap(-1, 4096))
        computer = Computer(model, num_threads=1)
        computer.use_sample(None, None)
        receiver = BatchReceiver(computer, self.inbox, self.arena, self.heartbeat)  # type: ignore[arg-type]  # it has what is used
        self.loop = StreamLoop(computer, receiver, self, self.heartbeat, None)  # type: ignore[arg-type]  # the same
        self.computer = computer
        self.thread = threading.Thread(target=self.loop.serve, daemon=True)

    def put(self, message: object) -> None:
        """Receive a message of the loop."""
        with self._told:
            match message:
                case StreamParts():
                    self.steps.append([(part.id, part.index) for part in message.parts])
                    for part in message.parts:
                        key = part.id, part.index
                        assert key not in self.ends, "nothing comes after the end"
                        assert part.id not in self.done
                        if isinstance(part.value, bytes):
                            self.parts[key].append(json.loads(part.value))
                        else:
                            self.ends[key] = part.value
                case BatchDone():
                    assert message.id not in self.done
                    self.done[message.id] = message
            self._told.notify_all()

    def give(self, *values: object, timeout_s: float = math.inf, parameters: bytes = b"") -> int:
        """Send a batch, and return its id."""
        items = []
        for value in values:
            body = json.dumps(value).encode()
            self.arena[self._used : self._used + len(body)] = body
            deadline = time.monotonic() + timeout_s
            items.append(ItemRef("json", self._used, len(body), deadline, parameters=parameters))
            self._used += len(body)
        self._ids += 1
        self.inbox.put(Batch(self._ids, items))
        return self._ids

    def drop(self, id: int, *rows: int) -> None:
        """Drop streams of a batch."""
        self.inbox.put(Drop(id, [*rows]))

    def until(self, claim: Callable[[], object]) -> None:
        """Wait until something is true."""
        deadline = time.monotonic() + _WAIT_S
        with self._told:
            while not claim():
                assert time.monotonic() < deadline, (self.parts, self.ends, self.done)
                self._told.wait(0.01)  # not all that is awaited is told

    def answer(self, id: int) -> list[tuple[list[Any], str]]:
        """Wait for the end of a batch; return the parts and the error's code of each stream."""
        self.until(lambda: id in self.done)
        num = len(self.done[id].outcomes)
        assert self.done[id].outcomes == [b""] * num
        return [(self.parts[id, row], code_of(self.ends.get((id, row)))) for row in range(num)]

    def leave(self) -> None:
        """Send the sentinel, and wait for the end of the loop."""
        self.inbox.put(None)
        self.thread.join(_WAIT_S)
        assert not self.thread.is_alive()


def code_of(end: ItemError | None) -> str:
    return end.code if end is not None else ""


@contextmanager
def driven(model: Model) -> Iterator[DrivenLoop]:
    """Run the loop of a model in a thread; at the end it must leave."""
    loop = DrivenLoop(model)
    loop.thread.start()
    yield loop
    loop.leave()


def counted(n: int, parts: int, **more: object) -> Mapping[str, object]:
    """Return an instance for a `CountingStream`."""
    return {"n": n, "parts": parts, **more}
