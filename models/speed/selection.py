"""Selects the best of the presets tried, by a rule that noise rarely changes.

Runs in workers, and in the process that searches beside them.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch
from torch import nn

from inferpool.models.accelerator.failures import is_out_of_memory
from inferpool.models.speed.attempts import attempt
from inferpool.models.speed.trial import NoTimeLeftError, Trial, first_line
from inferpool.models.speed_names import GRAPHED, SpeedReport, TriedPreset

logger = logging.getLogger(__name__)

_LEAST_GAIN = 1.1
"""Factor by which a preset must be faster than those before it; less may be noise."""
_NOISE = 1.07
"""Presets whose ratio is this close to `_LEAST_GAIN` are timed again."""
_NUM_AGAIN = 2


class PresetSelection:
    """Presets that were tried on a model, in the order that decides between equals.

    The best is the first one that none of the others beats by `_LEAST_GAIN`. `exact` is before all.
    """

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self.notes: list[str] = []
        """Result of each preset, for a person to read."""
        self._tried: dict[str, TriedPreset] = {}
        self._gains: dict[str, list[float]] = {"exact": [1.0]}
        """Gains of the presets that agree, each time that they were measured."""
        self._held: tuple[str, nn.Module | None] = ("exact", trial.exact)
        """The best one, if it was in memory when it became the best."""

    @property
    def gains(self) -> Mapping[str, float]:
        """Gains of `exact` and the presets that agree, in the order in which they were tried."""
        return {name: math.prod(each) ** (1 / len(each)) for name, each in self._gains.items()}

    @property
    def best(self) -> str:
        """The best preset so far."""
        gains = self.gains
        return next(name for name in gains if gains[name] * _LEAST_GAIN >= max(gains.values()))

    def enter(self, name: str) -> bool:
        """Try a preset, and return whether its answers agree.

        Raises:
            NoTimeLeftError: There was no time to judge it.
            torch.AcceleratorError: It has broken the device's context.
        """
        self._trial.recover()  # what those before have left
        try:
            network = self._trial.prepare(name)
            agreement = self._trial.compare(network)
            if not agreement.is_within:
                self._lose(name, "refused", agreement.text, deviation=agreement.deviation)
                return False
            gain = self._trial.gain(network)
        except NoTimeLeftError:
            raise
        except Exception as error:  # the network is the user's: it may raise anything
            self._fail(name, error)
        else:
            self.notes.append(f"{name} {gain:.2f} x")
            self._tried[name] = TriedPreset(preset=name, deviation=agreement.deviation)
            self._gains[name] = [gain]
            self._hold(name, network)
            return True
        self._trial.recover()  # now that the error holds none of its memory
        return False

    def leave_out(self, names: Sequence[str], reason: str) -> None:
        """Record why presets are not tried."""
        for name in names:
            self._tried[name] = TriedPreset(preset=name, lost=reason)

    def cannot_make(self, name: str, error: Exception) -> None:
        """Record that a preset could not be made."""
        self._lose(name, "cannot be used", first_line(error))

    def repeat(self, on_progress: Callable[[str], None]) -> None:
        """Time again what noise may have put first, if another preset is about as good."""
        gains = self.gains
        most = max(gains.values())
        doubts = [most / gain for gain in gains.values()]
        if not any(_LEAST_GAIN / _NOISE < each < _LEAST_GAIN * _NOISE for each in doubts):
            return
        close = [name for name in gains if gains[name] * _LEAST_GAIN * _NOISE >= most]
        for name in [*close] * _NUM_AGAIN:
            if name == "exact" or name not in self._gains:
                continue
            on_progress(f"measuring the preset {name} again")
            if (network := self._made(name, is_timed=True)) is not None:
                self._hold(name, network)
                before = next(note for note in self.notes if note.startswith(f"{name} "))
                self.notes[self.notes.index(before)] = f"{name} {self.gains[name]:.2f} x"

    def take(self) -> nn.Module:
        """Return the network of the best preset; one that cannot be made again has lost."""
        self._trial.until = math.inf  # it was judged in time
        while (network := self._made(self.best)) is None:
            pass
        return network

    def verdict(self, *, is_cut_short: bool = False, is_final: bool = True) -> SpeedReport:
        """Return the report about the best."""
        best, gains = self.best, self.gains
        deviation = self._tried[best].deviation if best in self._tried else 0.0
        return SpeedReport(
            preset=best,
            gain=gains[best],
            deviation=deviation or 0.0,
            note="; ".join(self.notes),
            tried=tuple(map(self._completed, self._tried.values())),
            is_cut_short=is_cut_short,
            is_final=is_final,
            key=self._trial.key,
        )

    def _completed(self, tried: TriedPreset) -> TriedPreset:
        """Add to a preset that agrees how fast it was, and why it lost."""
        best, gains = self.best, self.gains
        if tried.preset not in gains:
            return tried
        gain = gains[tried.preset]
        lost = ""
        if tried.preset != best:
            is_slower = gain <= gains[best]
            lost = f"slower than {best}" if is_slower else f"hardly faster than {best}"
        return msgspec.structs.replace(tried, gain=round(gain, 3), lost=lost)

    def _fail(self, name: str, error: Exception) -> None:
        logger.debug("the preset %s fails", name, exc_info=error)
        how = "fails for want of memory" if is_out_of_memory(error) else "fails"
        self._lose(name, how, first_line(error))

    def _lose(self, name: str, how: str, why: str, deviation: float = math.nan) -> None:
        text = f"{how}: {why}"
        self._gains.pop(name, None)
        self.notes = [note for note in self.notes if not note.startswith(f"{name} ")]
        self.notes.append(f"{name} {text}")
        known = deviation if math.isfinite(deviation) else None  # JSON has no other numbers
        self._tried[name] = TriedPreset(preset=name, deviation=known, lost=text)

    def _hold(self, name: str, network: nn.Module) -> None:
        best = self.best
        if best == name:
            self._held = name, network
        elif best != self._held[0]:
            self._held = best, None

    def _made(self, name: str, *, is_timed: bool = False) -> nn.Module | None:
        """Return a preset's network, made again unless it is held; if that fails, it has lost."""
        network = self._held[1] if self._held[0] == name else None
        self._trial.recover()  # what those before have left
        try:
            if network is None:
                network = self._trial.exact if name == "exact" else self._trial.prepare(name)
            if is_timed:
                self._gains[name].append(self._trial.gain(network))
            return network
        except Exception as error:  # as for want of memory, or since a graph strays this time
            self._fail(name, error)
        if self._held[0] != self.best:
            self._held = self.best, None
        self._trial.recover()
        return None


