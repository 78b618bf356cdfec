"""`trace`: what each worker does when, as a picture, and how much of the preparation is hidden.

Real workers under the real dispatcher, without HTTP. The times are the workers' own. The JSON file
is a trace for https://ui.perfetto.dev or chrome://tracing; the page beside it needs no network.
"""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from inferpool.models.spec import Placement
from inferpool.service.api.codecs.body import Payload
from inferpool.service.tools.trial.report import Chart
from inferpool.workers.host.engine import WorkerHandle, WorkerId
from inferpool.workers.host.local import LocalEngine, start_forkserver
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.config import ModelConfig, WorkerConfig
from inferpool.workers.shared.messages import BatchDone, ItemRef
from tests.bench.frame import Benchmark, Cell, benchmark
from tests.bench.workloads import photos
from tests.service.pools import make_dispatcher

_COLOURS = {"queued": "#8c959f", "prepare": "#bf8700", "compute": "#1f6feb", "answer": "#1a7f37"}
"""Stages of a batch, and their colours in the picture."""
_MAX_SHOWN = 60
"""Batches in the picture: the last ones, when all is warm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One batch. Moments are of `time.monotonic`."""

    worker: int
    num_items: int
    stages: dict[str, tuple[float, float]]
    """Begin and end of each stage."""


@benchmark(
    "what each worker does when, and how much of it overlaps",
    secs=5,
    model=("efficientnet_lite0", "the model"),
    workers=(2, "its workers"),
    max_batch_size=(8, "the largest batch"),
    connections=(64,),
)
def trace(bench: Benchmark) -> None:
    """Run the load, and record each batch."""
    args = bench.args
    config = WorkerConfig(
        model=ModelConfig(name="m", source=args.model),
        placement=Placement(devices=("cpu",)),
        max_batch_size=args.max_batch_size,
    )
    payloads = [Payload("image", (file.read_bytes(),)) for file in photos().files]
    start_forkserver()
    spans = asyncio.run(traced(config, payloads, args.workers, args.connections[0], args.secs))
    for worker in sorted({span.worker for span in spans}):
        own = [span for span in spans if span.worker == worker]
        figures = {
            "batches": len(own),
            "size": fmean(span.num_items for span in own),
            "prepare_ms": 1e3 * total_s(own, "prepare") / len(own),
            "compute_ms": 1e3 * total_s(own, "compute") / len(own),
            "hidden": 100 * overlap(own),
            "computing": 100 * busy(own),
        }
        bench.cells.append(Cell(args.model, f"worker {worker}", 0, figures))
    bench.content["traceEvents"] = events(spans)
    bench.parts.append(picture(spans))
    caption = (
        "hidden: the percentage of preparing in which the worker computed another batch; "
        "computing: that of all the time."
    )
    bench.report(caption=caption)


async def traced(
    config: WorkerConfig, payloads: Sequence[Payload], workers: int, at_once: int, secs: float
) -> list[Span]:
    """Keep `at_once` instances in flight for a while; return each batch, oldest first."""
    num_bytes = max(sum(map(len, payload.chunks)) for payload in payloads)
    arena = Arena(max(1 << 20, 4 * at_once * num_bytes))
    dispatcher = make_dispatcher(
        arena, max_queue_length=2 * at_once, max_batch_size=config.max_batch_size
    )
    engine = LocalEngine(arena)
    ids = [WorkerId(model=config.model.name, slot=slot) for slot in range(workers)]
    started = await asyncio.gather(*(engine.start(id, config, lambda _: None) for id in ids))
    spans: list[Span] = []
    turns = itertools.cycle(payloads)
    ends_at = time.monotonic() + secs

    async def keep_asking() -> None:
        while time.monotonic() < ends_at:
            payload, deadline = next(turns), time.monotonic() + 60
            ref = ItemRef(payload.kind, 0, sum(map(len, payload.chunks)), deadline)
            await dispatcher.submit(ref, payload.chunks)

    try:
        for worker in started:
            traced_worker: Any = _TracedWorker(worker, spans)
            dispatcher.attach(traced_worker)
        await asyncio.gather(*(keep_asking() for _ in range(at_once)))
    finally:
        await asyncio.gather(*(worker.stop(5) for worker in started))
        arena.close()
    return spans


