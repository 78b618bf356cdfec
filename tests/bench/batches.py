"""`batches`: a worker's own work on each batch of pictures, on a device whose work costs no core.

A real worker's loop gets full batches from a real queue, and photographs from a real arena. The
simulated accelerator plays its device: what decodes, resizes and computes there returns at once, or
takes some time and no core. So the CPU time of the worker's threads is that of our own code, and of
torch's calls. Threads of the device itself are not counted.
"""

import math
import os
import select
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from mmap import mmap
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe
from statistics import median, quantiles
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from inferpool.models.spec import Placement
from inferpool.models.vision.classifier import Classifier, imagenet_labels
from inferpool.models.vision.device_pictures import DevicePictures
from inferpool.models.vision.gpu_jpegs import GpuJpegs
from inferpool.models.vision.picture_facts import facts_of
from inferpool.models.vision.transforms import ImageTransform
from inferpool.workers.host.local_worker import PrivateQueue
from inferpool.workers.inside import process
from inferpool.workers.inside.ahead import AheadLoop
from inferpool.workers.inside.preparing import Prepared
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.config import ModelConfig, WorkerConfig
from inferpool.workers.shared.heartbeat import HeartbeatReader
from inferpool.workers.shared.messages import (
    Batch,
    BatchDone,
    FromWorker,
    ItemError,
    ItemRef,
    Ready,
    StartFailed,
)
from inferpool.workers.shared.outputs import OutputRegion
from inferpool.workers.shared.queues import FrameReader, frame_of
from inferpool.workers.shared.worker_queue import WorkerQueue
from tests.bench.frame import Benchmark, Cell, benchmark
from tests.bench.server import BenchError
from tests.bench.workloads import photos
from tests.simulated_accelerator.build import build, environment

