"""Judges the presets that take minutes to make, while workers serve with another one.

Runs in a process of its own, at idle priority (`workers.beside.search_process`).
"""

import time
from collections.abc import Callable

from inferpool.models.base import Model
from inferpool.models.speed.choose import SpeedOptions
from inferpool.models.speed.names import COMPILED, SpeedReport
from inferpool.models.speed.presets import presets_for
from inferpool.models.speed.trial import PresetSelection, Trial, first_line
from inferpool.models.speed.verdicts import VerdictStore

_HOST_WAIT_S = 11 * 3600.0
_PATIENCE = 4.0
"""Time for measuring, as a multiple of a start's: nobody waits for this verdict."""


class SearchError(Exception):
    """A search that found nothing; the message says why."""


def search(
    model: Model, options: SpeedOptions, key: str, on_progress: Callable[[str], None]
) -> SpeedReport:
    """Compile, compare and measure, and keep the verdict where workers find it.

    It measures processor time, since this process gives way to all others.

    Args:
        model: Loaded on the CPU. Its network is another one afterwards.
        options: With a `cache_dir` and a `compile_package`.
        key: Key of the workers' own verdict.
        on_progress: Called with what is being done.

    Raises:
        SearchError: There is nothing to search for, or the last search for it was killed.
    """
    store = VerdictStore(options.cache_dir)
    trial = Trial(model, options.max_batch_size, store, clock=time.process_time, patience=_PATIENCE)
    if trial.obstacle:
        raise SearchError(trial.obstacle)
    if trial.key != key:
        raise SearchError("the weights differ from one load to the next, so nothing can be kept")
    with store.host_turn(_HOST_WAIT_S, lambda: on_progress("waiting for another search")):
        known = store.read(key)
        if known is not None and known.is_final:
            return known
        with store.attempt(key) as is_first:
            if not is_first:
                raise SearchError(
                    "the last search was killed, perhaps for want of memory; "
                    "the next one is made a day after that"
                )
            present = known.preset if known else "exact"
            report = _judge_all(trial, options, store, present, on_progress)
            store.write(key, report)
            return report


def _judge_all(
    trial: Trial,
    options: SpeedOptions,
    store: VerdictStore,
    present: str,
    on_progress: Callable[[str], None],
) -> SpeedReport:
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
        if _make(trial, options, store, selection, name, on_progress):
            on_progress(f"measuring the preset {name}")
            selection.enter(name)
    return selection.verdict()


def _make(
    trial: Trial,
    options: SpeedOptions,
    store: VerdictStore,
    selection: PresetSelection,
    name: str,
    on_progress: Callable[[str], None],
) -> bool:
    if trial.package(name):
        return True
    make = options.compile_package
    assert make is not None
    on_progress(f"compiling the preset {name}")
    try:
        store.make_package(trial.key, name, lambda draft: make(trial.exact, name, draft))
    except Exception as error:  # whatever the network, the compiler or the disk may raise
        selection.notes.append(f"{name} cannot be used: {first_line(error)}")
        return False
    return True
