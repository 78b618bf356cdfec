"""`trace`: what each worker does when, as a picture, and how much of the preparation is hidden.

Real workers under the real dispatcher, without HTTP. The times are the workers' own. The JSON file
is a trace for https://ui.perfetto.dev or chrome://tracing; the page beside it asks nothing of a
network.
"""

import argparse
import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, cast

from inferpool.models.spec import Placement
from inferpool.service.api.codecs.body import Payload
from inferpool.service.queue.admission import Admission
from inferpool.service.queue.dispatcher import Dispatcher
from inferpool.service.queue.quarantine import Quarantine
from inferpool.service.telemetry.metrics import ModelMetrics
from inferpool.workers.arena import Arena
from inferpool.workers.config import ModelConfig, WorkerConfig
from inferpool.workers.host.engine import WorkerHandle, WorkerId
from inferpool.workers.host.local import LocalEngine, start_forkserver
from inferpool.workers.messages import BatchDone, ItemRef
from tests.bench.photos import photos
from tests.bench.processes import OUT
from tests.bench.report import console, table
from tests.bench.rounds import Plan
from tests.load.page import Note, Picture, write_page

if TYPE_CHECKING:
    from pathlib import Path

HELP = "what each worker does when, and how much of it overlaps"
STAGES = ("queued", "prepare", "compute", "answer")
_COLOURS = {"queued": "#8c959f", "prepare": "#bf8700", "compute": "#1f6feb", "answer": "#1a7f37"}
_WIDTH, _LANE, _LEFT = 1600, 22, 150
_MAX_SHOWN = 60
"""Batches in the picture: the last ones, when all is warm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One batch. Moments in seconds of CLOCK_MONOTONIC."""

    worker: int
    num_items: int
    sent: float
    prepare: tuple[float, float]
    compute: tuple[float, float]
    answered: float
    """The front end has its answer."""

    def stages(self) -> Sequence[tuple[str, float, float]]:
        """Name, begin and end of each."""
        return (
            ("queued", self.sent, self.prepare[0]),
            ("prepare", *self.prepare),
            ("compute", *self.compute),
            ("answer", self.compute[1], self.answered),
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="efficientnet_lite0", help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--max-batch-size", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--connections", type=int, default=64, help="at once (%(default)s)")
    parser.add_argument("--secs", type=float, default=5.0, help="of load (%(default)s)")


def run(args: argparse.Namespace, plan: Plan) -> int:
    """Run the load, print what overlaps, and save the trace and the picture."""
    config = WorkerConfig(
        model=ModelConfig(name="m", source=args.model),
        placement=Placement(devices=("cpu",)),
        max_batch_size=args.max_batch_size,
    )
    payloads = [Payload("image", (file.read_bytes(),)) for file in photos()]
    start_forkserver()
    spans = asyncio.run(
        traced(config, payloads, workers=args.workers, at_once=args.connections, secs=args.secs)
    )
    workers = sorted({span.worker for span in spans})
    rows = []
    for worker in workers:
        own = [span for span in spans if span.worker == worker]
        rows.append(
            (
                f"worker {worker}",
                f"{len(own)}",
                f"{sum(span.num_items for span in own) / len(own):.1f}",
                f"{_mean_ms(own, 'prepare'):.1f}",
                f"{_mean_ms(own, 'compute'):.1f}",
                f"{overlap(own):.0%}",
                f"{busy(own):.0%}",
            )
        )
    columns = ("", "batches", "size", "prepare, ms", "compute, ms", "hidden", "computing")
    caption = (
        "hidden: of the time that preparing took, the part in which the worker computed another "
        "batch; computing: of all the time."
    )
    table(f"{args.model} at {args.connections} at once", columns, rows, caption)
    path: Path = args.out or OUT / f"trace-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events(spans)}))
    notes = [
        Note(text=f"{row[0]}: {row[5]} of preparing hidden behind computing; computing {row[6]}")
        for row in rows
    ]
    title = f"Trace of {args.model}"
    subtitle = f"{args.workers} workers, {args.connections} instances at once; batch by batch"
    write_page(path.with_suffix(".html"), title, subtitle, [*notes, Picture(svg=picture(spans))])
    console.print(f"Trace in {path}, picture in {path.with_suffix('.html')}", highlight=False)
    return 0


