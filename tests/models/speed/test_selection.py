"""The rule by which a preset is selected, and what is reported of those that lost."""

import itertools
import math
import random

import pytest
import torch

from inferpool.models.speed.choose import choose
from inferpool.models.speed.selection import PresetSelection
from inferpool.models.speed.trial import NoTimeLeftError
from inferpool.models.tolerance import Agreement
from tests.models.speed.pace import quietly


class TimedTrial:
    """A trial whose presets have gains that the test says."""

    key = "key"
    exact = "network of exact"

    def __init__(self, **gains):
        self._gains = {name: iter(each) for name, each in gains.items()}
        self.prepared: list[str] = []
        self.timed: list[str] = []

    def recover(self):
        """Free memory, which there is enough of."""

    def prepare(self, name):
        self.prepared.append(name)
        return f"network of {name}"

    def compare(self, network):
        return Agreement(is_within=True, deviation=0.01, text="")

    def gain(self, network):
        name = network.removeprefix("network of ")
        self.timed.append(name)
        return next(self._gains[name])


def selected(**gains):
    """Return the trial, and the selection once all presets were tried."""
    trial = TimedTrial(**{name: itertools.repeat(gain) for name, gain in gains.items()})
    selection = PresetSelection(trial)
    for name in gains:
        assert selection.enter(name)
    selection.repeat(quietly)
    return trial, selection


@pytest.mark.parametrize(
    ("gains", "best"),
    [
        ({"folded": 1.05, "bf16": 1.08}, "exact"),
        ({"folded": 2.0, "bf16": 2.15}, "folded"),  # equals: the first one
        ({"folded": 2.0, "bf16": 2.15, "fp16": 2.3}, "bf16"),
        ({"folded": 2.0, "bf16": 4.0, "fp16": 3.9}, "bf16"),
    ],
)
def test_the_first_of_those_that_are_about_as_good_as_the_best_is_taken(gains, best):
    _, selection = selected(**gains)
    assert selection.best == best
    assert selection.take() == f"network of {best}"
    report = selection.verdict()
    assert (report.preset, report.gain) == (best, pytest.approx({"exact": 1, **gains}[best]))
    assert [each.preset for each in report.tried] == [*gains]
    assert [each.gain for each in report.tried] == [pytest.approx(each) for each in gains.values()]
    lost = {each.preset: each.lost for each in report.tried}
    assert [name for name in lost if not lost[name]] == ([] if best == "exact" else [best])
    for name, reason in lost.items():
        how = "slower" if gains[name] < report.gain else "hardly faster"
        assert name == best or reason == f"{how} than {best}"


def test_presets_near_the_limit_are_timed_again_and_no_others():
    trial, _ = selected(folded=1.5, bf16=3.9, fp16=4.0)
    assert trial.timed == ["folded", "bf16", "fp16"]  # bf16 is nowhere near 4.0 / 1.1
    trial, selection = selected(folded=1.5, bf16=3.6, fp16=4.0)
    assert trial.timed == ["folded", *["bf16", "fp16"] * 3]
    assert trial.prepared == ["folded", "bf16", "fp16", "bf16", "bf16"]  # the best one is held
    assert selection.best == "fp16"


def test_one_slow_moment_does_not_decide():
    trial = TimedTrial(bf16=[3.8, 3.8, 3.8], fp16=[4.3, 4.0, 4.0])
    selection = PresetSelection(trial)
    selection.enter("bf16")
    selection.enter("fp16")
    assert selection.best == "fp16"
    selection.repeat(quietly)
    assert selection.best == "bf16"
    assert selection.take() == "network of bf16"


@pytest.mark.usefixtures("favoured")
def test_searches_by_a_clock_with_noise_choose_alike(pace):
    noise = random.Random(0)
    usual = pace.seconds
    pace.seconds = lambda kind, size: usual(kind, size) * noise.uniform(0.95, 1.05)
    pace.gains["folded"] = pace.gains["bf16"] = 2.0  # the same but for noise
    times = pace.times(budget_s=float("inf"))
    found = [choose(pace.small(), pace.options(times=times), quietly) for _ in range(10)]
    assert {report.preset for report in found} == {"folded"}


class FailsAgain(TimedTrial):
    """A trial that cannot make one preset a second time, as for want of memory."""

    def __init__(self, failing, **gains):
        super().__init__(**{name: itertools.repeat(gain) for name, gain in gains.items()})
        self._failing = failing

    def prepare(self, name):
        if name == self._failing and name in self.prepared:
            raise torch.OutOfMemoryError("no memory is left")
        return super().prepare(name)


@pytest.mark.parametrize(
    ("failing", "gains", "best"),
    [
        ("bf16", {"folded": 1.5, "bf16": 3.6, "fp16": 4.0}, "fp16"),  # to be timed again
        ("fp16", {"bf16": 3.85, "fp16": 4.2, "compiled": 4.3}, "compiled"),  # to be taken
    ],
)
def test_a_preset_that_cannot_be_made_again_loses(failing, gains, best):
    trial = FailsAgain(failing, **gains)
    selection = PresetSelection(trial)
    for name in gains:
        selection.enter(name)
    if failing == "bf16":
        selection.repeat(quietly)
    assert selection.take() == f"network of {best}"
    report = selection.verdict()
    assert report.preset == best
    lost = {each.preset: each.lost for each in report.tried}
    assert lost[failing] == "fails for want of memory: OutOfMemoryError: no memory is left"
    assert report.note.count(f"{failing} ") == 1


def test_the_best_is_made_again_though_the_time_for_trials_is_over():
    class IsOver(TimedTrial):
        until = 0.0

        def prepare(self, name):
            if name in self.prepared and self.until < math.inf:
                raise NoTimeLeftError
            return super().prepare(name)

    trial = IsOver(folded=[2.0], bf16=[2.15], fp16=[2.3])
    selection = PresetSelection(trial)
    for name in ("folded", "bf16", "fp16"):
        selection.enter(name)
    assert selection.take() == "network of bf16"
