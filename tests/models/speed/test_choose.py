import logging
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from msgspec.structs import replace as replace_report
from torch import nn

from inferpool.models.agreement import LabelTolerance
from inferpool.models.base import Model
from inferpool.models.errors import ModelError
from inferpool.models.item import Item
from inferpool.models.sources.echo import Echo
from inferpool.models.sources.modules import ModuleModel
from inferpool.models.spec import TensorSpec
from inferpool.models.speed import choose as choosing
from inferpool.models.speed import trial as trying
from inferpool.models.speed.choose import SpeedOptions, choose
from inferpool.models.speed.names import SpeedReport
from inferpool.models.speed.trial import Trial
from inferpool.models.speed.verdicts import VerdictStore
from tests.models.items import loaded, run, tensor_item
from tests.small_classifier import SmallClassifier

HAS_BF16 = torch.cpu._is_avx512_bf16_supported()


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 10, 3)
        )

    def forward(self, x):
        return self.layers(x).mean((2, 3))


def convolutions():
    """Return a model of a bare network, whose outputs may hardly change."""
    inputs = [TensorSpec(name="x", dtype="float32", shape=(-1, 3, 16, 16))]
    return loaded(ModuleModel(Convolutions, inputs=inputs))


def options(speed="auto", cache_dir=None, **others):
    return SpeedOptions(speed=speed, max_batch_size=4, cache_dir=cache_dir, **others)


def small():
    return loaded(SmallClassifier())


def quietly(stage):
    return None


def test_the_fastest_that_agrees_serves_with_the_same_answers(always_faster):
    model = small()
    want = run(model, model.samples())["probabilities"]
    stages = []
    report = choose(model, options(), stages.append)
    assert report.preset != "exact"
    assert report.gain >= 2
    assert "measuring speed presets 1/" in stages[0]
    found = run(model, model.samples())["probabilities"]
    # On a busy machine time is over before all samples are compared, and others stray further.
    assert (found - want).abs().max() <= 3 * report.deviation + 1e-6


def test_exact_and_a_preset_that_is_hardly_faster_leave_the_network_alone(monkeypatch):
    monkeypatch.setattr(Trial, "gain", lambda *_: 1.05)
    model = small()
    network = model.network
    report = choose(model, options(), quietly)
    assert report.preset == "exact"
    assert "1.05 x" in report.note
    assert model.network is network
    assert choose(model, options("exact"), quietly) == SpeedReport()
    assert model.network is network


@pytest.mark.skipif(not HAS_BF16, reason="this processor has no bf16")
def test_a_preset_that_strays_is_refused_with_the_figures(always_faster):
    report = choose(convolutions(), options(), quietly)
    assert report.preset == "folded"
    assert "bf16 refused: off by" in report.note
    assert "allowed is 0.001" in report.note


def test_a_preset_asked_for_by_name_is_taken_and_its_deviation_told(caplog):
    module = convolutions()
    with caplog.at_level(logging.WARNING):
        report = choose(module, options("bf16"), quietly)
    assert report.preset == "bf16"
    assert report.deviation > 1e-4
    assert run(module, module.samples())["output"].dtype == torch.float32
    assert "changes answers: off by" in caplog.text


def test_a_preset_asked_for_by_name_that_is_slower_here_is_warned_of(caplog, monkeypatch):
    monkeypatch.setattr("inferpool.models.speed.trial.Trial.gain", lambda *_: 0.07)
    with caplog.at_level(logging.WARNING):
        assert choose(small(), options("folded"), quietly).preset == "folded"
    assert 'speed = "folded" is slower than "exact" here: 0.07 x' in caplog.messages


class Unsampled(SmallClassifier):
    def samples(self):
        return []


@pytest.mark.parametrize("make", [Echo, Unsampled])
def test_a_model_that_nothing_can_be_verified_on_stays_exact(make):
    model = loaded(make())
    report = choose(model, options(), quietly)
    assert report.preset == "exact"
    assert report.note
    with pytest.raises(ModelError, match="cannot be used"):
        choose(model, options("folded"), quietly)


class Peculiar(Convolutions):
    """A network that cannot be copied."""

    def __deepcopy__(self, memo):
        raise RuntimeError("not to be copied")


class Uncopied(SmallClassifier):
    def build_network(self):
        return Peculiar()


def test_a_network_that_presets_break_on_is_served_as_it_is():
    report = choose(loaded(Uncopied()), options(), quietly)
    assert report.preset == "exact"
    assert "not to be copied" in report.note


class Own(Model):
    """A user's class with a network, which takes two inputs and returns a dict."""

    inputs = (TensorSpec(name="x", dtype="float32", shape=(-1, 3, 8, 8)),)

    def load(self, placement):
        self.network = Convolutions().eval().requires_grad_(False)

    def forward(self, batch):
        return {"y": self.network(batch["x"])}

    def warmup(self):
        return [tensor_item({"x": torch.randn(3, 8, 8)})]


def test_a_class_of_the_users_own_gets_presets_by_naming_its_network(always_faster):
    model = loaded(Own())
    report = choose(model, options("folded"), quietly)
    assert report.preset == "folded"
    assert run(model, model.warmup())["y"].shape == (1, 10)