class _TracedWorker:
    """A worker that records its batches."""

    def __init__(self, worker: WorkerHandle, spans: list[Span]) -> None:
        self._worker = worker
        self._spans = spans

    def __getattr__(self, name: str) -> object:
        return getattr(self._worker, name)

    def run(self, items: Sequence[ItemRef]) -> "asyncio.Future[BatchDone]":
        sent = time.monotonic()
        future = self._worker.run(items)

        def record(future: "asyncio.Future[BatchDone]") -> None:
            if future.cancelled() or future.exception() is not None:
                return
            done = future.result()
            prepared = done.prepare_began + done.prepare_s
            computed = done.compute_began + done.compute_s
            stages = {
                "queued": (sent, done.prepare_began),
                "prepare": (done.prepare_began, prepared),
                "compute": (done.compute_began, computed),
                "answer": (computed, time.monotonic()),
            }
            worker = self._worker.id.slot
            self._spans.append(Span(worker=worker, num_items=len(items), stages=stages))

        future.add_done_callback(record)
        return future


def total_s(spans: Sequence[Span], stage: str) -> float:
    """Return the seconds of a stage in all."""
    return sum(span.stages[stage][1] - span.stages[stage][0] for span in spans)


def overlap(spans: Sequence[Span]) -> float:
    """Return the part of one worker's preparing in which it computed other batches."""
    pairs = itertools.permutations((span.stages for span in spans), 2)
    both = ((one["prepare"], other["compute"]) for one, other in pairs)
    hidden_s = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in both)
    prepared_s = total_s(spans, "prepare")
    return hidden_s / prepared_s if prepared_s else 0.0


def busy(spans: Sequence[Span]) -> float:
    """Return the part of one worker's time, first batch to last, in which it computed."""
    begins = min(span.stages["queued"][0] for span in spans)
    return total_s(spans, "compute") / (max(span.stages["compute"][1] for span in spans) - begins)


def events(spans: Sequence[Span]) -> list[dict[str, object]]:
    """Return Chrome's "Trace Event Format": a process per worker, a thread per stage."""
    origin = min(span.stages["queued"][0] for span in spans)
    found: list[dict[str, object]] = []
    for worker, (tid, stage) in itertools.product(
        sorted({span.worker for span in spans}), enumerate(_COLOURS)
    ):
        for name, value in (("process_name", f"worker {worker}"), ("thread_name", stage)):
            found.append({"ph": "M", "pid": worker, "tid": tid, "name": name,
                          "args": {"name": value}})  # fmt: skip
    for number, span in enumerate(spans):
        for tid, (stage, (begin, end)) in enumerate(span.stages.items()):
            event = {"name": stage, "cat": stage, "pid": span.worker, "tid": tid, "id": number,
                     "args": {"batch": number, "size": span.num_items}}  # fmt: skip
            begin_us, end_us = (begin - origin) * 1e6, (end - origin) * 1e6
            if stage == "queued":  # several may wait at once, which only such events may
                found += [{**event, "ph": "b", "ts": begin_us}, {**event, "ph": "e", "ts": end_us}]
            else:
                found.append({**event, "ph": "X", "ts": begin_us, "dur": end_us - begin_us})
    return found


def picture(spans: Sequence[Span]) -> Chart:
    """Draw the last batches: a lane for each stage of each worker."""
    shown = sorted(spans, key=lambda span: span.stages["queued"])[-_MAX_SHOWN:]
    origin = shown[0].stages["queued"][0]
    look = {"type": "bar", "orientation": "h", "textposition": "none", "opacity": 0.6}
    lanes = [
        {
            **look,
            "name": stage,
            "marker": {"color": colour},
            "y": [f"worker {span.worker}: {stage}" for span in shown],
            "base": [(span.stages[stage][0] - origin) * 1e3 for span in shown],
            "x": [1e3 * total_s([span], stage) for span in shown],
            "text": [f"{span.num_items} instances" for span in shown],
        }
        for stage, colour in _COLOURS.items()
    ]
    layout = {"barmode": "overlay", "xaxis": {"title": {"text": "ms"}}, "height": 480}
    return Chart(data=lanes, layout=layout)
