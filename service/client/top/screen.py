"""Draws the view as lines of text, for a terminal of any size, or for a pipe."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.cells import cell_len
from rich.text import Text

from ..health import DeviceState, ModelState
from ..texts import escape, in_words
from .state import (
    EndingSeen,
    JobsSeen,
    PercentilesSeen,
    SampleSeen,
    Scene,
    StateSeen,
    View,
)
from .table import bars, duration, host_lines, rate, span, worker_lines

HOST_STYLES = {"ready": "green", "starting": "cyan", "unavailable": "bold red", "lost": "bold red"}
"""Styles by status; any other status is shown as a notice."""
_NOTICE = "yellow"
_LABEL_WIDTH = 11
_NARROW = 56
"""Width below which less important parts are left out."""
_TALL = 20
"""Least height at which parts are separated."""
_MAX_CHART = 60
_BATCHES_OF = 10
"""Seconds of batch sizes to sum up: one second may have few batches."""
_MAX_ENDINGS = 4
_HELP = (
    ("q", "quit"),
    ("p, space", "pause, or go on"),
    ("right, j, tab", "the next model"),
    ("left, k", "the previous model"),
    ("1 ... 9", "that model"),
    ("?", "show or hide this help"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenSize:
    """Size of the terminal, and whether it shows only ASCII (`is_plain`)."""

    width: int
    height: int
    is_plain: bool = False


def screen_lines(view: View, on: ScreenSize) -> list[Text]:
    """Return the lines of the terminal, at most as many as it has."""
    foot = _foot(view, on)
    room = max(0, on.height - 1)
    body = _help() if view.is_help else _body(view, on, room)
    body = body[:room] + [Text("")] * (room - len(body))
    return [_fitted(line, on.width) for line in [*body, foot][-on.height :]]


def page_lines(view: View, width: int, *, is_plain: bool) -> list[Text]:
    """Return all lines for all models, for a pipe or a file."""
    scene, on = view.scene, ScreenSize(width=width, height=1_000_000, is_plain=is_plain)
    assert scene.state is not None
    lines = _head(view.url, scene.state, on)
    if hosts := host_lines(scene.state.health, width, on.height):
        lines += [Text(""), *hosts]
    for model in scene.models:
        lines += [Text(""), *_model(scene, model, on, on.height)]
    return [_fitted(line, width) for line in lines]


def _body(view: View, on: ScreenSize, room: int) -> list[Text]:
    scene = view.scene
    if scene.state is None:
        return [Text(view.trouble or f"Connecting to {view.url}", style="dim")]
    lines = _head(view.url, scene.state, on, is_lost=bool(view.trouble))
    hosts = host_lines(scene.state.health, on.width, max(1, on.height // 5))
    lines += [*([Text("")] if hosts and on.height >= _TALL else []), *hosts]
    models = scene.models
    if not models:
        return [*lines, Text(""), Text("No models are served.", style="dim")]
    chosen = min(view.chosen, len(models) - 1)
    if len(models) > 1:
        lines.append(_tabs(models, chosen))
    if on.height >= _TALL:
        lines.append(Text(""))
    return lines + _model(scene, models[chosen], on, room - len(lines))


def _head(url: str, state: StateSeen, on: ScreenSize, *, is_lost: bool = False) -> list[Text]:
    host, status = state.host, "lost" if is_lost else state.health.status
    badge = (f" {status} ", f"reverse {HOST_STYLES.get(status, _NOTICE)}")
    first = Text.assemble((f"inferpool {escape(state.version)}", "bold"), " ", badge, " ", url)
    plural = "" if host.connections == 1 else "s"
    about = f"up {span(state.uptime_s)}, {host.connections:,} connection{plural}"
    second = Text(about, style="dim")
    fronts = state.health.fronts
    if len(fronts) > 1:
        num_up = sum(front.state == "up" for front in fronts)
        style = "dim" if num_up == len(fronts) else _NOTICE
        second.append(f", {num_up} of {len(fronts)} front ends", style=style)
    if host.arena_bytes:
        share = host.arena_used_bytes / host.arena_bytes
        text = f", arena {share:.0%}"
        if on.width >= _NARROW:
            text = f", shared memory {share:.0%} of {in_words(host.arena_bytes)}"
        second.append(text, style=_NOTICE if share > 0.9 else "dim")
    gpus, jobs = state.health.gpus, state.jobs
    lines = [first, second, *([_gpu_line(gpus)] if gpus else [])]
    if jobs is not None and (jobs.by_state or not jobs.open):
        lines.append(_jobs_line(jobs))
    return lines


def _gpu_line(gpus: Sequence[DeviceState]) -> Text:
    """Return one line about all GPUs; it names those in trouble."""
    lost = [str(gpu.index) for gpu in gpus if not gpu.up]
    parts = [f"{len(gpus) - len(lost)} GPU{'s' if len(gpus) - len(lost) != 1 else ''}"]
    busy = [gpu.utilization for gpu in gpus if gpu.utilization is not None]
    known = [gpu for gpu in gpus if gpu.memory_used_bytes is not None]
    used = sum(gpu.memory_used_bytes or 0 for gpu in known)
    heat = [gpu.temperature_c for gpu in gpus if gpu.temperature_c is not None]
    if busy:
        parts.append(f"{sum(busy) / len(busy):.0%} busy")
    if known:
        parts.append(f"{in_words(used)} of {in_words(sum(gpu.memory_bytes for gpu in known))}")
    if heat:
        parts.append(f"{max(heat):.0f} C")
    line = Text(", ".join(parts), style="dim")
    if lost:
        line.append(f", lost: {' '.join(lost)}", style="bold red")
    for gpu in gpus:
        if gpu.last_xid:
            line.append(f", Xid {gpu.last_xid} on {gpu.index}", style="bold red")
    return line


def _jobs_line(jobs: JobsSeen) -> Text:
    if not jobs.open:
        return Text("the store of jobs is not open", style=_NOTICE)
    states = ", ".join(f"{num:,} {escape(state)}" for state, num in jobs.by_state.items())
    line = Text(f"jobs: {states}", style="dim")
    if jobs.instances_waiting:
        line.append(f"; {jobs.instances_waiting:,} instances wait", style="dim")
        line.append(f", {rate(jobs.instances_per_s)}", style="cyan")
    return line


def _tabs(models: Sequence[ModelState], chosen: int) -> Text:
    line = Text()
    for number, model in enumerate(models, 1):
        is_chosen = number == chosen + 1
        style = "reverse" if is_chosen else ("" if model.ready else "red")
        line.append(f" {number} {escape(model.name)} ", style=style)
        line.append(" ")
    return line


def _model(scene: Scene, model: ModelState, on: ScreenSize, room: int) -> list[Text]:
    """Draw one model in at most `room` lines, with the workers that fit."""
    assert scene.state is not None
    now = scene.state.models.get(model.name, SampleSeen())
    lines = [_title(model, now), *_figures(scene.samples(model), now, on)]
    if model.change:
        lines.append(_line("change", escape(model.change), _NOTICE))
    elif tried := _last_tried(model):
        lines.append(_line("versions", *tried))
    if model.speed_search.state in ("searching", "changing"):
        lines.append(_line("speed", escape(model.speed_search.text)))
    endings = _endings(now.endings, on)
    spare = room - len(lines) - 1
    num_workers = len(model.workers) + len(model.other_workers) + 1
    workers = worker_lines(model, scene.batches_per_s, on.width, max(1, spare))
    lines += [Text(""), *workers] if spare > num_workers else workers
    left = room - len(lines) - 1
    if endings and left > 1:
        lines += [Text(""), *endings[:left]]
    return lines[: max(0, room)]


def _last_tried(model: ModelState) -> tuple[str, str] | None:
    """Return the result of the newest version, with its style, if it does not serve."""
    newest = model.versions[0] if model.versions else None
    if newest is None or newest.number == model.version:
        return None
    reason = f": {escape(newest.reason)}" if newest.reason else ""
    text = f"version {newest.number} {escape(newest.state.replace('_', ' '))}{reason}"
    return text, "red" if newest.state in ("refused", "rolled_back") else "dim"


def _title(model: ModelState, now: SampleSeen) -> Text:
    state = ("ready", "green") if model.ready else (model.reason or "not ready", "bold red")
    line = Text.assemble((escape(model.name), "bold"), " ", (escape(state[0]), state[1]))
    if model.version is not None and len(model.versions) > 1:
        line.append(f" version {model.version}")
    if now.source and now.source != model.name:
        line.append(f" {escape(now.source)}", style="dim")
    return line


def _figures(past: Sequence[SampleSeen], now: SampleSeen, on: ScreenSize) -> list[Text]:
    ended = now.instances_per_s
    p99s = [sample.latency_ms.p99 if sample.latency_ms else None for sample in past]
    waits = f"{now.queue_depth:,}" + (f" of {now.queue_limit:,}" if now.queue_limit else "")
    waiting = " waiting" if on.width >= _NARROW else ""
    lines = [
        _charted(
            "throughput",
            rate(ended.succeeded),
            [sample.instances_per_s.succeeded for sample in past],
            on,
        ),
        _charted("p99", duration(now.latency_ms.p99) if now.latency_ms else "-", p99s, on),
        _line("latency", _percentiles(now.latency_ms)),
        _line("queue", f"{waits}{waiting}, {now.in_flight:,} in flight"),
    ]
    if on.width >= _NARROW:
        lines.append(_line("of that", _parts(now)))
    refused = {reason: per_s for reason, per_s in now.rejected_per_s.items() if per_s > 0}
    lines.append(_line("refused", _reasons(refused), _NOTICE if refused else ""))
    lost = {
        name: per_s
        for name, per_s in (
            ("failed", ended.failed),
            ("expired", ended.expired),
            ("cancelled", ended.cancelled),
        )
        if per_s > 0
    }
    if lost:
        lines.append(_line("unanswered", _reasons(lost), "red" if ended.failed else _NOTICE))
    if now.quarantined:
        lines.append(_line("quarantine", f"{now.quarantined:,} inputs that kill workers", _NOTICE))
    lines.append(_line("batches of", _batches(past, now, on)))
    return lines


def _charted(label: str, value: str, values: Sequence[float | None], on: ScreenSize) -> Text:
    line = _line(label, value)
    room = min(_MAX_CHART, on.width - _LABEL_WIDTH - 13)
    if room >= 8 and values:
        line.pad_right(max(0, _LABEL_WIDTH + 12 - line.cell_len))
        line.append(bars(values[-room:], is_plain=on.is_plain), style="cyan")
    return line


def _percentiles(of: PercentilesSeen | None) -> str:
    if of is None:
        return "no answers in the last second"
    return f"{duration(of.p50)} p50, {duration(of.p95)} p95"


def _parts(now: SampleSeen) -> str:
    parts = [
        f"{what} {duration(of.p50)} p50, {duration(of.p99)} p99"
        for what, of in (("queue", now.queue_ms), ("inference", now.inference_ms))
        if of is not None
    ]
    return "; ".join(parts) or "-"


def _reasons(per_s: dict[str, float]) -> str:
    if not per_s:
        return "none"
    parts = sorted(per_s.items(), key=lambda part: -part[1])
    text = ", ".join(f"{escape(name)} {rate(each)}" for name, each in parts)
    return text if len(parts) == 1 else f"{rate(sum(per_s.values()))}: {text}"


def _batches(past: Sequence[SampleSeen], now: SampleSeen, on: ScreenSize) -> str:
    counts: Counter[str] = Counter()
    for sample in past[-_BATCHES_OF:]:
        counts.update(sample.batch_sizes)
    edges = sorted(counts, key=float)
    limit = f"(of {now.max_batch_size})" if now.max_batch_size else ""
    if not sum(counts.values()):
        return f"- {limit}".strip()
    heights = bars([counts[edge] for edge in edges], is_plain=on.is_plain)
    shown = "  ".join(f"{edge} {bar}" for edge, bar in zip(edges, heights, strict=True))
    return f"{shown}  {limit}".strip()


def _endings(endings: Sequence[EndingSeen], on: ScreenSize) -> list[Text]:
    lines = []
    for ending in endings[:_MAX_ENDINGS]:
        at = datetime.fromtimestamp(ending.time).astimezone().strftime("%H:%M:%S")
        name = escape(ending.worker.rpartition("/")[2] if on.width < _NARROW else ending.worker)
        style = "dim" if ending.cause == "asked" else _NOTICE
        lines.append(
            Text.assemble(
                (f"{at} ", "dim"),
                f"{name}#{ending.incarnation} ",
                (f"{escape(ending.cause)}: ", style),
                escape(ending.reason),
            )
        )
    return [Text("ended lately", style="dim"), *lines] if lines else []


def _foot(view: View, on: ScreenSize) -> Text:
    if view.trouble and view.scene.state is not None:
        return Text(escape(view.trouble), style="bold red")
    if view.is_paused and view.scene.state is not None:
        at = datetime.fromtimestamp(view.scene.state.time).astimezone().strftime("%H:%M:%S")
        return Text(f"paused at {at}, p goes on", style=f"reverse {_NOTICE}")
    keys = "q quit  p pause  ? help"
    if len(view.scene.models) > 1:
        keys = "q quit  p pause  left/right model  ? help"
    return Text(keys if cell_len(keys) <= on.width else "q quit  ? help", style="dim")


def _help() -> list[Text]:
    lines = [Text("Keys", style="bold"), Text("")]
    lines += [Text.assemble((f"{keys:15}", "bold"), what) for keys, what in _HELP]
    lines += [
        Text(""),
        Text("Rates and percentiles: the last second. Charts: the last minute."),
    ]
    return lines


def _line(label: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"{label:{_LABEL_WIDTH}}", "dim"), (text, style))


def _fitted(line: Text, width: int) -> Text:
    line.truncate(max(1, width), overflow="ellipsis")
    line.no_wrap = True
    return line
