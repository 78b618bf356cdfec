"""Writes models, versions and the results of changes as plain text."""

from ..texts import moment, table
from .admin import (
    ChangeSeen,
    FiguresSeen,
    ModelSeen,
    ModelsSeen,
)


def models_table(seen: ModelsSeen) -> str:
    """Return a table of all models and the versions that serve."""
    rows = [("MODEL", "VERSION", "STATE", "SOURCE", "WEIGHTS", "CHANGE")]
    for model in seen.models:
        serving = model.numbered(model.version)
        rows.append(
            (
                model.name,
                str(model.version or "-"),
                "ready" if model.ready else "not ready",
                serving.source if serving else "-",
                serving.weights if serving else "-",
                model.change,
            )
        )
    return table(rows)


def versions_table(model: ModelSeen) -> str:
    """Return a table of the versions of a model, the newest first."""
    rows = [("VERSION", "STATE", "SINCE", "SOURCE", "WEIGHTS", "")]
    for each in model.versions:
        about = [each.reason, figures_text(each.figures)]
        rows.append(
            (
                str(each.number),
                each.state.replace("_", " "),
                moment(each.since),
                each.source,
                each.weights,
                "; ".join(filter(None, about)),
            )
        )
    return table(rows)


def success_text(model: ModelSeen, change: ChangeSeen) -> str:
    """Return a text about a change that succeeded."""
    figures = _figures_of(model, change)
    until = "" if model.saved else " until the next start of the service, which forgets it"
    return f"{model.name}: version {change.version} serves{until}" + (figures and f" ({figures})")


def failure_text(model: ModelSeen, change: ChangeSeen) -> str:
    """Return why a change failed, and which version serves."""
    figures = _figures_of(model, change)
    subject = f"version {change.version}: " if change.version else ""
    serving = f"version {model.version} serves on" if model.version else "it is not served"
    return "\n".join(
        [
            f"{model.name}: {subject}{change.reason}",
            *([f"  figures: {figures}"] if figures else ()),
            f"  {serving}",
        ]
    )


def _figures_of(model: ModelSeen, change: ChangeSeen) -> str:
    version = model.numbered(change.version) if change.kind == "swap" else None
    return figures_text(version.figures) if version else ""


def figures_text(figures: FiguresSeen | None) -> str:
    """Return a comparison in one line; empty if there was none."""
    if figures is None:
        return ""
    texts = [
        _text("agreement {:.2%}", figures.agreement),
        _text("deviation {:.3g}", figures.deviation),
        _text("{:.2f} times as long", figures.latency_ratio),
        _text("{:.2f} times the memory", figures.memory_ratio),
        _text("accuracy {:.2%}", figures.accuracy),
        _text("accuracy before {:.2%}", figures.accuracy_before),
        f"validated on {figures.num_validated} inputs" if figures.num_validated else "",
        _text(
            f"faults on {{:.2%}} of {figures.num_answered} inputs of clients", figures.fault_share
        ),
        _text("{:.2%} before", figures.fault_share_before),
        _text("{:.2f} times as long for clients", figures.live_latency_ratio),
        f"{figures.num_faults} faults" if figures.num_faults else "",
        f"on {figures.num_inputs} inputs, {figures.num_live} of them live"
        if figures.num_inputs
        else "compared on no input",
    ]
    return ", ".join(filter(None, texts))


def _text(form: str, value: float | None) -> str:
    return "" if value is None else form.format(value)
