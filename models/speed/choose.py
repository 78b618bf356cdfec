"""Chooses the preset to serve with: tries them, compares, and remembers. Worker processes only."""

import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from models.agreement import Agreement
from models.base import Features, Model
from models.errors import ModelError
from models.speed.compiled import Compiled, can_compile
from models.speed.decoding import DecodeTrial
from models.speed.names import SpeedReport
from models.speed.presets import can_be_changed, prepare, presets_for
from models.speed.serving import serving
from models.speed.verdicts import VerdictStore, fingerprint

logger = logging.getLogger(__name__)

_BUDGET_S = 10.0
"""What trying may take; a preset that is not judged by then is left out."""
_EXACT_S = 1.5
"""Samples are compared for as long as the exact network takes no longer than this for them."""
_ROUNDS_S = 0.5
"""What timing one preset at one batch size may take, once there are `_MIN_ROUNDS`."""
_MIN_ROUNDS, _MAX_ROUNDS = 3, 15
_CLEAR_SPREAD = 1.1
"""Rounds that differ by no more than this factor need no more of them."""
_BATCH_S = 0.25
"""Batches that would take longer are made smaller, so that a few of them fit into the time."""
_COMPARED_BATCH = 8
_MAX_TIMED_BATCH = 32
_LEAST_GAIN = 1.1
"""A preset must be faster than what we have by this factor: less may be noise."""
_LOCK_WAIT_S = 60.0
_COMPILE_WAIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedWish:
    """What the settings say of speed."""

    speed: str
    """One of `names.CHOICES`."""
    max_batch_size: int
    cache_dir: Path | None
    """Where verdicts and compiled packages are kept; None keeps them nowhere."""
    compile_package: Callable[[nn.Module, Path], None] | None = None
    """Compiles the model's network to a package, or raises what tells why not."""
    chosen: SpeedReport | None = None
    """What an earlier incarnation of this worker chose, to be applied as it is."""
    decode: str = "exact"
    """One of `names.DECODE_CHOICES`."""


def choose(model: Model, wish: SpeedWish, on_progress: Callable[[str], None]) -> SpeedReport:
    """Give a loaded model the fastest network and way to decode that answer as its own do.

    Raises:
        ModelError: What was asked for by name cannot be applied to this model.
    """
    exact = model.network
    report = _choose_network(model, wish, on_progress)
    if wish.chosen is not None:
        chosen = wish.chosen
        model.decode = chosen.decode
        return msgspec.structs.replace(report, decode=chosen.decode, decode_gain=chosen.decode_gain)
    if wish.decode == "exact" or (wish.decode == "auto" and wish.speed == "exact"):
        return report
    trial = DecodeTrial(model, exact, VerdictStore(wish.cache_dir))
    return trial.choose(report, is_wanted=wish.decode == "fast", on_progress=on_progress)


def _choose_network(
    model: Model, wish: SpeedWish, on_progress: Callable[[str], None]
) -> SpeedReport:
    if wish.speed == "exact":
        return SpeedReport()
    if wish.chosen and (known := _apply_chosen(model, wish, wish.chosen)):
        return known
    trial = _Trial(model, wish.max_batch_size)
    if trial.obstacle:
        if wish.speed != "auto":
            raise ModelError(f'speed = "{wish.speed}" cannot be had: {trial.obstacle}')
        return SpeedReport(note=trial.obstacle)
    store = VerdictStore(wish.cache_dir)
    key = trial.key()
    trial.package = store.package(key)
    if wish.speed == "compiled":
        _compile(trial, wish, store, key, on_progress)
    if wish.speed != "auto":
        return _apply_named(trial, wish.speed)
    return _choose_best(trial, store, key, on_progress)


def _apply_chosen(model: Model, wish: SpeedWish, chosen: SpeedReport) -> SpeedReport | None:
    """Apply what was verified in this run already; a crash must not wait for more than that."""
    chosen = msgspec.structs.replace(chosen, measured_s=0.0)
    if chosen.preset == "exact":
        return chosen
    trial = _Trial(model, wish.max_batch_size, num_samples=1)
    try:
        if chosen.preset == "compiled":
            trial.package = VerdictStore(wish.cache_dir).package(trial.key())
        model.network = trial.prepare(chosen.preset)
    except Exception as error:  # the network is the user's: it may raise anything
        logger.warning("the preset %s no longer works: %s", chosen.preset, _first_line(error))
        return None
    return chosen


