"""`trace`: what each worker does when, as a picture, and how much of the preparation is hidden.

Real workers under the real dispatcher, without HTTP. The times are the workers' own. The JSON file
is a trace for https://ui.perfetto.dev or chrome://tracing; the page beside it needs no network.
"""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from inferpool.models.spec import Placement
from inferpool.service.api.codecs.body import Payload
from inferpool.service.tools.trial.report import Chart
from inferpool.workers.arena import Arena
from inferpool.workers.config import ModelConfig, WorkerConfig
from inferpool.workers.host.engine import WorkerHandle, WorkerId
from inferpool.workers.host.local import LocalEngine, start_forkserver
from inferpool.workers.messages import BatchDone, ItemRef
from tests.bench.frame import Benchmark, Cell, Column
from tests.bench.workloads import photos
from tests.service.pools import make_dispatcher

HELP = "what each worker does when, and how much of it overlaps"
OPTIONS = {
    "secs": 5,
    "model": ("efficientnet_lite0", "the model"),
    "workers": (2, "its workers"),
    "max-batch-size": (8, "the largest batch"),
    "connections": (64,),
}
_COLOURS = {"queued": "#8c959f", "prepare": "#bf8700", "compute": "#1f6feb", "answer": "#1a7f37"}
"""Stages of a batch, and their colours in the picture."""
_MAX_SHOWN = 60
"""Batches in the picture: the last ones, when all is warm."""
_COLUMNS = (
    Column("batches", "batches"),
    Column("size", "size", 1),
    Column("prepare_ms", "prepare, ms", 1),
    Column("compute_ms", "compute, ms", 1),
    Column("hidden", "hidden, %"),
    Column("computing", "computing, %"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Moments of one batch, in seconds of CLOCK_MONOTONIC."""

    worker: int
    num_items: int
    sent: float
    prepare: tuple[float, float]
    compute: tuple[float, float]
    answered: float
    """Moment when the front end has its answer."""

    def stages(self) -> Sequence[tuple[str, float, float]]:
        """Return name, begin and end of each stage."""
        return (
            ("queued", self.sent, self.prepare[0]),
            ("prepare", *self.prepare),
            ("compute", *self.compute),
            ("answer", self.compute[1], self.answered),
        )


def run(bench: Benchmark) -> None:
    """Run the load, and note each batch."""
    args = bench.args
    config = WorkerConfig(
        model=ModelConfig(name="m", source=args.model),
        placement=Placement(devices=("cpu",)),
        max_batch_size=args.max_batch_size,
    )
    payloads = [Payload("image", (file.read_bytes(),)) for file in photos().files]
    start_forkserver()
    spans = asyncio.run(
        traced(config, payloads, workers=args.workers, at_once=args.connections[0], secs=args.secs)
    )
    for worker in sorted({span.worker for span in spans}):
        own = [span for span in spans if span.worker == worker]
        figures = {
            "batches": len(own),
            "size": sum(span.num_items for span in own) / len(own),
            "prepare_ms": _mean_ms(own, "prepare"),
            "compute_ms": _mean_ms(own, "compute"),
            "hidden": 100 * overlap(own),
            "computing": 100 * busy(own),
        }
        name = f"worker {worker}"
        bench.cells.append(Cell(workload=args.model, contender=name, round=0, figures=figures))
    bench.content["traceEvents"] = events(spans)
    bench.parts.append(picture(spans))


def report(bench: Benchmark) -> None:
    """Print what overlaps."""
    caption = (
        "hidden: the part of preparing in which the worker computed another batch; computing: "
        "the part of all the time."
    )
    bench.add_cells("Workers", "", _COLUMNS, caption)


async def traced(
    config: WorkerConfig, payloads: Sequence[Payload], *, workers: int, at_once: int, secs: float
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
    try:
        for worker in started:
            dispatcher.attach(cast("WorkerHandle", _TracedWorker(worker, spans)))
        turns = itertools.cycle(payloads)
        ends_at = time.monotonic() + secs

        async def keep_asking() -> None:
            while time.monotonic() < ends_at:
                payload, deadline = next(turns), time.monotonic() + 60
                ref = ItemRef(payload.kind, 0, sum(map(len, payload.chunks)), deadline)
                await dispatcher.submit(ref, payload.chunks)

        await asyncio.gather(*(keep_asking() for _ in range(at_once)))
    finally:
        await asyncio.gather(*(worker.stop(5) for worker in started))
        arena.close()
    return spans


class _TracedWorker:
    """A worker that notes its batches."""

    def __init__(self, worker: WorkerHandle, spans: list[Span]) -> None:
        self._worker = worker
        self._spans = spans

    def __getattr__(self, name: str) -> object:
        return getattr(self._worker, name)

    def run(self, items: Sequence[ItemRef]) -> "asyncio.Future[BatchDone]":
        sent = time.monotonic()
        future = self._worker.run(items)

        def note(future: "asyncio.Future[BatchDone]") -> None:
            if future.cancelled() or future.exception() is not None:
                return
            done = future.result()
            self._spans.append(
                Span(
                    worker=self._worker.id.slot,
                    num_items=len(items),
                    sent=sent,
                    prepare=(done.prepare_began, done.prepare_began + done.prepare_s),
                    compute=(done.compute_began, done.compute_began + done.compute_s),
                    answered=time.monotonic(),
                )
            )

        future.add_done_callback(note)
        return future


def overlap(spans: Sequence[Span]) -> float:
    """Return the part of one worker's preparing in which it computed other batches."""
    hidden = sum(
        max(0.0, min(one.prepare[1], other.compute[1]) - max(one.prepare[0], other.compute[0]))
        for one, other in itertools.permutations(spans, 2)
    )
    total = sum(span.prepare[1] - span.prepare[0] for span in spans)
    return hidden / total if total else 0.0


def busy(spans: Sequence[Span]) -> float:
    """Return the part of one worker's time, first batch to last, in which it computed."""
    begins, ends = min(span.sent for span in spans), max(span.compute[1] for span in spans)
    return sum(span.compute[1] - span.compute[0] for span in spans) / (ends - begins)


def events(spans: Sequence[Span]) -> list[dict[str, object]]:
    """Return Chrome's "Trace Event Format": a process per worker, a thread per stage."""
    origin = min(span.sent for span in spans)
    found: list[dict[str, object]] = []
    for worker, (tid, stage) in itertools.product(
        sorted({span.worker for span in spans}), enumerate(_COLOURS)
    ):
        place = {"ph": "M", "pid": worker, "tid": tid}
        found.append({**place, "name": "process_name", "args": {"name": f"worker {worker}"}})
        found.append({**place, "name": "thread_name", "args": {"name": stage}})
    for number, span in enumerate(spans):
        for tid, (stage, begin, end) in enumerate(span.stages()):
            event = {"name": stage, "cat": stage, "pid": span.worker, "tid": tid, "id": number}
            event["args"] = {"batch": number, "size": span.num_items}
            begin_us, end_us = (begin - origin) * 1e6, (end - origin) * 1e6
            if stage == "queued":  # several may wait at once, which only such events may
                found.append({**event, "ph": "b", "ts": begin_us})
                found.append({**event, "ph": "e", "ts": end_us})
            else:
                found.append({**event, "ph": "X", "ts": begin_us, "dur": end_us - begin_us})
    return found


def picture(spans: Sequence[Span]) -> Chart:
    """Draw the last batches: a lane for each stage of each worker."""
    shown = sorted(spans, key=lambda span: span.sent)[-_MAX_SHOWN:]
    origin = min(span.sent for span in shown)
    lanes: dict[str, dict[str, list[object]]] = {
        stage: {"y": [], "base": [], "x": [], "text": []} for stage in _COLOURS
    }
    for span in shown:
        for stage, begin, end in span.stages():
            lane = lanes[stage]
            lane["y"].append(f"worker {span.worker}: {stage}")
            lane["base"].append((begin - origin) * 1e3)
            lane["x"].append((end - begin) * 1e3)
            lane["text"].append(f"{span.num_items} instances")
    look = {"type": "bar", "orientation": "h", "textposition": "none", "opacity": 0.6}
    return Chart(
        data=[
            {**look, **lane, "name": stage, "marker": {"color": _COLOURS[stage]}}
            for stage, lane in lanes.items()
        ],
        layout={"barmode": "overlay", "xaxis": {"title": {"text": "ms"}}, "height": 480},
    )


def _mean_ms(spans: Sequence[Span], stage: str) -> float:
    lengths = [end - begin for span in spans for name, begin, end in span.stages() if name == stage]
    return sum(lengths) / len(lengths) * 1e3
