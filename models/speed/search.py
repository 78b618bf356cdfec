"""Judges presets and ways to decode while workers serve with others.

Runs in a process of its own, at low priority (`workers.speed.search_process`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec

from inferpool.models.base import Model
from inferpool.models.speed.attempts import attempt
from inferpool.models.speed.choose import choose
from inferpool.models.speed.options import SpeedOptions
from inferpool.models.speed.presets import presets_for
from inferpool.models.speed.trial import PresetSelection, Trial, first_line
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
        model: Loaded on the CPU. Its network is another one afterwards.
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
    if present is not None and present.is_provisional:
        with _only_attempt(trial):
            return _chosen(model, options, on_progress)
    with trial.store.host_turn(_HOST_WAIT_S, lambda: on_progress("waiting for another search")):
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
    agreeing = set()
    for name in names:
        on_progress(f"measuring the preset {name}")
        if selection.enter(name):
            agreeing.add(name)
    for name in COMPILED:
        if name == "compiled_bf16" and "bf16" not in agreeing:
            continue  # it computes the same, which has strayed or is not for this processor
        if selection.best.preset in COMPILED:
            break  # the one in bf16 has won, which float32 will not undercut
        if _make(trial, selection, name, on_progress):
            on_progress(f"measuring the preset {name}")
            selection.enter(name)
    return selection.verdict()


def _make(
    trial: Trial, selection: PresetSelection, name: str, on_progress: Callable[[str], None]
) -> bool:
    if trial.package(name):
        return True
    on_progress(f"compiling the preset {name}")
    try:
        trial.make_package(name)
    except Exception as error:  # the network, the compiler or the disk may raise anything
        selection.notes.append(f"{name} cannot be used: {first_line(error)}")
        return False
    return True