def _compile(
    trial: "_Trial",
    wish: SpeedWish,
    store: VerdictStore,
    key: str,
    on_progress: Callable[[str], None],
) -> None:
    """See that there is a package; one worker compiles, the others wait for it."""
    if trial.device.type != "cpu":
        raise ModelError('speed = "compiled" is for CPUs')
    if trial.package is None or wish.compile_package is None:
        raise ModelError('speed = "compiled" needs a cache_dir')
    if trial.package.exists():
        return
    with store.turn(key, _COMPILE_WAIT_S, lambda: on_progress("waiting for the compiler")):
        if trial.package.exists():
            return
        if not can_compile():
            raise ModelError('speed = "compiled" needs a C++ compiler (g++, or the one in CXX)')
        on_progress("compiling, which takes a minute or two the first time")
        try:
            wish.compile_package(trial.exact, trial.package)
        except Exception as error:
            raise ModelError(f'speed = "compiled" cannot be had: {_first_line(error)}') from error


def _apply_named(trial: "_Trial", name: str) -> SpeedReport:
    try:
        network = trial.prepare(name)
        agreement = trial.compare(network)
    except Exception as error:  # the network is the user's: it may raise anything
        raise ModelError(f'speed = "{name}" cannot be had: {_first_line(error)}') from error
    if not agreement.is_within:
        logger.warning('speed = "%s" changes answers: %s', name, agreement.text)
    gain = trial.gain(network)
    trial.model.network = network
    return SpeedReport(preset=name, gain=gain, deviation=agreement.deviation)


def _choose_best(
    trial: "_Trial", store: VerdictStore, key: str, on_progress: Callable[[str], None]
) -> SpeedReport:
    if trial.has_package:
        key += "-compiled"  # once there is a package, the choice is another
    if known := _reuse(trial, store.read(key)):
        return known
    began = time.monotonic()
    with store.turn(key, _LOCK_WAIT_S, lambda: on_progress("waiting for the choice of a preset")):
        report = _reuse(trial, store.read(key))
        if report is None:
            report = _measure(trial, on_progress)
            store.write(key, report)
    return msgspec.structs.replace(report, measured_s=time.monotonic() - began)


def _reuse(trial: "_Trial", known: SpeedReport | None) -> SpeedReport | None:
    """Apply what was chosen before, if it still holds on the first of the samples."""
    if known is None or known.preset == "exact":
        return known
    try:
        network = trial.prepare(known.preset)
        agreement = trial.compare(network, max_batches=1)
    except Exception as error:
        logger.warning("the preset %s no longer works: %s", known.preset, _first_line(error))
        return None
    if not agreement.is_within:
        logger.warning("the preset %s no longer agrees: %s", known.preset, agreement.text)
        return None
    trial.model.network = network
    return known


def _measure(trial: "_Trial", on_progress: Callable[[str], None]) -> SpeedReport:
    names = presets_for(trial.exact, trial.device)
    if trial.has_package:
        names.insert(0, "compiled")
    trial.until = time.monotonic() + _BUDGET_S
    best, best_network = SpeedReport(), trial.exact
    notes = []
    is_cut_short = False
    for number, name in enumerate(names, 1):
        on_progress(f"measuring speed presets {number}/{len(names)}: {name}")
        try:
            network = trial.prepare(name)
            agreement = trial.compare(network)
            if not agreement.is_within:
                notes.append(f"{name} refused: {agreement.text}")
                continue
            gain = trial.gain(network)
        except _NoTimeLeftError:
            is_cut_short = True
            notes.append(f"no time was left for {', '.join(names[number - 1 :])}")
            break
        except Exception as error:  # the network is the user's: it may raise anything
            logger.debug("the preset %s fails", name, exc_info=True)
            notes.append(f"{name} fails: {_first_line(error)}")
            continue
        notes.append(f"{name} {gain:.2f} x")
        if gain > best.gain * _LEAST_GAIN:
            best = SpeedReport(preset=name, gain=gain, deviation=agreement.deviation)
            best_network = network
    trial.model.network = best_network
    return msgspec.structs.replace(best, note="; ".join(notes), is_cut_short=is_cut_short)


class _NoTimeLeftError(Exception):
    """It is past `_Trial.until`."""


