"""Main program of a decoder: it builds the model without loading it, and runs its `preprocess`.

It reads payloads in place in the arena, and writes what comes out to the slot that the worker has
named. It works on one instance at a time, so one at most is to blame for its death.
"""

import logging
import os
from mmap import mmap
from multiprocessing.connection import Connection

import msgspec
import torch

from inferpool.models.accelerator.failures import raised
from inferpool.models.base import Model
from inferpool.models.errors import ModelError
from inferpool.models.spec import Placement
from inferpool.models.texts import described
from inferpool.workers.decoders.ring import (
    DecoderReady,
    FromDecoder,
    RingLayout,
    Settled,
    SlotFilled,
    Task,
    Unfit,
)
from inferpool.workers.decoders.slots import decodable, digest_of, in_slot, write_to
from inferpool.workers.inside.own_process import (
    ToldToLeave,
    build_model,
    pin,
    reporting_failures,
    set_up,
)
from inferpool.workers.inside.preparing import item_of
from inferpool.workers.inside.preprocess_errors import PreprocessErrors
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.heartbeat import Heartbeat
from inferpool.workers.shared.messages import Leaving
from inferpool.workers.shared.queues import Frames, frame_of
from inferpool.workers.shared.worker_queue import WorkerQueue

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 16
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Task).decode


def main(
    config: WorkerConfig,
    number: int,
    tasks: Connection,
    answers: Connection,
    outbox: WorkerQueue,
    arena: mmap,
    ring: mmap,
    layout: RingLayout,
    row: mmap,
) -> None:
    """Run a decoder, from its first instruction to its exit.

    Args:
        config: Configuration of its worker; `decode` is how to decode: "exact" or "fast".
        number: Its number among the decoders of its worker.
        tasks: Tasks from the worker; their end is the order to leave.
        answers: Answers to the worker.
        outbox: Messages to the front end.
        arena: Payloads, mapped read-only.
        ring: Slots for what it makes, mapped for writing.
        layout: Places in the ring.
        row: Heartbeat, mapped for writing.
    """
    heartbeat = Heartbeat(row)
    set_up(heartbeat, outbox)
    with reporting_failures(outbox):
        placement = config.placement
        pin(Placement(devices=("cpu",), num_threads=1, cpus=placement.cpus))
        model = build_model(config)
        if not model.prepares_apart:
            raise ModelError("this model's instances cannot be prepared apart")
        model.decode = "fast" if config.decode == "fast" else "exact"
        with torch.inference_mode():
            digest, _ = digest_of(model, decodable(model))
    worker = DecoderLoop(model, config, number, arena, ring, layout, heartbeat)
    try:
        _write(answers.fileno(), DecoderReady(digest))
        heartbeat.progressed()  # the front end need not wait for it any more
        with torch.inference_mode():
            worker.run(tasks.fileno(), answers.fileno())
        os._exit(0)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the worker is gone
    except ToldToLeave:
        os._exit(1)  # 0 is for those that have done all their tasks
    except BaseException as error:
        logger.critical("a decoder failed", exc_info=True)
        outbox.put(Leaving("exit", f"its loop failed: {described(error)}"))
        os._exit(1)


class DecoderLoop:
    """Main loop of a decoder: read a task, prepare its instance, and answer."""

    def __init__(
        self,
        model: Model,
        config: WorkerConfig,
        number: int,
        arena: mmap,
        ring: mmap,
        layout: RingLayout,
        heartbeat: Heartbeat,
    ) -> None:
        self._model = model
        self._errors = PreprocessErrors(model, config.error_detail)
        self._number = number
        self._arena = memoryview(arena)
        self._ring = memoryview(ring)
        self._at_work_on = memoryview(ring)[: layout.start].cast("Q")
        self._layout = layout
        self._heartbeat = heartbeat

    def run(self, tasks_fd: int, answers_fd: int) -> None:
        """Answer tasks until the worker closes their pipe."""
        frames = Frames()
        while data := os.read(tasks_fd, _READ_BYTES):
            for frame in frames.feed(data):
                task = _decode(frame)
                self._at_work_on[self._number] = task.id
                self._heartbeat.received(task.id)
                answer = self._answer(task)
                _write(answers_fd, answer)
                self._heartbeat.answered()

    def _answer(self, task: Task) -> FromDecoder:
        ref = task.ref
        payload = self._arena[ref.offset : ref.offset + ref.num_bytes]
        item = item_of(ref, payload)
        try:
            features = self._model.preprocess(item)
        except raised() as error:
            return Settled(task.id, self._errors.outcome_of(error, item, ref))
        placed = in_slot(features, self._layout.slot_bytes)
        if placed is None:
            return Unfit(task.id)
        begin = self._layout.offset_of(task.slot)
        write_to(self._ring[begin : begin + self._layout.slot_bytes], features, placed)
        return SlotFilled(task.id, placed)


def _write(fd: int, message: FromDecoder) -> None:
    body = _encode(message)
    rest = memoryview(frame_of(body))
    while rest:
        rest = rest[os.write(fd, rest) :]