async def traced(
    config: WorkerConfig, payloads: Sequence[Payload], *, workers: int, at_once: int, secs: float
) -> list[Span]:
    """Keep so many instances in flight for a while; returns each batch, oldest first."""
    metrics = ModelMetrics(config.model.name)
    num_bytes = max(sum(map(len, payload.chunks)) for payload in payloads)
    arena = Arena(max(1 << 20, 4 * at_once * num_bytes))
    dispatcher = Dispatcher(
        name=config.model.name,
        arena=arena,
        admission=Admission(
            max_queue_length=2 * at_once,
            max_batch_size=config.max_batch_size,
            rejected=metrics.rejected,
        ),
        quarantine=Quarantine(name=config.model.name, duration_s=0.0),
        metrics=metrics,
        max_batch_size=config.max_batch_size,
    )
    engine = LocalEngine(arena)
    ids = [WorkerId(model=config.model.name, slot=slot) for slot in range(workers)]
    started = await asyncio.gather(*(engine.start(id, config, lambda _: None) for id in ids))
    spans: list[Span] = []
    try:
        for worker in started:
            dispatcher.attach(cast("WorkerHandle", _Traced(worker, spans)))
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


class _Traced:
    """A worker whose batches are noted."""

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
    """Of the time that one worker's preparing took, the part in which it computed other batches."""
    hidden = sum(
        max(0.0, min(one.prepare[1], other.compute[1]) - max(one.prepare[0], other.compute[0]))
        for one, other in itertools.permutations(spans, 2)
    )
    total = sum(span.prepare[1] - span.prepare[0] for span in spans)
    return hidden / total if total else 0.0


def busy(spans: Sequence[Span]) -> float:
    """Of one worker's time from its first batch to its last, the part in which it computed."""
    begins, ends = min(span.sent for span in spans), max(span.compute[1] for span in spans)
    return sum(span.compute[1] - span.compute[0] for span in spans) / (ends - begins)


def events(spans: Sequence[Span]) -> list[dict[str, object]]:
    """Chrome's "Trace Event Format": microseconds, a process per worker, a thread per stage."""
    origin = min(span.sent for span in spans)
    found: list[dict[str, object]] = []
    for worker in sorted({span.worker for span in spans}):
        name: dict[str, object] = {"name": f"worker {worker}"}
        found.append({"ph": "M", "name": "process_name", "pid": worker, "args": name})
        for tid, stage in enumerate(STAGES):
            args = {"name": stage}
            found.append(
                {"ph": "M", "name": "thread_name", "pid": worker, "tid": tid, "args": args}
            )
    for number, span in enumerate(spans):
        for tid, (stage, begin, end) in enumerate(span.stages()):
            event: dict[str, object] = {
                "name": f"{stage} {number}" if stage != "queued" else "queued",
                "cat": stage,
                "pid": span.worker,
                "tid": tid,
                "ts": (begin - origin) * 1e6,
                "args": {"batch": number, "size": span.num_items},
            }
            if stage == "queued":  # several may wait at once, which only such events may
                found.append({**event, "ph": "b", "id": number})
                found.append({**event, "ph": "e", "id": number, "ts": (end - origin) * 1e6})
            else:
                found.append({**event, "ph": "X", "dur": (end - begin) * 1e6})
    return found


def picture(spans: Sequence[Span]) -> str:
    """The last batches as SVG: a lane for each stage of each worker."""
    shown = sorted(spans, key=lambda span: span.sent)[-_MAX_SHOWN:]
    begins, ends = min(span.sent for span in shown), max(span.answered for span in shown)
    scale = (_WIDTH - _LEFT) / (ends - begins)
    lanes = [(worker, stage) for worker in sorted({s.worker for s in shown}) for stage in STAGES]
    height = (len(lanes) + 1) * _LANE
    parts = [
        f'<text x="0" y="{(row + 0.7) * _LANE:.1f}">worker {worker}: {stage}</text>'
        for row, (worker, stage) in enumerate(lanes)
    ]
    for number, span in enumerate(shown):
        for stage, begin, end in span.stages():
            x, y = _LEFT + (begin - begins) * scale, lanes.index((span.worker, stage)) * _LANE
            opacity = 0.35 if stage == "queued" else 0.6 + 0.4 * (number % 2)
            label = f"{stage}: {(end - begin) * 1e3:.2f} ms, {span.num_items} instances"
            parts.append(
                f'<rect x="{x:.2f}" y="{y + 2}" width="{max(0.5, (end - begin) * scale):.2f}" '
                f'height="{_LANE - 4}" fill="{_COLOURS[stage]}" opacity="{opacity:.1f}">'
                f"<title>{escape(label)}</title></rect>"
            )
    parts.append(
        f'<text x="{_LEFT}" y="{height - 6}">0</text><text x="{_WIDTH}" y="{height - 6}" '
        f'text-anchor="end">{(ends - begins) * 1e3:.0f} ms</text>'
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" xmlns="http://www.w3.org/2000/svg" '
        f'font-size="12" fill="currentColor" role="img">{"".join(parts)}</svg>'
    )


def _mean_ms(spans: Sequence[Span], stage: str) -> float:
    """What a stage takes per batch."""
    lengths = [end - begin for span in spans for name, begin, end in span.stages() if name == stage]
    return sum(lengths) / len(lengths) * 1e3