class _Trial:
    """A model, its exact network, and samples to try others on."""

    def __init__(self, model: Model, max_batch_size: int, num_samples: int | None = None) -> None:
        """Prepare the samples: all, or the first few."""
        self.model = model
        self.until = math.inf
        """No batch is begun after this moment of CLOCK_MONOTONIC."""
        self.obstacle = ""
        self.package: Path | None = None
        """Where the compiled network lies, if it is there."""
        network = model.network
        if not isinstance(network, nn.Module) or not can_be_changed(network):
            self.obstacle = "no float32 network to change"
            return
        self.exact = network
        tensor = next(iter(network.state_dict().values()))
        self.device = tensor.device
        is_cuda = self.device.type == "cuda"
        self.device_name = torch.cuda.get_device_name(self.device) if is_cuda else "cpu"
        with torch.inference_mode():
            self._features = [model.preprocess(item) for item in model.samples()[:num_samples]]
        if not self._features:
            self.obstacle = "no sample inputs to verify presets on"
            return
        self._compared: list[tuple[Features, Features]] = []
        """Batches of samples, with the exact outputs."""
        self._max_batch_size = max_batch_size
        self._single_s: float | None = None

    def key(self) -> str:
        """What a verdict on this is kept under."""
        return fingerprint(
            self.exact, self.device_name, torch.get_num_threads(), self._max_batch_size
        )

    @property
    def has_package(self) -> bool:
        """The network has been compiled, once."""
        return self.package is not None and self.package.exists()

    def prepare(self, name: str) -> nn.Module:
        """The network of a preset."""
        if name == "compiled":
            assert self.package is not None
            return Compiled(self.package)
        sample = self._batch(1)
        return prepare(name, self.exact, lambda network: self._run(network, sample))

    def compare(self, network: nn.Module, max_batches: int | None = None) -> Agreement:
        """Hold the outputs of a network against the exact ones."""
        pairs = [(exact, self._run(network, batch)) for batch, exact in self._exact(max_batches)]
        exact, other = (
            {name: torch.cat([each[side][name] for each in pairs]) for name in pairs[0][side]}
            for side in (0, 1)
        )
        return self.model.tolerance.judge(exact, other)

    def gain(self, network: nn.Module) -> float:
        """How many times as fast it is as the exact one: the geometric mean over batch sizes."""
        sizes = {1, self._fitting(min(self._max_batch_size, _MAX_TIMED_BATCH))}
        gains = [self._gain(network, self._batch(size)) for size in sorted(sizes)]
        return float(math.prod(gains) ** (1 / len(gains)))

    def _gain(self, network: nn.Module, batch: Features) -> float:
        """The median over rounds in which both take turns, so that a slow moment hits both."""
        ratios: list[float] = []
        began = time.monotonic()
        for each in (network, self.exact):
            self._run(each, batch)
        while len(ratios) < _MIN_ROUNDS or (
            time.monotonic() < min(began + _ROUNDS_S, self.until)
            and len(ratios) < _MAX_ROUNDS
            and max(ratios) > min(ratios) * _CLEAR_SPREAD
        ):
            seconds = []
            for each in (self.exact, network):
                start = time.perf_counter()
                self._run(each, batch)
                seconds.append(time.perf_counter() - start)
            ratios.append(seconds[0] / seconds[1])
        return statistics.median(ratios)

    def _exact(self, max_batches: int | None) -> Sequence[tuple[Features, Features]]:
        """Batches of samples with their exact outputs, computed when first asked for."""
        size = self._fitting(_COMPARED_BATCH)
        if max_batches is not None:
            batch = self._batch(size)
            return self._compared[:max_batches] or [(batch, self._run(self.exact, batch))]
        if not self._compared:
            began = time.monotonic()
            for start in range(0, len(self._features), size):
                batch = self._collate(self._features[start : start + size])
                self._compared.append((batch, self._run(self.exact, batch)))
                if time.monotonic() - began > _EXACT_S:
                    break
        return self._compared

    def _fitting(self, size: int) -> int:
        """That size, or a smaller one if a batch of it would take too long."""
        if self._single_s is None:
            single = self._batch(1)
            self._run(self.exact, single)  # the first call of a network is no measure
            began = time.monotonic()
            self._run(self.exact, single)
            self._single_s = time.monotonic() - began
        return max(1, min(size, int(_BATCH_S / max(self._single_s, 1e-6))))

    def _batch(self, size: int) -> Features:
        features = self._features
        return self._collate([features[i % len(features)] for i in range(size)])

    @torch.inference_mode()
    def _collate(self, features: Sequence[Features]) -> Features:
        return self.model.collate(features)

    @torch.inference_mode()
    def _run(self, network: nn.Module, batch: Features) -> dict[str, Tensor]:
        if time.monotonic() > self.until:
            raise _NoTimeLeftError
        with serving(self.model, network):
            outputs = self.model.forward(batch)
        # On a GPU nothing has been computed before the outputs are here.
        return dict(self.model.postprocess({name: out.cpu() for name, out in outputs.items()}))


@torch.inference_mode()
def run_samples(model: Model, size: int) -> None:
    """Compute a batch of samples with a model as it is."""
    items = list(model.samples())
    features = [model.preprocess(items[i % len(items)]) for i in range(size)]
    model.forward(model.collate(features))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