def enter_all(
    selection: PresetSelection, names: Sequence[str], on_progress: Callable[[str], None]
) -> bool:
    """Try presets in turn, and return whether there was time for all."""
    for number, name in enumerate(names, 1):
        on_progress(f"measuring speed presets {number}/{len(names)}: {name}")
        try:
            selection.enter(name)
        except NoTimeLeftError:
            left = names[number - 1 :]
            selection.notes.append(f"no time was left for {', '.join(left)}")
            selection.leave_out(left, "no time was left")
            return False
    return True


def enter_graphs(
    trial: Trial, selection: PresetSelection, on_progress: Callable[[str], None]
) -> bool:
    """Try graphs of the presets that agree, and return whether all were tried."""
    if trial.has_varying_shapes:
        selection.leave_out([*GRAPHED], "not available: the samples have several shapes")
        return True
    names = []
    for name, base in GRAPHED.items():
        if name == "graphed" or base in selection.gains:
            names.append(name)
        else:
            selection.leave_out([name], f"not tried: {base} is not used")
    return enter_alone(trial, selection, names, "graphs", on_progress)


def enter_alone(
    trial: Trial,
    selection: PresetSelection,
    names: Sequence[str],
    mark: str,
    on_progress: Callable[[str], None],
) -> bool:
    """Try presets that may break the device, and return whether they were tried.

    One that does ends this process. The next ones leave out all of them for a day.

    Args:
        trial: Where the presets are tried.
        selection: What they are entered into.
        names: The presets.
        mark: Name of the attempt.
        on_progress: Called with what is being done.
    """
    key = f"{trial.key}-{mark}"
    with attempt(trial.store.folder, key, fatal=torch.AcceleratorError) as is_first:
        if is_first:
            return enter_all(selection, names, on_progress)
    reason = "not tried today: the last attempt ended its process"
    selection.notes.append(f"{mark} {reason}")
    selection.leave_out(names, reason)
    return False
