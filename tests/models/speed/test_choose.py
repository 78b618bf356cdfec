import logging
import os
import subprocess
import sys
import time

import pytest
import torch
from msgspec.structs import replace as replace_report
from torch import nn

from inferpool.models.base import Model
from inferpool.models.errors import ModelError
from inferpool.models.label_tolerance import LabelTolerance
from inferpool.models.sources.echo import Echo
from inferpool.models.sources.modules import ModuleModel
from inferpool.models.spec import TensorSpec
from inferpool.models.speed.choose import choose
from inferpool.models.speed.verdicts import VerdictStore
from inferpool.models.speed_names import SpeedReport
from tests.models.items import loaded, run, tensor_item
from tests.models.speed.pace import FewSamples, kind_of, options, quietly, small
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


@pytest.mark.usefixtures("favoured")
def test_the_fastest_that_agrees_serves_with_the_same_answers(pace):
    model = pace.small()
    want = run(model, model.samples())["probabilities"]
    stages = []
    report = choose(model, pace.options(), stages.append)
    assert report.preset == ("bf16" if HAS_BF16 else "folded")
    assert report.gain == pytest.approx(pace.gains[report.preset])
    assert "measuring speed presets 1/" in stages[0]
    found = run(model, model.samples())["probabilities"]
    assert (found - want).abs().max() <= report.deviation + 1e-6


@pytest.mark.parametrize(("gain", "is_taken"), [(1.09, False), (1.12, True)])
def test_a_preset_that_is_hardly_faster_leaves_the_network_alone(pace, gain, is_taken):
    pace.gains = {"folded": gain}
    model = pace.small()
    network = model.network
    report = choose(model, pace.options(), quietly)
    assert report.preset == ("folded" if is_taken else "exact")
    assert f"folded {gain} x" in report.note
    assert (model.network is network) is not is_taken


def test_exact_by_name_leaves_the_network_alone():
    model = small()
    network = model.network
    assert choose(model, options("exact"), quietly) == SpeedReport()
    assert model.network is network


@pytest.mark.skipif(not HAS_BF16, reason="this processor has no bf16")
@pytest.mark.usefixtures("favoured")
def test_a_preset_that_strays_is_refused_with_the_figures(pace):
    report = choose(pace.of(convolutions()), pace.options(), quietly)
    assert report.preset == "folded"
    assert "bf16 refused: off by" in report.note
    assert "allowed is 0.001" in report.note


def test_a_preset_asked_for_by_name_is_taken_and_its_deviation_told(caplog, pace):
    module = pace.of(convolutions())
    with caplog.at_level(logging.WARNING):
        report = choose(module, pace.options("bf16"), quietly)
    assert report.preset == "bf16"
    assert report.deviation > 1e-4
    assert run(module, module.samples())["output"].dtype == torch.float32
    assert "changes answers: off by" in caplog.text


def test_a_preset_asked_for_by_name_that_is_slower_here_is_warned_of(caplog, pace):
    pace.gains = {"folded": 0.07}
    with caplog.at_level(logging.WARNING):
        assert choose(pace.small(), pace.options("folded"), quietly).preset == "folded"
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


class Uncopied(FewSamples):
    def build_network(self):
        return Peculiar()


def test_a_network_that_presets_break_on_is_served_as_it_is(pace):
    report = choose(pace.of(loaded(Uncopied())), pace.options(), quietly)
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


def test_a_class_of_the_users_own_gets_presets_by_naming_its_network(pace):
    model = pace.of(loaded(Own()))
    report = choose(model, pace.options("folded"), quietly)
    assert report.preset == "folded"
    assert run(model, model.warmup())["y"].shape == (1, 10)


# The verdict, kept


class Stages(list):
    """The steps that a choice reports."""

    @property
    def num_measurements(self):
        return sum("measuring speed presets 1/" in stage for stage in self)


