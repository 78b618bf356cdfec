"""Main program of a worker process: it pins itself, loads the model, and computes batches.

The main thread computes. Meanwhile a second thread waits for the next batch and prepares it, so
that preparation and computation overlap. If the model answers in microseconds, the main thread does
both, since a hand-over would cost more than it gains. On an accelerator several batches are under
way at once: see `workers.inside.ahead`.
"""

import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from mmap import mmap
from typing import Any, Protocol

import torch
from torch import nn

from inferpool.models.accelerator.device import is_accelerator, name_of, release_memory
from inferpool.models.attached import attached
from inferpool.models.base import Model, load_model
from inferpool.models.example import own_example, reads_own_form, shown_example
from inferpool.models.files.opened import OpenedFiles
from inferpool.models.overrides import interface_of, is_streaming
from inferpool.models.speed_names import NO_NETWORK, SpeedReport
from inferpool.models.warm_sizes import largest_batch, sizes_to_warm
from inferpool.workers.inside.allocator import give_back, held_bytes
from inferpool.workers.inside.compute import Computer
from inferpool.workers.inside.own_process import (
    ToldToLeave,
    build_model,
    leave_device,
    pin,
    reporting_failures,
    set_up,
)
from inferpool.workers.inside.pools import started_pool
from inferpool.workers.inside.preparing import Prepared, unprepared
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.heartbeat import Heartbeat
from inferpool.workers.shared.messages import (
    MORE_AHEAD,
    Batch,
    BatchDone,
    Ready,
    StartProgress,
    Stored,
)
from inferpool.workers.shared.outputs import OutputStore
from inferpool.workers.shared.worker_queue import WorkerQueue

logger = logging.getLogger(__name__)

_IDLE_S = 5.0
"""Seconds without work after which free memory is returned."""
_CHECK_S = 10.0
"""Seconds between looks at the memory of a busy worker."""
_SLACK_BYTES = 1 << 28
"""Excess over the usual memory that is returned even under load."""
_OVERLAP_PAYS_S = 0.001
"""Least computation time to prepare the next batch in another thread."""
BEAT_S = 1.0


def main(
    config: WorkerConfig,
    inbox: WorkerQueue,
    outbox: WorkerQueue,
    arena: mmap,
    row: mmap,
    region: mmap,
    attachments: Mapping[str, object],
    *,
    build: Callable[[WorkerConfig], Model] = build_model,
    make_loop: "Callable[..., WorkerLoop] | None" = None,
) -> None:
    """Run one incarnation, from its first instruction to its exit.

    Args:
        config: Configuration of the worker.
        inbox: Batches from the front end; the sentinel or its end is the order to leave.
        outbox: Messages to the front end.
        arena: Payloads, mapped read-only.
        row: Heartbeat, mapped for writing.
        region: Large outputs, mapped for writing.
        attachments: Objects from the parts that have processes beside this one, by their names.
        build: Builds the model. It is called once this process is bound to its device.
        make_loop: Makes another main loop than `WorkerLoop`.
    """
    heartbeat, outputs = Heartbeat(row), OutputStore(region)
    inbox.receive_only()
    set_up(heartbeat, outbox)
    with reporting_failures(outbox):
        pin(config.placement.for_rank(0))
        computer, ready = load(
            config,
            lambda stage: outbox.put(StartProgress(stage)),
            build=build,
            on_progress=heartbeat.progressed,
            keep=outputs.keep,
        )
        batches: PreparedBatches
        batches = receiver = BatchReceiver(computer, inbox, memoryview(arena), heartbeat)
        if ready.interface.streams:
            make_loop, attachments = attached("stream loop"), {}
        for name, end in attachments.items():
            attach: AttachBatches = attached(f"{name} in a worker")
            batches, ready.plans[name] = attach(_for_parts(config, ready), receiver, end)
    give_back()  # free what loading and the choice of a preset have left
    gc.freeze()  # loaded objects stay, so later collections can skip them
    heartbeat.beat()  # from now on silence means a hang; the last beat was before the load
    outbox.put(ready)
    try:
        (make_loop or _loop_for(ready))(computer, batches, outbox, heartbeat, outputs).serve()
    except (EOFError, BrokenPipeError):
        os._exit(0)  # the front end is gone
    except torch.AcceleratorError as error:
        leave_device(error, outbox)
    except ToldToLeave:
        os._exit(0)
    except BaseException:
        # A normal exit would wait for the thread that waits for the next batch.
        logger.critical("the worker's loop failed", exc_info=True)
        os._exit(1)


class PreparedBatches(Protocol):
    """Source of prepared batches. One thread uses it at a time, except for `prepare`."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for a batch or the sentinel; return True if there is one."""

    def take(self) -> Prepared | None:
        """Wait for a batch, or return None for the sentinel.

        Raises:
            EOFError: The front end is gone.
        """

    def prepare(self, batch: Prepared) -> Prepared:
        """Prepare a batch that was taken. Other threads may take and prepare others meanwhile."""


