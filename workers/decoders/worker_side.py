"""The worker's side of its decoders: sends them instances, and receives what they make.

One thread uses it: the one that prepares batches. Only `release` may be called by others.

The front end starts and replaces decoders, and sends the ends of their pipes through a socket. The
oldest task of a decoder runs, the others wait. If a decoder ends, or is killed because its task
takes too long, others get the tasks that it had not begun. A task that it had begun is tried once
more, and then fails alone. Without decoders the worker prepares everything itself.
"""

import contextlib
import logging
import mmap
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
import torch
from torch import Tensor

from inferpool.models.accelerator.failures import raised
from inferpool.models.base import Model
from inferpool.models.texts import described
from inferpool.models.warm_sizes import largest_batch
from inferpool.workers.decoders.connections import (
    DecoderConnection,
    DecoderJob,
    Decoding,
    Found,
    MoreWork,
)
from inferpool.workers.decoders.ring import (
    MAX_RING_BYTES,
    SLOT_ALIGNMENT,
    TASKS_AT_ONCE,
    ControlMessage,
    DecoderReady,
    DecodingPlan,
    FromDecoder,
    NewDecoder,
    NewRing,
    RingLayout,
    RingRuns,
    Settled,
    SlotFilled,
    Task,
    is_short,
)
from inferpool.workers.decoders.slots import decodable, digest_of, pin_ring, view_in
from inferpool.workers.inside.preparing import Prepared
from inferpool.workers.inside.process import BatchReceiver, PreparedBatches
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.messages import ItemError, ItemRef
from inferpool.workers.shared.queues import frame_of

logger = logging.getLogger(__name__)

MAX_DEATHS = 2
"""Decoders that an instance may kill."""
_MAX_UNBEGUN = 5
"""Decoders that may end before they report the begin of their oldest instance. After that many it
counts as begun: a broken decoder may have overwritten its report."""
_COMEBACK_S = 5.0
"""Seconds that all wait for a decoder, if the last one was killed by what it worked on."""
_EXIT_S = 5.0
"""Seconds that a decoder may take to exit after SIGKILL, before its slots count as lost."""
_LOOKS_PER_TIMEOUT = 8
"""Least number of looks at a decoder before it counts as hung."""
_LATE = 1.5
"""Planned pauses between two looks that count at most; more time was a pause of this process, or of
the whole host."""
_SHARE_OF_TIMEOUT = 0.5
"""Part of a batch's timeout after which a decoder counts as hung."""
_LEAST_TIMEOUT_S = 10.0
"""The least timeout of a batch if the settings have none: see `workers.host.local_worker`."""
_USUAL_BATCH = 64
"""Instances of a batch that there are slots for at least: on CPUs batches may grow to it."""
_READ_BYTES = 1 << 16
_CONTROL_BYTES = 1 << 10
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FromDecoder).decode
_decode_control = msgspec.msgpack.Decoder(ControlMessage).decode