@pytest.mark.usefixtures("favoured")
def test_a_verdict_is_reused_and_verified_again(tmp_path, pace):
    stages = Stages()
    first = choose(pace.small(), pace.options(cache_dir=tmp_path), stages.append)
    pace.seen.clear()
    again = pace.small()
    second = choose(again, pace.options(cache_dir=tmp_path), stages.append)
    assert stages.num_measurements == 1
    assert (second.preset, second.gain, second.note) == (first.preset, first.gain, first.note)
    assert second.measured_s == 0.0
    assert pace.seen.count(first.preset) == 1  # one batch is compared
    assert type(again.network).__name__ == "Recast"


class AltersWhatItFolds(FewSamples):
    """A network that presets change the answers of, once a test says so."""

    has_changed = False

    def forward(self, batch):
        factor = -1.0 if self.has_changed and kind_of(self.network) != "exact" else 1.0
        return {"logits": super().forward(batch)["logits"] * factor}


@pytest.mark.usefixtures("favoured")
def test_a_kept_verdict_that_no_longer_agrees_is_replaced(tmp_path, pace, caplog):
    first = choose(pace.of(loaded(AltersWhatItFolds())), pace.options(cache_dir=tmp_path), quietly)
    assert first.preset != "exact"
    model = pace.of(loaded(AltersWhatItFolds()))
    model.has_changed = True
    exact = model.network
    found = choose(model, pace.options(cache_dir=tmp_path), quietly)
    assert f"the preset {first.preset} no longer agrees: the best label is kept" in caplog.text
    assert (found.preset, model.network) == ("exact", exact)
    assert "folded refused" in found.note
    assert VerdictStore(tmp_path).read(found.key) == replace_report(found, measured_s=0.0)


def test_other_weights_and_another_tolerance_get_verdicts_of_their_own(pace):
    plain, other, stricter = small(), small(), small()
    with torch.no_grad():
        other.network[0].weight[0, 0, 0, 0] += 0.1
    stricter.tolerance = LabelTolerance(min_lead=0.01)
    assert len({pace.trial(each).key for each in (plain, other, stricter)}) == 3


@pytest.mark.usefixtures("favoured")
def test_a_folder_that_cannot_be_written_is_named_and_costs_nothing_but_time(
    tmp_path, pace, caplog
):
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / "cache"
    report = choose(pace.small(), pace.options(cache_dir=folder), quietly)
    assert report.preset != "exact"
    (line,) = caplog.messages
    assert str(tmp_path / "file" / "cache") in line
    assert "Not a directory" in line


def test_trying_ends_when_its_time_is_over_whatever_it_is_about(pace):
    pace.batch_s = 1.0
    report = choose(pace.small(), pace.options(times=pace.times(budget_s=7.5)), quietly)
    assert 7.5 < pace.now < 7.5 + 2
    assert (report.preset, report.is_cut_short) == ("exact", True)
    assert "no time was left for folded" in report.note
    assert report.measured_s == pace.now


def test_a_verdict_cut_short_is_kept_for_a_while_only(tmp_path):
    report = SpeedReport(preset="folded", gain=2.0, is_cut_short=True)
    store = VerdictStore(tmp_path)
    store.write("key", report)
    assert store.read("key") == report
    for hours, found in ((0.8, report), (1.2, None)):
        before = time.time() - hours * 3600
        os.utime(tmp_path / "key.json", (before, before))
        assert store.read("key") == found


@pytest.mark.usefixtures("favoured")
def test_an_earlier_choice_of_this_run_is_applied_without_trying(pace):
    first = choose(pace.small(), pace.options(), quietly)
    pace.seen.clear()
    for speed in ("auto", first.preset):
        again = pace.small()
        told = pace.options(speed, chosen=replace_report(first, measured_s=3.0))
        assert choose(again, told, quietly) == replace_report(first, measured_s=0.0)
        assert type(again.network).__name__ == "Recast"
    exact = SpeedReport(note="no preset is faster")
    assert choose(pace.small(), pace.options(chosen=exact), quietly) == exact
    assert set(pace.seen) == {"exact"}  # it is calibrated, and neither compared nor measured


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
            assert holder.poll() is None  # it holds the lock until the end of its input
        waited = []

        def on_wait():
            waited.append(1)
            holder.kill()

        with VerdictStore(tmp_path).turn("key", 60, on_wait):
            assert waited == [1]
