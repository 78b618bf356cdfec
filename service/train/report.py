"""The report of a training run: `report.html`, and the last lines of the command."""

import base64
import csv
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from html import escape
from io import BytesIO
from itertools import islice
from pathlib import Path

from PIL import Image

from inferpool.models.errors import InputError
from inferpool.models.files.run_folder import Card, RunFolder, ScoreCard, read_labels
from inferpool.models.texts import on_one_line
from inferpool.models.training.events import AnyEvent, Started, Stepped, Validated, read_events
from inferpool.models.training.scores import ClassScore, Pair, class_scores
from inferpool.models.vision.images import decode_scaled
from inferpool.service.tools.trial.report import (
    Markup,
    Note,
    Part,
    Point,
    ReportTable,
    line_chart,
    write_page,
)

_MAX_MATRIX = 20
"""Classes for which a matrix is shown."""
_MAX_CONFUSIONS = 20
_MAX_CLASSES = 20
"""Classes that are shown at once; a reader may open the others."""
_MAX_PICTURES = 24
_MAX_TRIED = 200
"""Most pictures to open, in search of those that can be shown."""
_EDGE = 128
"""Pixels of the longer edge of a picture."""
_LOSSLESS_EDGE = 64
_JPEG_QUALITY = 80
_MAX_SKIPPED = 1000
_MAX_LISTED = 10
"""Skipped images that the command lists."""
_MAX_POINTS = 1000
_STRONGEST = 0.65
"""Opacity of the strongest shade; figures on it stay readable on white and on black."""
_CSS = f"""
.headline{{font-size:1.2rem;margin:1rem 0}}.headline b{{font-size:2.2rem;margin-right:.5rem}}
.matrix td,.matrix th{{padding:.3rem .5rem;text-align:center;border:1px solid var(--line)}}
.matrix th{{max-width:14rem;overflow:hidden;text-overflow:ellipsis}}
.matrix th.row{{text-align:right}}
.matrix th.column{{vertical-align:bottom}}
.matrix th.column span{{writing-mode:vertical-rl;transform:rotate(180deg);max-height:10rem;
overflow:hidden;text-overflow:ellipsis;text-align:left}}
.matrix td{{min-width:1.6rem}}.matrix .none{{color:var(--line)}}
.pictures{{display:grid;grid-template-columns:repeat(auto-fill,{_EDGE}px);gap:1rem}}
.pictures figure{{margin:0;font-size:.8rem;line-height:1.35;min-width:0}}
.pictures img{{display:block;width:{_EDGE}px;height:{_EDGE}px;object-fit:contain;
background:rgba(128,136,144,.12);margin-bottom:.3rem}}
.pictures .small{{image-rendering:pixelated}}
.pictures div{{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}}
"""


@dataclass(frozen=True, slots=True)
class _Answer:
    """The network's answer for a held-out image."""

    path: str
    label: str
    predicted: str
    score: float


def write_report(folder: RunFolder, card: Card, *, settings: str) -> None:
    """Write a run's report as one HTML file. Blocks.

    Args:
        folder: The run, which has ended well.
        card: Its card.
        settings: The settings that ran, as text.

    Raises:
        OSError: A file of the run cannot be read, or the report cannot be written.
        SourceError: The labels cannot be read.
    """
    answers = [
        _Answer(row["path"], row["label"], row["predicted"], float(row["score"]))
        for row in _rows(folder.predictions)
    ]
    with folder.metrics.open("rb") as lines:
        history = list(read_events(lines))
    confusions = Counter((answer.label, answer.predicted) for answer in answers)
    parts: list[Part] = [
        _headline(card.scores),
        _run_table(card, history),
        *_curves(history),
        *_confusion_parts(confusions, read_labels(folder.path)),
        *_mistakes(answers),
        *_skipped_parts(folder),
        *_what_ran(card, settings),
    ]
    title = f"{card.model} on {Path(card.data.source).name or card.data.source}"
    write_page(folder.report, on_one_line(title), f"trained by inferpool on {card.began}", parts)


def summary(folder: RunFolder, card: Card) -> list[str]:
    """Return the last lines of the command."""
    scores = card.scores
    where = f"{folder.path}/"
    skipped = [f"  {row['path']}: {row['reason']}" for row in _rows(folder.skipped)]
    lines = [
        f"held-out accuracy {_accuracy(scores)}: {_right(scores)}, epoch {scores.best_epoch} of "
        f"{scores.epochs}"
    ]
    if skipped:
        images = "1 image" if len(skipped) == 1 else f"{len(skipped):,} images"
        lines += [f"{images} could not be read:", *skipped[:_MAX_LISTED]]
    if len(skipped) > _MAX_LISTED:
        lines.append(f"  and {len(skipped) - _MAX_LISTED:,} more in {folder.skipped}")
    lines.append(f"the run is in {where}, its report is {folder.report}")
    lines.append(f"to serve it: inferpool serve {shlex.quote(where)}")
    return [on_one_line(line) for line in lines]