class BatchReceiver:
    """Receives batches, and prepares them in this thread and those of the preparer."""

    def __init__(
        self, computer: Computer, inbox: WorkerQueue, arena: memoryview, heartbeat: Heartbeat
    ) -> None:
        self.computer = computer
        self.inbox = inbox
        self.heartbeat = heartbeat
        self._arena = arena
        self.wait = inbox.wait

    def prepare(self, batch: Prepared) -> Prepared:
        """Prepare a batch that was taken; a canary is prepared already."""
        return batch if batch.is_canary else self.computer.preparer.prepare(batch)

    def take(self) -> Prepared | None:
        """Wait for a batch; prepare it only if it is a canary.

        Raises:
            EOFError: The front end is gone.
        """
        batch = self.inbox.get()
        if batch is None:
            return None
        assert isinstance(batch, Batch), "only a model that streams is told to drop some"
        self.heartbeat.received(batch.id)
        return self.begin(batch)

    def begin(self, batch: Batch) -> Prepared:
        """Read a batch; prepare it only if it is a canary."""
        if not batch.items:
            return self.computer.prepare_sample(batch.id)
        arena = self._arena
        payloads = [arena[each.offset : each.offset + each.num_bytes] for each in batch.items]
        return unprepared(batch.id, batch.items, payloads)


AttachBatches = Callable[[WorkerConfig, BatchReceiver, Any], tuple[PreparedBatches, bytes]]
"""Side of a part in the worker's process: called with what its side on the host gave.

It returns the source of batches to use from now on, and what its side on the host needs then."""


class SpareMemory:
    """Decides when memory is returned: when the worker is idle, or holds far more than usual.

    The worker's main thread calls it between batches.
    """

    def __init__(self, now: float) -> None:
        self._worked_at = now
        self._is_given_back = True
        self._checked_at = now
        self._usual_bytes: int | None = None
        """Memory of the process after some work since memory was last returned."""

    def worked(self, now: float) -> None:
        """Return spare memory after a batch, if it is far more than usual."""
        self._worked_at = now
        self._is_given_back = False
        if now < self._checked_at + _CHECK_S:
            return
        self._checked_at = now
        held = held_bytes()
        if self._usual_bytes is None:
            self._usual_bytes = held
        elif held > self._usual_bytes + _SLACK_BYTES:
            give_back()
            self._usual_bytes = None  # the next check finds the new level: inputs may stay larger
        else:
            self._usual_bytes = min(self._usual_bytes, held)

    def idle(self, now: float) -> None:
        """Return spare memory once the worker has been idle for a while."""
        if not self._is_given_back and now >= self._worked_at + _IDLE_S:
            self._is_given_back = True
            give_back()


class WorkerLoop:
    """Main loop of a worker: receive a batch, compute it, answer it, until the sentinel."""

    num_receiving = 1
    """Threads that receive and prepare batches while the main thread computes."""

    def __init__(
        self,
        computer: Computer,
        batches: PreparedBatches,
        outbox: WorkerQueue,
        heartbeat: Heartbeat,
        outputs: OutputStore,
    ) -> None:
        self._computer = computer
        self._batches = batches
        self._outbox = outbox
        self._heartbeat = heartbeat
        self._outputs = outputs
        self._ahead = started_pool(self.num_receiving, "receive")
        self._compute_s = 0.0
        self._spare_memory = SpareMemory(time.monotonic())

    def serve(self) -> None:
        """Answer batches until the sentinel arrives.

        Raises:
            EOFError: The front end is gone.
            torch.AcceleratorError: The device's context is lost.
        """
        self.run()

    def run(self) -> None:
        """Answer one batch after the other."""
        coming: Future[Prepared | None] | None = None
        with torch.inference_mode():  # entered once, since that costs as much as a small instance
            while True:
                prepared = self._receive_here() if coming is None else self._wait_for(coming)
                if prepared is None:
                    return
                coming = (
                    self._ahead.submit(self._receive_ahead) if self._overlaps(prepared) else None
                )
                self._answer_now(prepared)

    def _overlaps(self, prepared: Prepared) -> bool:
        """Return whether other threads should prepare batches while a batch is computed."""
        return self._compute_s > _OVERLAP_PAYS_S or prepared.release is not None

    def _receive_ahead(self) -> Prepared | None:
        """Receive a batch in the thread that prepares."""
        with torch.inference_mode():
            return self._receive()

    def _receive_here(self) -> Prepared | None:
        """Receive a batch in the main thread, which beats while it waits."""
        while not self._batches.wait(BEAT_S):
            self._heartbeat.beat()
            self._spare_memory.idle(time.monotonic())
        self._heartbeat.beat()
        return self._receive()

    def _receive(self) -> Prepared | None:
        batch = self._batches.take()
        return batch and self._batches.prepare(batch)

    def _wait_for(self, coming: "Future[Prepared | None]") -> Prepared | None:
        while True:
            try:
                return coming.result(BEAT_S)
            except FutureTimeoutError:
                self._heartbeat.beat()
                self._spare_memory.idle(time.monotonic())

    def _answer_now(self, prepared: Prepared) -> None:
        self._answer(prepared)
        if not prepared.is_canary:
            self._spare_memory.worked(time.monotonic())

    def _answer(self, prepared: Prepared, waited_s: Callable[[], float] = lambda: 0.0) -> None:
        """Compute a batch and send its outcomes; its time counts without what it has waited."""
        began = time.monotonic()
        num_stored_before = self._outputs.num_stored
        outcomes = self._computer.compute(prepared)
        began -= prepared.device_s  # it was launched before
        began += waited_s()
        compute_s = time.monotonic() - began
        self._compute_s = compute_s
        if prepared.is_canary:
            outcomes = self._computer.judge_sample(outcomes)
            self._heartbeat.beat()
        else:
            self._heartbeat.answered()
        self._outbox.put(
            BatchDone(
                prepared.id,
                outcomes,
                prepared.prepare_s,
                compute_s,
                self._outputs.num_stored - num_stored_before,
                prepared.began,
                began,
            )
        )


