"""Judges presets and ways to decode while workers serve with others.

Runs in a process of its own, at low priority (`workers.speed.search_process`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import msgspec

from inferpool.models.base import Model
from inferpool.models.speed.attempts import attempt
from inferpool.models.speed.choose import choose
from inferpool.models.speed.compiled import MADE_OF
from inferpool.models.speed.options import SpeedOptions
from inferpool.models.speed.presets import presets_for
from inferpool.models.speed.selection import (
    PresetSelection,
    enter_all,
    enter_alone,
    enter_graphs,
)
from inferpool.models.speed.trial import Trial
from inferpool.models.speed_names import COMPILED, SpeedReport

_HOST_WAIT_S = 11 * 3600.0


class SearchError(Exception):
    """A search that found nothing; the message says why."""


def search(
    model: Model, options: SpeedOptions, key: str, on_progress: Callable[[str], None]
) -> SpeedReport:
    """Find something faster than what workers serve with; keep the verdict where they find it.

    While workers serve with no verdict, it makes the one that a start would make, which takes
    seconds. Otherwise it compiles, and judges all presets, which takes minutes.

    Args:
        model: Loaded on the workers' kind of device. Its network is another one afterwards.
        options: With a `cache_dir`, a `compile_package`, and what workers serve with as `chosen`.
        key: Key of the workers' own verdict.
        on_progress: Called with what is being done.

    Raises:
        SearchError: There is nothing to search for, or the last search for it was killed.
    """
    trial = Trial(model, options)
    if trial.obstacle:
        raise SearchError(trial.obstacle)
    if trial.key != key:
        raise SearchError(
            "the weights differ from one load to the next, so nothing can be kept; with "
            "speed_search = false each start measures for itself"
        )
    present = options.chosen
    options = replace(options, chosen=None)
    wait = partial(on_progress, "waiting for another search")
    if present is not None and present.is_provisional:
        # Another service with this folder may search for the same, and was not killed then.
        with trial.store.turn(f"{key}-search", _HOST_WAIT_S, wait), _only_attempt(trial):
            return _chosen(model, options, on_progress)
    with trial.store.host_turn(_HOST_WAIT_S, wait):
        known = trial.store.read(key)
        if known is None or not known.is_final:
            with _only_attempt(trial):
                name = known.preset if known else "exact"
                trial.store.write(key, _judge_all(trial, name, on_progress))
                return _chosen(model, options, on_progress)
        return _chosen(model, options, on_progress)


@contextmanager
def _only_attempt(trial: Trial) -> Iterator[None]:
    with attempt(trial.store.folder, trial.key) as is_first:
        if not is_first:
            raise SearchError(
                "the last search was killed, perhaps for want of memory; "
                "the next one is made a day after that"
            )
        yield


def _chosen(model: Model, options: SpeedOptions, on_progress: Callable[[str], None]) -> SpeedReport:
    """Choose as a worker does, so that it finds each verdict that it looks for."""
    return msgspec.structs.replace(choose(model, options, on_progress), measured_s=0.0)


def _judge_all(trial: Trial, present: str, on_progress: Callable[[str], None]) -> SpeedReport:
    selection = PresetSelection(trial)
    # What workers serve with first, so that it stays unless it is clearly beaten.
    names = sorted(presets_for(trial.exact, trial.device), key=lambda name: name != present)
    enter_all(selection, names, on_progress)
    is_complete = trial.is_on_cpu or enter_graphs(trial, selection, on_progress)
    for name in trial.compiled_presets:
        if trial.compiler_obstacle:
            selection.leave_out([name], trial.compiler_obstacle)
            continue
        base = MADE_OF[name]
        if name != "compiled" and base not in selection.gains:
            selection.leave_out([name], f"not tried: {base} is not used")
        elif name == "compiled" and selection.best in COMPILED:
            # In 16 bits it has won, which float32 will not undercut.
            selection.leave_out([name], f"not tried: {selection.best} is faster")
        elif _make(trial, selection, name, on_progress):
            enter_alone(trial, selection, [name], name, on_progress)
    selection.repeat(on_progress)
    return selection.verdict(is_cut_short=not is_complete)


def _make(
    trial: Trial, selection: PresetSelection, name: str, on_progress: Callable[[str], None]
) -> bool:
    if trial.package(name):
        return True
    on_progress(f"compiling the preset {name}")
    try:
        trial.make_package(name)
    except Exception as error:  # the network, the compiler or the disk may raise anything
        selection.cannot_make(name, error)
        return False
    return True