class DecodedBatches:
    """Source of batches that decoders prepare, and begin with while others are finished."""

    def __init__(self, receiver: BatchReceiver, decoders: "Decoders") -> None:
        self._receiver = receiver
        self._preparer = receiver.computer.preparer
        self._decoders = decoders
        self._begun: deque[tuple[Prepared, Decoding | None] | None] = deque()
        """Batches that have arrived, and the sentinel."""
        self._more = MoreWork(receiver.inbox.fileno(), self._begin_next)

    def wait(self, timeout_s: float) -> bool:
        """Wait for a batch or the sentinel; return True if there is one."""
        return bool(self._begun) or self._receiver.wait(timeout_s)

    def prepare(self, batch: Prepared) -> Prepared:
        """Return a batch as it is: `take` prepares it, in the thread that uses the decoders."""
        return batch

    def take(self) -> Prepared | None:
        """Wait for a batch and prepare it; decoders begin with the next batches meanwhile."""
        if not self._begun:
            self._begin()
        begun = self._begun.popleft()
        if begun is None or begun[0].is_canary:
            return begun and begun[0]
        prepared, decoding = begun
        # There may be slots by now. If not for all, the threads prepare the others.
        decoding = decoding or self._decoders.begin(prepared.refs, in_part=True)
        if decoding is None:
            return self._preparer.prepare(prepared)
        prepared.release = decoding.release
        return self._preparer.prepare(prepared, partial(self._preprocess, decoding))

    def _begin_next(self) -> bool:
        """Begin with a batch if one has arrived; return whether one has."""
        has_arrived = not self._more.is_over and self._receiver.wait(0)
        if has_arrived:
            self._begin()
        return has_arrived

    def _begin(self) -> None:
        batch = self._receiver.take()
        if batch is None:
            self._more.is_over = True
            self._begun.append(None)
        else:
            decoding = None if batch.is_canary else self._decoders.begin(batch.refs)
            self._begun.append((batch, decoding))

    def _preprocess(self, decoding: Decoding, prepared: Prepared) -> None:
        self._preparer.preprocess(prepared, decoding.others)
        decoding.finish(self._more)
        decoded = decoding.store(prepared.features, prepared.outcomes)
        self._preparer.preprocess_here(prepared, decoded)
        self._preparer.preprocess(prepared, decoding.others)