def _for_parts(config: WorkerConfig, ready: Ready) -> WorkerConfig:
    """Return the configuration with all batches that a worker may hold: decoders prepare them."""
    return replace(config, credit=config.credit + ready.num_ahead)


def _loop_for(ready: Ready) -> type[WorkerLoop]:
    """Return the kind of loop for a model that is loaded."""
    ahead: type[WorkerLoop] = attached("loop ahead") if ready.num_ahead else WorkerLoop
    return ahead


def _num_ahead(config: WorkerConfig, model: Model, computer: Computer) -> int:
    """Return how many batches beyond its credit a worker holds."""
    is_plain = config.placement.num_ranks == 1 and not is_streaming(model)
    return MORE_AHEAD if is_plain and computer.runs_ahead and config.credit > 1 else 0


def _choose_speed(
    config: WorkerConfig, model: Model, max_batch_size: int, tell: Callable[[str], None]
) -> SpeedReport:
    """Choose the network and the decoder that a loaded model's settings ask for.

    Raises:
        ModelError: The preset or decoder that the settings name cannot be used with this model.
    """
    if is_streaming(model):
        return SpeedReport(note="it answers in parts")
    has_choice = config.speed not in ("auto", "exact") or config.decode == "fast"
    has_choice = has_choice or isinstance(model.network, nn.Module)
    if has_choice or (config.speed == config.decode == "auto" and model.encoded_samples()):
        report: SpeedReport = attached("speed preset")(config, model, max_batch_size, tell)
        return report
    gc.collect()  # what loading has left: a worker freezes the rest
    release_memory()  # of that, for other replicas on this device
    return SpeedReport(note=NO_NETWORK if config.speed == "auto" else "")


def load(
    config: WorkerConfig,
    tell: Callable[[str], None],
    *,
    build: Callable[[WorkerConfig], Model] = build_model,
    on_progress: Callable[[], None] = lambda: None,
    keep: Callable[[memoryview], bytes | Stored] = bytes,
) -> tuple[Computer, Ready]:
    """Build, load and warm up a model in this thread.

    Args:
        config: Configuration of the worker.
        tell: Called with each step, for people.
        build: Builds the model.
        on_progress: See `Computer`.
        keep: See `Computer`.

    Raises:
        ModelError: The model cannot be loaded.
    """
    began = time.monotonic()
    tell(f"loading {config.model.source}")
    opened = OpenedFiles(config.model.source)
    with opened.noting():
        model = build(config)
        load_model(model, config.placement)
    split_network = model._runtime.split_network
    device = config.placement.devices[0]
    most = largest_batch(device, config.max_batch_size, may_grow=config.may_batches_grow)
    speed = _choose_speed(config, model, most, tell)
    samples = list(model.warmup())
    example = own_example(model)
    own = example.item if example else None
    kind = "check of streams" if is_streaming(model) else "start check"
    check = attached(kind)(model, config, own, samples, preset=speed.preset)
    computer = Computer(
        model,
        num_threads=config.prepare_threads,
        device=device,
        on_progress=on_progress,
        keep=keep,
        error_detail=config.error_detail,
    )
    warmup_s: float | None = None
    if samples:
        tell("warming up")
        warmup_s = check.warm_up(computer, sizes_to_warm(device, most))
    if not check.is_off:
        tell("checking its answers")
    checked = check.run(computer)
    return computer, Ready(
        pid=os.getpid(),
        inputs=list(model.inputs),
        outputs=list(model.outputs),
        device=name_of(device),
        load_s=time.monotonic() - began - speed.measured_s,
        warmup_s=warmup_s,
        preloaded="inferpool.workers.inside.preload" in sys.modules,
        speed=speed,
        part=split_network.part if split_network else None,
        split=split_network.report if split_network else None,
        example=shown_example(model, example, samples),
        reads_own_form=reads_own_form(model),
        checked=checked,
        files=opened.marks(),
        is_accelerated=is_accelerator(device),
        num_ahead=_num_ahead(config, model, computer),
        interface=interface_of(model, checked.media_types),
    )