def _rows(path: Path) -> list[dict[str, str]]:
    """Read a CSV file of the run; no rows if it does not exist."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        return list(csv.DictReader(file))


def _headline(scores: ScoreCard) -> Part:
    share, _, interval = _accuracy(scores).partition(" (")
    html = (
        f'<p class="headline"><b>{share}</b> held-out accuracy<br>'
        f'<span class="faint">{interval.removesuffix(")")}; {_right(scores)}</span></p>'
    )
    return Markup(html=html, css=_CSS)


def _accuracy(scores: ScoreCard) -> str:
    low, high = _percent(scores.low), _percent(scores.high)
    return f"{_percent(scores.accuracy)} (95 % interval {low} to {high})"


def _right(scores: ScoreCard) -> str:
    return f"{scores.num_right:,} of {scores.num_images:,} images"


def _run_table(card: Card, history: Sequence[AnyEvent]) -> Part:
    data, scores, transform = card.data, card.scores, card.transform
    starts = [event for event in history if isinstance(event, Started)]
    options = ", ".join(f"{name} = {value!r}" for name, value in card.options.items())
    rows = [
        ("network", card.model + (f" ({options})" if options else "")),
        ("images from", data.source),
        (
            "images",
            f"{data.num_training:,} to train on, {data.num_validation:,} held out, "
            f"{data.num_skipped:,} skipped; {len(data.per_class):,} classes",
        ),
        (
            "input",
            f"{transform.crop} x {transform.crop} pixels, from the middle of images resized to a "
            f"short edge of {transform.resize} ({transform.interpolation})",
        ),
        (
            "epochs",
            f"{scores.epochs:,}; the weights are those of epoch {scores.best_epoch:,}, the best on "
            "the held-out images",
        ),
        ("held-out loss", f"{scores.loss:.4g}"),
        ("time", f"{_duration(scores.seconds)}, {scores.images_per_s:,.0f} images/s"),
    ]
    if starts:
        devices = ", ".join(f"{num} x {name}" for name, num in Counter(starts[-1].devices).items())
        rows.append(("ranks", f"{starts[-1].num_ranks} ({devices})"))
    if len(starts) > 1:
        rows.append(("starts", f"{len(starts)}"))
    shown = [(name, on_one_line(text)) for name, text in rows]
    return ReportTable(title="", columns=("", ""), rows=shown, texts=(0, 1))


def _curves(history: Sequence[AnyEvent]) -> Iterator[Part]:
    """Yield charts of the figures from the last pass over each step."""
    steps, epochs = dict[int, Stepped](), dict[int, Validated]()
    for event in history:
        match event:
            case Started():  # from a checkpoint: later steps are done again
                steps = {step: each for step, each in steps.items() if step <= event.step}
                epochs = {step: each for step, each in epochs.items() if step <= event.step}
            case Stepped():
                steps[event.step] = event
            case Validated():
                epochs[event.step] = event
    x_label = "steps of the optimizer"
    losses: dict[str, list[Point]] = {
        "training": _thinned([(step, each.loss) for step, each in steps.items()]),
        "held out": [(step, each.loss) for step, each in epochs.items()],
    }
    accuracies: dict[str, list[Point]] = {
        "held out": [(step, each.accuracy) for step, each in epochs.items()]
    }
    rates = {"rate": _thinned([(step, each.learning_rate) for step, each in steps.items()])}
    speeds = {"images/s": _thinned([(step, each.images_per_s) for step, each in steps.items()])}
    for title, y_label, lines, mode in (
        ("Loss", "cross entropy", losses, "lines" if len(epochs) > 1 else "lines+markers"),
        ("Accuracy on held-out images", "share that is right", accuracies, "lines+markers"),
        ("Learning rate", "rate", rates, "lines"),
        ("Speed", "images/s", speeds, "lines"),
    ):
        if any(lines.values()):
            yield line_chart(title, x_label, y_label, lines, mode=mode)


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Return means of neighbours, to limit the number of points."""
    width = -(-len(points) // _MAX_POINTS) or 1
    groups = [points[first : first + width] for first in range(0, len(points), width)]
    # A point is at the end of its group, like an event.
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def _confusion_parts(confusions: Mapping[Pair, int], labels: Sequence[str]) -> Iterator[Part]:
    scores = class_scores(confusions, labels)
    if len(labels) <= _MAX_MATRIX:
        yield _matrix(confusions, scores)
    else:
        yield _confused_pairs(confusions, scores)
    worst = sorted(scores, key=lambda each: (not each.num_images, each.recall, each.num_right))
    shown = scores if len(scores) <= _MAX_CLASSES else worst[:_MAX_CLASSES]
    title = "Classes" if len(scores) <= _MAX_CLASSES else "Classes that are recognised least"
    yield _class_table(title, shown)
    if len(scores) > _MAX_CLASSES:
        yield _class_table(f"All {len(scores):,} classes", scores, is_folded=True)


def _matrix(confusions: Mapping[Pair, int], scores: Sequence[ClassScore]) -> Part:
    labels = [score.label for score in scores]
    names = {label: escape(on_one_line(label)) for label in labels}
    heads = "".join(
        f'<th class="column" title="{name}"><span>{name}</span></th>' for name in names.values()
    )
    rows = []
    for score in scores:
        cells = [_cell(confusions.get((score.label, found), 0), score, found) for found in labels]
        name = names[score.label]
        rows.append(f'<tr><th class="row" title="{name}">{name}</th>{"".join(cells)}</tr>')
    html = (
        '<h2>Confusion matrix</h2><p class="faint">A row for each label, a column for each answer. '
        'The shade is the share of the row.</p><div class="scroll"><table class="matrix">'
        f"<tr><th></th>{heads}</tr>{''.join(rows)}</table></div>"
    )
    return Markup(html=html)


def _cell(num: int, score: ClassScore, found: str) -> str:
    if not num:
        return '<td class="none">·</td>'
    share = num / score.num_images
    if found == score.label:
        shade = f"26,127,90,{share * _STRONGEST:.2f}"
    else:  # the root, so that a few mistakes are visible
        shade = f"217,115,13,{share**0.5 * _STRONGEST:.2f}"
    return f'<td style="background:rgba({shade})">{num:,}</td>'


def _confused_pairs(confusions: Mapping[Pair, int], scores: Sequence[ClassScore]) -> Part:
    num_images = {score.label: score.num_images for score in scores}
    wrong = ((num, pair) for pair, num in confusions.items() if pair[0] != pair[1])
    most = nlargest(_MAX_CONFUSIONS, wrong, key=lambda each: each[0])
    rows = [
        (on_one_line(label), on_one_line(found), f"{num:,}", f"{num_images[label]:,}")
        for num, (label, found) in most
    ]
    columns = ("label", "taken for", "images", "of")
    return ReportTable(title="Most frequent confusions", columns=columns, rows=rows, texts=(0, 1))


def _class_table(title: str, scores: Sequence[ClassScore], *, is_folded: bool = False) -> Part:
    rows = [
        (
            on_one_line(score.label),
            f"{score.num_images:,}",
            f"{score.num_right:,}",
            _percent(score.recall),
            _percent(score.precision),
        )
        for score in scores
    ]
    return ReportTable(
        title=title,
        columns=("label", "held-out images", "right", "recall", "precision"),
        rows=rows,
        caption="Recall: the share of the images with the label that were recognised. Precision: "
        "the share of the answers with the label that were right.",
        is_folded=is_folded,
    )


def _mistakes(answers: Sequence[_Answer]) -> Iterator[Part]:
    wrong = (answer for answer in answers if answer.label != answer.predicted)
    worst = nlargest(_MAX_TRIED, wrong, key=lambda answer: answer.score)
    figures = list(islice(filter(None, map(_figure, worst)), _MAX_PICTURES))
    if figures:
        html = (
            '<h2>Worst mistakes</h2><p class="faint">Held-out images for which the network is most '
            f'sure of a wrong label.</p><div class="pictures">{"".join(figures)}</div>'
        )
        yield Markup(html=html)


def _figure(answer: _Answer) -> str:
    """Return a picture with its predicted label; an empty text if it cannot be read."""
    try:
        image, _ = decode_scaled(Path(answer.path).read_bytes(), least_edge=_EDGE)
    except (InputError, OSError, ValueError):  # gone since then, or no path
        return ""
    is_small = max(image.size) < _EDGE
    image.thumbnail((_EDGE, _EDGE), Image.Resampling.LANCZOS)
    kind = "PNG" if max(image.size) <= _LOSSLESS_EDGE else "JPEG"
    file = BytesIO()
    image.save(file, kind, quality=_JPEG_QUALITY)
    data = base64.b64encode(file.getvalue()).decode()
    texts = (answer.label, answer.predicted, answer.path, Path(answer.path).name)
    label, predicted, path, name = (escape(on_one_line(text)) for text in texts)
    return (
        f'<figure title="{path}"><img{" class=small" if is_small else ""} alt="{name}" '
        f'src="data:image/{kind.lower()};base64,{data}"><div>{answer.score:.3f} '
        f'<span class="bad">{predicted}</span></div><div>is {label}</div>'
        f'<div class="faint">{name}</div></figure>'
    )


def _skipped_parts(folder: RunFolder) -> Iterator[Part]:
    rows = [(on_one_line(row["path"]), on_one_line(row["reason"])) for row in _rows(folder.skipped)]
    if rows:
        num_more = len(rows) - _MAX_SKIPPED
        yield ReportTable(
            title="Images that could not be read",
            columns=("path", "reason"),
            rows=rows[:_MAX_SKIPPED],
            caption=f"and {num_more:,} more in {folder.skipped.name}" if num_more > 0 else "",
            texts=(0, 1),
        )


def _what_ran(card: Card, settings: str) -> Iterator[Part]:
    yield Markup(html="<h2>What ran</h2>")
    yield Note(text=card.command, tone="code")
    yield Note(text=settings.strip(), tone="code")
    versions = list(card.versions.items())
    yield ReportTable(title="Versions", columns=("", ""), rows=versions, texts=(0, 1))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _duration(seconds: float) -> str:
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {left} s" if minutes else f"{seconds:.1f} s"