class Decoders:
    """The decoders of this worker, in the thread that prepares."""

    def __init__(
        self,
        control: socket.socket,
        layout: RingLayout,
        digest: bytes,
        *,
        task_timeout_s: float,
        on_ring: Callable[[Tensor], None] = lambda _: None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Expect decoders on a socket.

        Args:
            control: Socket that announces the ring and each decoder.
            layout: Places in the ring.
            digest: Digest of what this worker makes of the model's samples: see `digest_of`.
            task_timeout_s: Seconds after which a decoder counts as hung.
            on_ring: Called with the whole ring, uint8 [bytes]; it may pin it.
            on_progress: Called when a decoder has died with tasks: to do these again takes time
                that the batch is not to blame for.
        """
        control.setblocking(False)
        self._control: socket.socket | None = control
        self._layout = layout
        self._digest = digest
        self._task_timeout_s = task_timeout_s
        self._look_s = min(1.0, task_timeout_s / _LOOKS_PER_TIMEOUT)
        self._looked_at = time.monotonic()
        self._on_ring = on_ring
        self._on_progress = on_progress
        self._slots: Tensor | None = None
        self._at_work_on: memoryview | None = None
        self._runs = RingRuns(layout.num_slots)
        self._connections: dict[int, DecoderConnection] = {}
        """Decoders by the descriptors of their answers and of their processes."""
        self._waiting: deque[DecoderJob] = deque()
        self.released: deque[Decoding] = deque()
        """Batches that are answered. Any thread may add to it."""
        self._next_id = 1
        self._comeback_due = 0.0
        """Time until which decoders are waited for if there is none: in here the instance, or one
        like it, would kill the worker."""
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    @property
    def plan(self) -> DecodingPlan:
        """The ring that it needs."""
        return DecodingPlan(self._layout.num_slots, self._layout.slot_bytes)

    @property
    def num_ready(self) -> int:
        """Decoders that accept tasks."""
        return sum(decoder.is_ready and not decoder.killed_at for decoder in self._living())

    def begin(self, refs: Sequence[ItemRef], in_part: bool = False) -> Decoding | None:
        """Send decoders what they can prepare of a batch; return None if that is nothing now.

        Args:
            refs: The batch.
            in_part: Give them the first instances if there are no slots for all.
        """
        self._attend(0)
        given = [i for i, ref in enumerate(refs) if ref.kind != "tensors" and is_short(ref)]
        if not given or not (self.num_ready or time.monotonic() < self._comeback_due):
            return None
        self._reclaim()
        run = self._runs.take(given[-1] + 1, or_less=in_part)
        if run is None:
            return None
        given = [i for i in given if i < len(run)]
        decoding = Decoding(refs, given, run, self.finish, self.released.append)
        self._waiting.extend(DecoderJob(decoding, index) for index in given)
        self._feed()
        return decoding

    def finish(self, decoding: Decoding, more: MoreWork | None) -> None:
        """Wait until a batch is done; `more` may begin with other batches meanwhile."""
        while not decoding.is_done:
            is_hungry = more is not None and not self._waiting and self._has_room()
            if more is None or not is_hungry or more.is_over:
                self._attend(self._patience_s())
            elif not more.begin():
                self._poll.register(more.fd, select.POLLIN)
                try:
                    self._attend(self._patience_s())
                finally:
                    self._poll.unregister(more.fd)

    def _attend(self, timeout_s: float) -> None:
        """Wait until something happens, and handle it."""
        has_control = False
        for fd, _ in self._poll.poll(timeout_s * 1000):
            if self._control is not None and fd == self._control.fileno():
                has_control = True
            elif (decoder := self._connections.get(fd)) is not None:
                if fd == decoder.process_fd:
                    self._on_exit(decoder)
                else:
                    self._listen(decoder)
        if has_control:  # last, since a new decoder may get descriptors that were closed just now
            self._read_control()
        self._discount_pause()
        self._end_hung()
        self._feed()

    def _discount_pause(self) -> None:
        """Extend all deadlines by time without looks, such as a pause of the whole host."""
        now = time.monotonic()
        pause_s = now - self._looked_at - _LATE * self._look_s
        self._looked_at = now
        if pause_s > 0:
            self._comeback_due += pause_s
            for decoder in self._living():
                decoder.due += pause_s

    def _has_room(self) -> bool:
        return any(decoder.has_room for decoder in self._living())

    def _living(self) -> Iterator[DecoderConnection]:
        return (decoder for fd, decoder in self._connections.items() if fd == decoder.process_fd)

    def _patience_s(self) -> float:
        """Return the most seconds to wait for an event."""
        now = time.monotonic()
        dues = [decoder.due for decoder in self._living() if decoder.jobs and not decoder.killed_at]
        dues += [due for decoder in self._living() if now < (due := decoder.killed_at + _EXIT_S)]
        dues += [self._comeback_due] if self._waiting and now < self._comeback_due else []
        return max(0.0, min(due - now for due in (now + self._look_s, *dues))) + 0.001

    def _feed(self) -> None:
        """Send waiting instances to decoders: one to each that has none, then one more to each."""
        waiting, now = self._waiting, time.monotonic()
        self._skip_late(now)
        for most in range(1, TASKS_AT_ONCE + 1):
            for decoder in self._living():
                if waiting and decoder.has_room and len(decoder.jobs) < most:
                    self._give(decoder, waiting.popleft())
                    self._skip_late(now)
        if waiting and not self.num_ready:
            self._take_back()

    def _skip_late(self, now: float) -> None:
        """Leave to the worker the next instances that are past their deadline."""
        waiting = self._waiting
        while waiting and waiting[0].decoding.refs[waiting[0].index].deadline <= now:
            job = waiting.popleft()
            job.decoding.found[job.index] = None  # the worker answers that it is late

    def _give(self, decoder: DecoderConnection, job: DecoderJob) -> None:
        decoding = job.decoding
        id, self._next_id = self._next_id, self._next_id + 1
        body = _encode(Task(id, decoding.run[job.index], decoding.refs[job.index]))
        if not decoder.jobs:
            decoder.due = time.monotonic() + self._task_timeout_s
        decoder.jobs[id] = job
        decoding.num_writers += 1
        try:
            os.write(decoder.tasks_fd, frame_of(body))
        except BlockingIOError:
            logger.error(
                "decoder %d answers tasks that it has not read; killing it", decoder.number
            )
            decoder.kill()
        except BrokenPipeError:
            pass  # its end will be seen

    def _take_back(self) -> None:
        """Leave to the worker what waits while there is no decoder."""
        if time.monotonic() < self._comeback_due:
            return
        for job in self._waiting:
            job.decoding.found[job.index] = None
        self._waiting.clear()

    def _listen(self, decoder: DecoderConnection) -> None:
        try:
            data = os.read(decoder.answers_fd, _READ_BYTES)
            if not data:
                self._poll.unregister(decoder.answers_fd)
                decoder.kill()
                return
            for frame in decoder.frames.feed(data):
                self._take(decoder, _decode(frame))
        except Exception as error:  # only the decoder is to blame, for any message
            logger.error("decoder %d wrote an invalid message: %s", decoder.number, error)
            self._poll.unregister(decoder.answers_fd)
            decoder.kill()

    def _take(self, decoder: DecoderConnection, message: FromDecoder) -> None:
        if isinstance(message, DecoderReady):
            if decoder.is_ready:
                raise ValueError("it has reported its start before")
            if message.digest != self._digest:
                raise ValueError("it does not prepare the model's samples as this worker does")
            decoder.is_ready = True
            return
        job = decoder.jobs.get(message.id)
        if job is None:
            raise ValueError(f"an answer to task {message.id}, which it does not hold")
        found: Found = None
        if isinstance(message, SlotFilled):
            assert self._slots is not None
            row = self._slots[job.decoding.run[job.index]]
            found = {header.name: view_in(row, header) for header in message.headers}
        elif isinstance(message, Settled):
            found = message.outcome
        self._settle(decoder, message.id, found)
        decoder.due = time.monotonic() + self._task_timeout_s

    def _settle(self, decoder: DecoderConnection, id: int, found: Found) -> None:
        job = decoder.jobs.pop(id)
        job.decoding.num_writers -= 1
        job.decoding.found.setdefault(job.index, found)

    def _end_hung(self) -> None:
        """Kill decoders with a task that takes too long; give up those that do not exit."""
        now = time.monotonic()
        for decoder in self._living():
            if not decoder.killed_at and decoder.jobs and now > decoder.due:
                text = "decoder %d hung: a task ran for more than %g s; killing it"
                logger.error(text, decoder.number, self._task_timeout_s)
                decoder.kill()
            elif decoder.killed_at and now > decoder.killed_at + _EXIT_S:
                # It may still write to the slots of its tasks, which stay lost.
                for job in decoder.jobs.values():
                    job.decoding.found.setdefault(job.index, None)

    def _on_exit(self, decoder: DecoderConnection) -> None:
        """Queue the tasks of a decoder again, once its exit is certain."""
        self._drain(decoder)
        for fd in (decoder.answers_fd, decoder.process_fd):
            with contextlib.suppress(KeyError):
                self._poll.unregister(fd)
            del self._connections[fd]
        decoder.close()
        assert self._at_work_on is not None
        begun = self._at_work_on[decoder.number]
        oldest = next(iter(decoder.jobs), 0)
        for id, job in reversed(decoder.jobs.items()):
            job.decoding.num_writers -= 1
            if id == oldest != begun:
                job.num_unbegun += 1
            if id == begun or job.num_unbegun > _MAX_UNBEGUN:
                self._blame(job)
            elif job.index not in job.decoding.found:
                self._waiting.appendleft(job)
        if decoder.jobs:
            decoder.jobs = {}
            self._on_progress()

    def _drain(self, decoder: DecoderConnection) -> None:
        """Read what a decoder has answered before its end; its pipe never blocks then."""
        is_read = decoder.answers_fd in self._connections and not decoder.killed_at
        while is_read and select.select([decoder.answers_fd], [], [], 0)[0]:
            self._listen(decoder)
            is_read = not decoder.killed_at

    def _blame(self, job: DecoderJob) -> None:
        """Try an instance again that a decoder died of, or fail it."""
        if job.index in job.decoding.found:
            return
        job.num_deaths += 1
        self._comeback_due = time.monotonic() + min(_COMEBACK_S, self._task_timeout_s)
        ref = job.decoding.refs[job.index]
        if job.num_deaths < MAX_DEATHS:
            logger.warning("a decoder died while it prepared an input", extra=ref.log_ids())
            self._waiting.appendleft(job)
            return
        text = f"{job.num_deaths} workers died while they computed this input (both decoders)"
        logger.error("%s: not trying it again", text, extra=ref.log_ids())
        job.decoding.found[job.index] = ItemError("worker_crashed", text)

    def _reclaim(self) -> None:
        """Free the slots of answered batches that no decoder and no device uses any more."""
        for _ in range(len(self.released)):
            decoding = self.released.popleft()
            if decoding.is_free:
                self._runs.free(decoding.run)
            else:
                self.released.append(decoding)

    def _read_control(self) -> None:
        """Accept the ring and all decoders that wait."""
        while self._control is not None and self._take_control(self._control):
            pass

    def _take_control(self, control: socket.socket) -> bool:
        """Accept the ring or a decoder; return False if none waits."""
        try:
            data, fds, _, _ = socket.recv_fds(
                control, _CONTROL_BYTES, 3, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
            )
        except BlockingIOError:
            return False
        except OSError as error:
            logger.error("no decoder can be taken in: %s", error)
            return False
        if not data:
            self._poll.unregister(control)
            control.close()
            self._control = None
            return False
        match _decode_control(data), fds:
            case NewRing(num_bytes=num_bytes), [fd]:
                self._map(fd, num_bytes)
            case NewDecoder(number=number, pid=pid), [tasks_fd, answers_fd, process_fd] if (
                self._slots is not None
            ):
                os.set_blocking(tasks_fd, False)
                decoder = DecoderConnection(number, pid, tasks_fd, answers_fd, process_fd)
                for fd in (answers_fd, process_fd):
                    self._connections[fd] = decoder
                    self._poll.register(fd, select.POLLIN)
            case _:  # there were too few descriptors, for it or for the ring
                logger.error("a decoder cannot be taken in: too few descriptors (ulimit -n)")
                for fd in fds:
                    os.close(fd)
        return True

    def _map(self, fd: int, num_bytes: int) -> None:
        layout = self._layout
        try:
            memory = mmap.mmap(fd, num_bytes)
        finally:
            os.close(fd)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._at_work_on = memoryview(memory)[: layout.start].cast("Q")
        self._slots = whole[layout.start :].view(layout.num_slots, layout.slot_bytes)
        self._on_ring(whole)


def decoded_batches(
    config: WorkerConfig, receiver: BatchReceiver, control: socket.socket
) -> tuple[PreparedBatches, bytes]:
    """Return where batches come from if decoders prepare them, and their plan for the host.

    See `AttachBatches`. The plan is empty if decoders cannot prepare the instances of this model.
    """
    decoders = decoders_for(config, receiver.computer.model, control, receiver.heartbeat.progressed)
    if decoders is None:
        return receiver, b""
    return DecodedBatches(receiver, decoders), _encode(decoders.plan)


def decoders_for(
    config: WorkerConfig, model: Model, control: socket.socket, on_progress: Callable[[], None]
) -> Decoders | None:
    """Return the decoders of a loaded model; None if they cannot prepare its instances."""
    if not model.prepares_apart or model.decode not in ("exact", "fast"):
        return None  # its pictures may be decoded on the device
    samples = decodable(model)
    if not samples:
        return None
    try:
        with torch.inference_mode():
            digest, slot_bytes = digest_of(model, samples)
    except raised() as error:
        logger.error("no decoders: the model cannot prepare its samples: %s", described(error))
        return None
    slot_bytes = -(-slot_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    if not slot_bytes:
        return None
    most = largest_batch(
        config.placement.devices[0], config.max_batch_size, may_grow=config.may_batches_grow
    )
    wanted = (config.credit + 2) * max(most, _USUAL_BATCH)
    num_slots = min(wanted, (MAX_RING_BYTES - mmap.PAGESIZE) // slot_bytes)
    if num_slots < 1:
        return None
    layout = RingLayout(num_decoders=config.decoders, num_slots=num_slots, slot_bytes=slot_bytes)
    timeout_s = _SHARE_OF_TIMEOUT * (config.batch_timeout_s or _LEAST_TIMEOUT_S)
    return Decoders(
        control,
        layout,
        digest,
        task_timeout_s=timeout_s,
        on_ring=partial(pin_ring, config.placement.devices[0]),
        on_progress=on_progress,
    )
