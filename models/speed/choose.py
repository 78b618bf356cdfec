"""Chooses the preset to serve with, by trying all, and keeps the choice. Worker processes only."""

import gc
import logging
import math
from collections.abc import Callable

import msgspec
from torch import nn

from inferpool.models.accelerator.device import release_memory
from inferpool.models.base import Model
from inferpool.models.errors import ModelError
from inferpool.models.speed.attempts import was_killed
from inferpool.models.speed.compiled import can_compile, compiler_for
from inferpool.models.speed.decoding import DecodeTrial
from inferpool.models.speed.options import SpeedOptions
from inferpool.models.speed.presets import presets_for
from inferpool.models.speed.selection import (
    PresetSelection,
    enter_all,
    enter_alone,
    enter_graphs,
)
from inferpool.models.speed.trial import Trial, first_line
from inferpool.models.speed_names import COMPILED, FOR_ACCELERATORS, GRAPHED, SpeedReport
from inferpool.models.tolerance import Agreement

logger = logging.getLogger(__name__)

_LATER = "speed presets are measured while it serves"
_LOCK_WAIT_S = 60.0
_COMPILE_WAIT_S = 600.0


def choose(model: Model, options: SpeedOptions, on_progress: Callable[[str], None]) -> SpeedReport:
    """Choose a loaded model's fastest network and decoder that answer as its own do.

    The caller's thread is the one that computes in service, since graphs are captured here.

    Raises:
        ModelError: The preset or decoder that the settings name cannot be used with this model.
    """
    report = _choose(model, options, on_progress)
    gc.collect()  # networks that were tried refer to themselves; a worker freezes the rest
    release_memory()  # of theirs, for other replicas on this device
    return report


def _choose(model: Model, options: SpeedOptions, on_progress: Callable[[str], None]) -> SpeedReport:
    exact = model.network
    report = _choose_network(model, options, on_progress)
    if options.chosen is not None:
        chosen = options.chosen
        model.decode = chosen.decode
        return msgspec.structs.replace(report, decode=chosen.decode, decode_gain=chosen.decode_gain)
    if options.decode == "exact" or (options.decode == "auto" and options.speed == "exact"):
        return report
    if options.decode == "auto" and report.is_provisional:
        return report  # decoding is judged together with the preset
    is_wanted = options.decode == "fast"
    may_wait = options.speed == "auto" and report.key and not is_wanted
    return DecodeTrial(model, exact, options).choose(
        report,
        is_wanted=is_wanted,
        measures=options.measures or not may_wait,
        on_progress=on_progress,
    )


def _choose_network(
    model: Model, options: SpeedOptions, on_progress: Callable[[str], None]
) -> SpeedReport:
    if options.speed == "exact":
        return SpeedReport()
    trial = Trial(model, options)
    if options.chosen:
        chosen = msgspec.structs.replace(options.chosen, measured_s=0.0)
        # It was verified in this run, and a worker that crashed must be back soon.
        if known := _reused(trial, chosen, is_verified=True):
            return known
    if trial.obstacle:
        if options.speed != "auto":
            raise ModelError(f'speed = "{options.speed}" cannot be used: {trial.obstacle}')
        return SpeedReport(note=trial.obstacle)
    if options.speed in COMPILED:
        _compile(trial, options.speed, on_progress)
        try:
            return _apply_named(trial, options.speed)
        except ModelError:
            if trial.package(options.speed):
                raise
            _compile(trial, options.speed, on_progress)  # what could not be loaded was set aside
    if options.speed != "auto":
        return _apply_named(trial, options.speed)
    return _choose_best(trial, on_progress)


def _compile(trial: Trial, preset: str, on_progress: Callable[[str], None]) -> None:
    """Compile the package, or wait for the worker that compiles it."""
    if trial.is_on_cpu and preset in FOR_ACCELERATORS:
        raise ModelError(f'speed = "{preset}" is for GPUs')
    if compiler_for(trial.device) is None:
        raise ModelError(f'speed = "{preset}" needs a compiler for {trial.device.type}')
    if trial.has_varying_shapes:
        raise ModelError(
            f'speed = "{preset}" is for inputs of one shape, and the samples have several'
        )
    if trial.store.folder is None or trial.options.compile_package is None:
        raise ModelError(f'speed = "{preset}" needs a cache_dir')
    if trial.package(preset):
        return
    turn = trial.store.turn(
        trial.key, _COMPILE_WAIT_S, lambda: on_progress("waiting for the compiler")
    )
    with turn:
        if trial.package(preset):
            return
        if not can_compile():
            raise ModelError(f'speed = "{preset}" needs a C++ compiler (g++, or the one in CXX)')
        on_progress("compiling, which takes a minute or two the first time")
        try:
            trial.make_package(preset)
        except Exception as error:
            raise ModelError(f'speed = "{preset}" cannot be used: {first_line(error)}') from error