_SOURCE = "tests.bench.batches:DevicePhotos"
_NUM_WARM = 30
"""Batches before those that are measured."""
_WAIT_S = 120.0
_PICTURE = (3, 375, 500)
"""Colours, height and width of what the device decodes."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FromWorker).decode


class DevicePhotos(Classifier):
    """Answers any photograph alike; decoding, resizing and the network are waits of the device."""

    decode = "device"  # type: ignore[assignment]  # without the trial that chooses it

    def __init__(self, *, decode_us: int = 0, network_us: int = 0) -> None:
        """Store the microseconds of the device for a batch."""
        labels = imagenet_labels()
        super().__init__(transform=ImageTransform(resize=256, crop=224), labels=labels)
        self._decode_us, self._network_us = decode_us, network_us

    def build_network(self) -> nn.Module:
        """Return a network that computes nothing."""
        return _Waiting(self._network_us)

    @cached_property
    def _gpu_jpegs(self) -> GpuJpegs:
        pictures = DevicePictures(_launch_nothing, self.transform, self.device)
        self._picture = torch.empty(_PICTURE, dtype=torch.uint8, device=self.device)
        return GpuJpegs(self._decoded, self.transform, pictures)

    def _decoded(self, jpegs: list[Tensor]) -> list[Tensor]:
        if self._decode_us:
            torch.sim.busy(self._decode_us)
            torch.sim.current_stream().synchronize()  # as torchvision does
        return [self._picture] * len(jpegs)


def _launch_nothing(
    images: Sequence[Tensor],
    windows: NDArray[np.int64],
    interpolation: Image.Resampling,
    normalization: Tensor,
    out: Tensor,
) -> None:
    facts = torch.from_numpy(facts_of(images, windows, interpolation, out))
    facts.pin_memory().to(out.device, non_blocking=True)


class _Waiting(nn.Module):
    def __init__(self, us: int) -> None:
        super().__init__()
        self._us = us
        self.register_buffer("logits", torch.linspace(0, 1, 1000).repeat(256, 1))
        self.logits: Tensor

    def forward(self, x_BCHW: Tensor) -> Tensor:  # noqa: N803 - as in the product
        if self._us:
            torch.sim.busy(self._us)
        return self.logits[: len(x_BCHW)].clone()


@benchmark(
    "a worker's own work on each batch of pictures, on a device whose work costs no core",
    rounds=5,
    batch=(64, "pictures of a batch"),
    num=(150, "batches that are measured in a round"),
    decode_us=(0, "of the device for a batch"),
    network_us=(0, "of the device for a batch"),
    threads=(1, "threads that run `preprocess`"),
    at_once=((1, 2), "comma-separated: batches that are prepared at once"),
)
def batches(bench: Benchmark) -> None:
    """Run the worker once in each round."""
    folder = build()
    os.environ |= environment(folder)
    sys.path.append(str(folder))  # which the worker gets
    bench.take_turns(
        {f"{num} at once": partial(_run, bench.args, int(num)) for num in bench.args.at_once}
    )
    bench.report(
        caption="CPU of the worker's threads for a batch: in all of them, by thread, and (p90) of "
        "the longest step that nothing interrupts."
    )


def _run(args: Any, at_once: int, _: int) -> Iterator[Cell]:
    inbox, outbox, row, region = PrivateQueue(), PrivateQueue(), HeartbeatReader(), OutputRegion()
    files = [file.read_bytes() for file in photos().files]
    arena = Arena(1 << 26)
    places = [(arena.put([data], len(data)) or 0, len(data)) for data in files]
    config = WorkerConfig(
        model=ModelConfig(
            name="m",
            source=_SOURCE,
            options={"decode_us": args.decode_us, "network_us": args.network_us},
        ),
        placement=Placement(devices=("sim:0",)),
        max_batch_size=args.batch,
        prepare_threads=args.threads,
        check="off",
        credit=2 * at_once,
    )
    mine, theirs = Pipe(duplex=False)
    worker = get_context("spawn").Process(
        target=_work,
        args=(at_once, theirs, config, inbox, outbox, arena.memory, row.memory, region.memory),
        daemon=True,
    )
    worker.start()
    inbox.reader.close()
    outbox.writer.close()
    theirs.close()
    try:
        per_s = _feed(args, inbox, FrameReader(outbox.reader), places, config)
        steps = mine.recv()
    except EOFError:
        worker.join(10)
        raise BenchError(f"the worker ended with {worker.exitcode} before it reported") from None
    finally:
        worker.join(10)
        worker.kill()
        for each in (inbox, outbox, row, region, arena):
            each.close()
    name = f"{at_once} at once"
    yield Cell("pictures", name, 0, {"per_s": per_s, **steps})


def _feed(
    args: Any,
    inbox: PrivateQueue,
    answers: FrameReader,
    places: Sequence[tuple[int, int]],
    config: WorkerConfig,
) -> float:
    """Keep the worker full for a while, and end it; return the pictures a second."""
    messages = _messages(answers)
    ready = next(messages)
    if not isinstance(ready, Ready):
        raise BenchError(f"the worker does not start: {ready}")
    items = [ItemRef("image", *places[i % len(places)], math.inf) for i in range(args.batch)]
    num_sent = num_done = 0
    began = 0.0
    while num_done < _NUM_WARM + args.num:
        while num_sent < _NUM_WARM + args.num and num_sent < num_done + config.credit:
            os.write(inbox.writer.fileno(), frame_of(_encode(Batch(num_sent, items))))
            num_sent += 1
        done = next(messages)
        assert isinstance(done, BatchDone), done
        if any(isinstance(outcome, ItemError) for outcome in done.outcomes):
            raise BenchError(f"an error: {done.outcomes}")
        num_done += 1
        began = began if num_done > _NUM_WARM else time.perf_counter()
    per_s = args.num * args.batch / (time.perf_counter() - began)
    os.write(inbox.writer.fileno(), frame_of(_encode(None)))
    return per_s


def _messages(answers: FrameReader) -> Iterator[FromWorker]:
    poller = select.poll()
    poller.register(answers.fd, select.POLLIN)
    while poller.poll(_WAIT_S * 1000):
        for frame in answers.frames():
            message = _decode(frame)
            if isinstance(message, (Ready, BatchDone, StartFailed)):
                yield message
    raise BenchError(f"the worker says nothing for {_WAIT_S:g} s")


def _work(
    at_once: int, report: Connection, config: WorkerConfig, inbox: WorkerQueue, *memory: mmap
) -> None:
    MeasuredLoop.num_receiving = at_once
    make = partial(MeasuredLoop, report.send)
    process.main(config, inbox, *memory, {}, make_loop=make)  # type: ignore[call-arg, arg-type]  # as spawned


class MeasuredLoop(AheadLoop):
    """The loop of a worker, which measures the CPU time of its threads and of its steps."""

    def __init__(self, report: Callable[[Mapping[str, float]], None], *parts: Any) -> None:
        super().__init__(*parts)
        self._report = report
        self._steps: defaultdict[str, list[float]] = defaultdict(list)
        self._num = 0
        self._before: dict[str, float] = {}
        computer, preparer = self._computer, self._computer.preparer
        for owner, name in (
            (preparer, "preprocess"), (preparer, "_group"), (computer, "launch"),
            (computer, "compute"), (self._outbox, "put"),
        ):  # fmt: skip
            setattr(owner, name, self._timed(name.strip("_"), getattr(owner, name)))

    def serve(self) -> None:
        """Answer batches, and report the figures in the end."""
        super().serve()
        cpu_s = {name: end - self._before.get(name, 0.0) for name, end in _cpu_s().items()}
        num = self._num - _NUM_WARM
        by_thread = {f"{name}_ms": s / num * 1e3 for name, s in cpu_s.items()}
        # Batches that are too short to overlap are not launched ahead.
        steps = {name: times for name, times in self._steps.items() if len(times) > 1}
        self._report(
            {
                "all_ms": sum(cpu_s.values()) / num * 1e3,
                **by_thread,
                "longest_ms": max(quantiles(each, n=10)[-1] for each in steps.values()) * 1e3,
                **{f"{name}_step_ms": median(each) * 1e3 for name, each in steps.items()},
            }
        )

    def _answer(self, prepared: Prepared, *rest: Any) -> None:
        super()._answer(prepared, *rest)
        self._num += 1
        if self._num == _NUM_WARM:
            self._before = _cpu_s()
            self._steps.clear()

    def _timed(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.thread_time()
            try:
                return step(*args)
            finally:
                self._steps[name].append(time.thread_time() - began)

        return timed


def _cpu_s() -> dict[str, float]:
    """Return the CPU seconds of each kind of thread that Python knows, by the pools' names."""
    found: defaultdict[str, float] = defaultdict(float)
    for thread in threading.enumerate():
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        found[thread.name.partition("_")[0].lower()] += time.clock_gettime(clock)
    return found
