"""`Decoders` whose only decoder is played by the test, by hand; its process only sleeps."""

import math
import mmap
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from torch import Tensor  # noqa: TC002  # as everywhere else

from inferpool.models.spec import TensorHeader
from inferpool.workers.decoders.ring import (
    DecoderReady,
    FromDecoder,
    NewDecoder,
    NewRing,
    RingLayout,
    SlotFilled,
    Task,
)
from inferpool.workers.decoders.worker_side import Decoders
from inferpool.workers.shared.messages import ItemRef
from inferpool.workers.shared.queues import Frames

DIGEST = b"d" * 16
TIMEOUT_S = 60.0
LAYOUT = RingLayout(num_decoders=2, num_slots=4, slot_bytes=64)


def refs(num: int, deadline: float = math.inf) -> list[ItemRef]:
    return [ItemRef("json", 0, 2, deadline) for _ in range(num)]


class ActedDecoder:
    """The other end of a connection."""

    def __init__(self, acted: "ActedHost", number: int) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self._number = number
        self._ring = acted.memory
        tasks_r, tasks_w = os.pipe()
        answers_r, answers_w = os.pipe()
        process_fd = os.pidfd_open(self.process.pid)
        self._tasks, self.answers = tasks_r, answers_w
        self._frames = Frames()
        acted.tell(NewDecoder(number, self.process.pid), [tasks_w, answers_r, process_fd])
        for fd in (tasks_w, answers_r, process_fd):
            os.close(fd)

    def say(self, message: FromDecoder) -> None:
        body = msgspec.msgpack.encode(message)
        self.write(len(body).to_bytes(4, "big") + body)

    def write(self, data: bytes) -> None:
        os.write(self.answers, data)

    def tasks(self) -> list[Task]:
        """Return the tasks that have come."""
        found: list[Task] = []
        while select.select([self._tasks], [], [], 0)[0]:
            frames = self._frames.feed(os.read(self._tasks, 1 << 16))
            found += [msgspec.msgpack.decode(frame, type=Task) for frame in frames]
        return found

    def begin(self, task: Task) -> None:
        self.say_begun(task.id)

    def say_begun(self, id: int) -> None:
        """Write to the ring which task it works on."""
        memoryview(self._ring).cast("Q")[self._number] = id

    def fill(self, task: Task, value: int) -> None:
        """Answer a task with a number and zeros."""
        begin = LAYOUT.offset_of(task.slot)
        self._ring[begin : begin + 8] = value.to_bytes(8, "little")
        self.say(SlotFilled(task.id, (TensorHeader("x", "int64", (8,), 0),)))

    def die(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.die()
        os.close(self._tasks)
        os.close(self.answers)


class ActedHost:
    """The front end's side of `Decoders`."""

    def __init__(self, *, has_ring: bool) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fd = os.memfd_create("ring")
        os.ftruncate(fd, LAYOUT.num_bytes)
        self.memory = mmap.mmap(fd, LAYOUT.num_bytes)
        self.rings: list[Tensor] = []
        self.decoders = Decoders(
            theirs, LAYOUT, DIGEST, task_timeout_s=TIMEOUT_S, on_ring=self.rings.append
        )
        self.tell(NewRing(LAYOUT.num_bytes), [fd] if has_ring else [])
        os.close(fd)
        self.acted: list[ActedDecoder] = []

    def tell(self, message: NewRing | NewDecoder, fds: list[int]) -> None:
        socket.send_fds(self._control, [msgspec.msgpack.encode(message)], fds)

    def close(self) -> None:
        for decoder in self.acted:
            decoder.close()
        self._control.close()
        self.decoders.begin(refs(0))

    def hire(self, digest: bytes = DIGEST) -> ActedDecoder:
        """Add a decoder that reports its start."""
        decoder = ActedDecoder(self, len(self.acted) % LAYOUT.num_decoders)
        self.acted.append(decoder)
        decoder.say(DecoderReady(digest))
        for _ in range(2):  # the decoder is added, then its start is read
            self.decoders.begin(refs(0))
        return decoder


@contextmanager
def acted_host(*, has_ring: bool = True) -> Iterator[ActedHost]:
    host = ActedHost(has_ring=has_ring)
    try:
        yield host
    finally:
        host.close()