def _apply_named(trial: Trial, name: str) -> SpeedReport:
    if name in FOR_ACCELERATORS and trial.is_on_cpu:
        raise ModelError(f'speed = "{name}" is for GPUs')
    try:
        network = trial.prepare(name)
        agreement = trial.compare(network)
    except Exception as error:  # the network is the user's: it may raise anything
        if name not in GRAPHED:
            raise ModelError(f'speed = "{name}" cannot be used: {first_line(error)}') from error
        note = f"{name} fails: {first_line(error)}"
    else:
        return _applied(trial, name, network, agreement)
    trial.recover()
    logger.warning('speed = "%s" cannot be used, and "%s" serves: %s', name, GRAPHED[name], note)
    return msgspec.structs.replace(_apply_named(trial, GRAPHED[name]), note=note)


def _applied(trial: Trial, name: str, network: nn.Module, agreement: Agreement) -> SpeedReport:
    if not agreement.is_within:
        logger.warning('speed = "%s" changes answers: %s', name, agreement.text)
    gain = trial.gain(network)
    if gain < 1:
        logger.warning('speed = "%s" is slower than "exact" here: %.2g x', name, gain)
    trial.model.network = network
    return SpeedReport(preset=name, gain=gain, deviation=agreement.deviation)


def _choose_best(trial: Trial, on_progress: Callable[[str], None]) -> SpeedReport:
    measures = trial.options.measures or was_killed(trial.store.folder, trial.key)
    if known := _kept(trial, may_be_better=measures and bool(trial.packages())):
        return known
    if not measures:
        return SpeedReport(note=_LATER, is_final=False, is_provisional=True, key=trial.key)
    times = trial.times
    began = times.now()
    turn = trial.store.turn(
        trial.key, _LOCK_WAIT_S, lambda: on_progress("waiting for the choice of a preset")
    )
    with turn:
        report = _kept(trial, may_be_better=bool(trial.packages()))
        if report is None:
            trial.until = times.now() + times.budget_s
            report = _measure(trial, on_progress)
            trial.store.write(trial.key, report)
    return msgspec.structs.replace(report, measured_s=times.now() - began)


def _kept(trial: Trial, *, may_be_better: bool) -> SpeedReport | None:
    """Apply the kept verdict, if it still holds for the first samples.

    If something `may_be_better`, because there was no package yet when it was made, it must be
    final.
    """
    known = trial.store.read(trial.key)
    if known is None or (may_be_better and not known.is_final):
        return None
    return _reused(trial, known)


def _reused(trial: Trial, known: SpeedReport, *, is_verified: bool = False) -> SpeedReport | None:
    """Apply an earlier choice, if it still works, and agrees unless it `is_verified`."""
    if known.preset == "exact":
        return known
    try:
        network = trial.prepare(known.preset)
        agreement = None if is_verified else trial.compare(network, max_batches=1)
    except Exception as error:  # the network is the user's: it may raise anything
        logger.warning("the preset %s no longer works: %s", known.preset, first_line(error))
    else:
        if agreement is None or agreement.is_within:
            trial.model.network = network
            return known
        logger.warning("the preset %s no longer agrees: %s", known.preset, agreement.text)
    trial.recover()
    return None


def _measure(trial: Trial, on_progress: Callable[[str], None]) -> SpeedReport:
    selection = PresetSelection(trial)
    packages, names = trial.packages(), presets_for(trial.exact, trial.device)
    if trial.is_on_cpu:  # where the time is bounded, and packages are likely the best
        is_complete = enter_all(selection, [*packages, *names], on_progress)
    else:
        is_complete = enter_all(selection, names, on_progress)
        is_complete = is_complete and enter_graphs(trial, selection, on_progress)
        for name in packages:
            enter_alone(trial, selection, [name], name, on_progress)
    if is_complete and math.isinf(trial.until):
        selection.repeat(on_progress)
    obstacle = trial.compiler_obstacle
    missing = [name for name in trial.compiled_presets if name not in packages]
    selection.leave_out(missing, obstacle or "not yet compiled")
    trial.model.network = selection.take()
    return selection.verdict(is_cut_short=not is_complete, is_final=bool(obstacle))