# The verdict, kept


def count_measurements(monkeypatch):
    calls = []
    measure = choosing._measure
    monkeypatch.setattr(
        choosing, "_measure", lambda *arguments: calls.append(1) or measure(*arguments)
    )
    return calls


def test_a_verdict_is_reused_and_verified_again(tmp_path, monkeypatch, always_faster):
    calls = count_measurements(monkeypatch)
    first = choose(small(), options(cache_dir=tmp_path), quietly)
    again = small()
    second = choose(again, options(cache_dir=tmp_path), quietly)
    assert len(calls) == 1
    assert (second.preset, second.gain, second.note) == (first.preset, first.gain, first.note)
    assert second.measured_s == 0.0
    assert type(again.network).__name__ == "Recast"


def test_other_weights_and_another_tolerance_get_verdicts_of_their_own(
    tmp_path, monkeypatch, always_faster
):
    calls = count_measurements(monkeypatch)
    choose(small(), options(cache_dir=tmp_path), quietly)
    other = small()
    with torch.no_grad():
        other.network[0].weight[0, 0, 0, 0] += 0.1
    choose(other, options(cache_dir=tmp_path), quietly)
    assert len(calls) == 2
    stricter = small()
    stricter.tolerance = LabelTolerance(min_lead=0.01)
    choose(stricter, options(cache_dir=tmp_path), quietly)
    assert len(calls) == 3


def test_a_folder_that_cannot_be_written_is_named_and_costs_nothing_but_time(
    tmp_path, always_faster, caplog
):
    (tmp_path / "file").write_text("in the way")
    report = choose(small(), options(cache_dir=tmp_path / "file" / "cache"), quietly)
    assert report.preset != "exact"
    (line,) = caplog.messages
    assert str(tmp_path / "file" / "cache") in line
    assert "Not a directory" in line


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    perf_counter = monotonic


@pytest.fixture
def slow(monkeypatch):
    """A classifier that counts its batches, each of which takes a second of a fake clock."""
    clock = Clock()
    monkeypatch.setattr(choosing, "time", clock)
    monkeypatch.setattr(trying, "time", clock)

    class Slow(SmallClassifier):
        num_batches = 0

        def forward(self, batch):
            clock.now += 1.0
            Slow.num_batches += 1
            return super().forward(batch)

    return Slow


def test_trying_ends_when_its_time_is_over_whatever_it_is_about(slow):
    report = choose(loaded(slow()), options(), quietly)
    assert slow.num_batches <= choosing._BUDGET_S + 2
    assert report.preset == "exact"
    assert report.is_cut_short
    assert "no time was left for folded" in report.note


def test_the_best_preset_serves_when_time_is_over(slow, monkeypatch):
    monkeypatch.setattr(choosing, "presets_for", lambda *_: ["folded", "channels_last"])
    monkeypatch.setattr(Trial, "gain", lambda self, network: 2.0)
    monkeypatch.setattr(choosing, "_BUDGET_S", 7.5)
    report = choose(loaded(slow()), options(), quietly)
    assert (report.preset, report.is_cut_short) == ("folded", True)
    assert "no time was left for channels_last" in report.note


def test_a_verdict_cut_short_is_kept_for_a_while_only(tmp_path):
    report = SpeedReport(preset="folded", gain=2.0, is_cut_short=True)
    store = VerdictStore(tmp_path)
    store.write("key", report)
    assert store.read("key") == report
    before = time.time() - 2 * 3600
    os.utime(tmp_path / "key.json", (before, before))
    assert store.read("key") is None


def test_an_earlier_choice_of_this_run_is_applied_without_trying(monkeypatch, always_faster):
    first = choose(small(), options(), quietly)
    monkeypatch.setattr(Trial, "compare", lambda *_: pytest.fail("it compares"))
    monkeypatch.setattr(Trial, "gain", lambda *_: pytest.fail("it measures"))
    for speed in ("auto", first.preset):
        again = small()
        told = replace(options(speed), chosen=replace_report(first, measured_s=3.0))
        assert choose(again, told, quietly) == replace_report(first, measured_s=0.0)
        assert type(again.network).__name__ == "Recast"
    exact = SpeedReport(note="no preset is faster")
    assert choose(small(), replace(options(), chosen=exact), quietly) == exact


_HOLD = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_only_one_measures_and_the_others_wait_for_it_to_end_or_for_the_timeout(tmp_path):
    command = [sys.executable, "-c", _HOLD, str(tmp_path / "key.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with VerdictStore(tmp_path).turn("key", 0.2, lambda: None):
            assert holder.poll() is None
        waited = []

        def on_wait():
            waited.append(1)
            holder.kill()

        with VerdictStore(tmp_path).turn("key", 60, on_wait):
            assert waited == [1]


def test_samples_of_a_classifier_are_photographs():
    items = SmallClassifier().samples()
    assert len(items) == 60
    assert all(isinstance(item, Item) and item.kind == "tensors" for item in items)
