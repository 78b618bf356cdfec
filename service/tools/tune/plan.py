"""The flags of `inferpool tune`, and the plan that they make.

Imported whenever the command's line is read, so it imports little.
"""

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from inferpool.service.settings.fields import add_flags_of, fields_of
from inferpool.service.tools.trial.flags import READERS, Count, Existing, Positive

STDOUT = "-"
_OWN_FLAGS = ("secs", "budget", "inputs", "output", "force", "html", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The goal: the most requests per second, with an optional limit of the latency."""

    p99_ms: Annotated[Positive | None, "MS"] = None
    """99 of 100 answers within this; where all connections at once are too many for it, as many as
    keep it (default: no limit)."""
    connections: Count = 64
    """Clients at once, each of which asks when it has its answer."""

    def is_met(self, p99_s: float, spare: float = 1.0) -> bool:
        """Return whether a latency is within the limit, with a factor to spare."""
        return self.p99_ms is None or p99_s * 1e3 * spare <= self.p99_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class TunePlan:
    """The load, its time, and the files of the result."""

    goal: Goal
    secs: Annotated[Positive, "S"] = 2
    """Measure each candidate for at least this long."""
    budget: Annotated[Positive, "S"] = 120
    """The time for all of it, if that suffices for one candidate."""
    inputs: Existing | None = None
    """Ask with this file, or with those of this folder: images, .npy, .safetensors, .json, .bin
    (default: photographs, or what the model declares)."""
    output: Annotated[str, "FILE"] = "inferpool.toml"
    """Write the settings there; - is stdout."""
    force: bool = False
    """Replace FILE if it is there."""
    html: Annotated[Path | None, "FILE"] = None
    """A page with table and plot."""
    json: bool = False
    """Print all figures as JSON, and the table on stderr."""
    # Least seconds of load before a candidate is measured.
    warm_s: float = 0.5
    # The same for a pipeline, which tries into how many pieces batches go best, and computes the
    # first of them twice: 16 clients of minilm_l6 got a fifth less in its first four seconds than
    # in the four that followed.
    warm_pipeline_s: float = 5.0

    @property
    def file(self) -> Path | None:
        """The file for the settings; None for stdout."""
        return None if self.output == STDOUT else Path(self.output)


def add_flags(parser: ArgumentParser) -> None:
    """The flags of the verb, beside those of the settings."""
    fields = (*fields_of(__name__, Goal.__name__), *fields_of(__name__, TunePlan.__name__))
    groups = {"p99_ms": "objective", "secs": "measuring", "output": "result"}
    add_flags_of(parser, fields, groups, READERS)


def plan_of(args: Namespace) -> TunePlan:
    """Return the plan that the flags make."""
    goal = Goal(connections=args.connections, p99_ms=args.p99_ms)
    return TunePlan(goal=goal, **{name: getattr(args, name) for name in _OWN_FLAGS})


def problem_with(plan: TunePlan) -> str:
    """Return why a result could not be written, before minutes of measuring; empty if it can."""
    if plan.file is not None and plan.file.exists() and not plan.force:
        return f"{plan.file} is there already; --force replaces it, --output names another"
    if plan.file is None and plan.json:
        return "--json prints on stdout, where --output - would print the settings; name a file"
    for path in (plan.file, plan.html):
        if path is not None and not path.absolute().parent.is_dir():
            return f"{path} cannot be written: there is no folder {path.parent}"
        if path is not None and path.is_dir():
            return f"{path} cannot be written: it is a folder"
    return ""
