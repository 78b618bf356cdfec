"""Presets tried and chosen on an accelerator: the simulated one."""

import gc
import logging
import math
from dataclasses import replace

import pytest
import torch
from msgspec.structs import replace as replace_report
from torch import nn

from inferpool.models.accelerator.device import has_tf32
from inferpool.models.spec import Placement
from inferpool.models.speed.choose import choose
from inferpool.models.speed.graphs import Graphed
from inferpool.models.speed.options import SpeedOptions
from inferpool.models.speed.presets import presets_for
from inferpool.models.speed.trial import Trial
from inferpool.models.speed_names import GRAPHED, SpeedReport
from inferpool.models.tolerance import Agreement
from tests.models.items import run
from tests.models.speed.pace import FewSamples, quietly, small
from tests.simulated_accelerator import convolutions
from tests.simulated_accelerator.convolutions import fused_convolution

pytestmark = pytest.mark.simulated


@pytest.fixture(autouse=True)
def sim(monkeypatch):
    """Begin with a device that is well, and float32 as workers have it."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.sim.set_device(0)
    yield
    torch.sim.revive(0)


class Watched(nn.Module):
    """A network around another one, which tells about each call."""

    def __init__(self, network, tell):
        super().__init__()
        self.network = network
        self._tell = tell

    def forward(self, x):
        return self.network(x) * self._tell(x)

    def __deepcopy__(self, memo):
        from copy import deepcopy

        return Watched(deepcopy(self.network, memo), self._tell)


def on_device(tell=None, model_class=FewSamples):
    """Return a classifier on the device; `tell` gets each input, and returns a factor."""

    class OnDevice(model_class):
        def build_network(self):
            network = super().build_network()
            return Watched(network, tell) if tell else network

    model = OnDevice()
    model.load(Placement(devices=("sim:0",)))
    return model


def check_answers(model, within):
    """Compare answers with those of the exact network on the CPU, at all sizes and one more."""
    exact = small()
    items = exact.samples()
    for size in range(1, 6):
        want = run(exact, items[:size])["probabilities"]
        found = run(model, items[:size])["probabilities"].cpu()
        assert (found - want).abs().max() <= within


@pytest.mark.usefixtures("favoured")
def test_auto_takes_graphs_of_a_preset_that_agrees_and_captures_none_in_service(pace):
    model = pace.of(on_device())
    report = choose(model, pace.options(), quietly)
    assert report.preset == "graphed_fp16"  # the fastest by this clock
    assert report.is_final
    assert isinstance(model.network, Graphed)
    assert model.network.num_graphs == 3  # of 4, 2 and 1
    check_answers(model, 3 * report.deviation + 1e-5)
    assert model.network.num_graphs == 3


def test_a_worker_that_is_restarted_captures_the_graphs_before_it_serves(pace):
    report = SpeedReport(preset="graphed", gain=3.0, measured_s=4.0)
    model = pace.of(on_device())
    told = pace.options(chosen=report)
    assert choose(model, told, quietly) == replace_report(report, measured_s=0.0)
    assert model.network.num_graphs == 3
    check_answers(model, 1e-5)


def right(*arguments):
    """Compute like the kernel, and a little else: so an answer shows where it comes from."""
    return fused_convolution(*arguments) + 1e-4


def wrong(*arguments):
    return fused_convolution(*arguments) + 1


def failing(*arguments):
    raise RuntimeError("unable to find an engine to execute this computation")


def use_kernel(monkeypatch, kernel):
    monkeypatch.setattr(convolutions, "fused_convolution", kernel)


@pytest.fixture
def not_fused(monkeypatch):
    """Let convolutions be what they are: the network's own code runs at a capture."""
    use_kernel(monkeypatch, failing)


@pytest.mark.parametrize(
    ("kernel", "gain", "is_used"),
    [(right, 1.05, True), (right, 0.95, False), (wrong, 2.0, False), (failing, 2.0, False)],
)
def test_graphs_have_fused_convolutions_if_these_are_right_and_faster(
    monkeypatch, pace, kernel, gain, is_used
):
    plain = pace.of(on_device())
    choose(plain, pace.options("folded"), quietly)
    use_kernel(monkeypatch, kernel)
    pace.gains = {"graphed_folded": gain}
    model = pace.of(on_device())
    assert choose(model, pace.options("graphed"), quietly).preset == "graphed"
    assert model.network.num_graphs == 3
    items = model.samples()[:4]
    scores = [run(each, items)["probabilities"].cpu() for each in (plain, model)]
    assert torch.equal(*scores) is not is_used
    check_answers(model, 1e-3)


@pytest.mark.parametrize("kernel", [right, wrong])
def test_a_preset_that_is_not_taken_gives_its_memory_back(monkeypatch, pace, kernel):
    use_kernel(monkeypatch, kernel)
    trial = pace.trial(on_device())
    trial.compare(trial.exact)
    trial.prepare("graphed")
    trial.recover()
    gc.collect()
    before = torch.sim.memory_allocated()
    gc.disable()  # a worker leaves nothing for a later collection
    try:
        trial.prepare("graphed_bf16")
        trial.recover()
        assert torch.sim.memory_allocated() == before
    finally:
        gc.enable()


def synchronises(x):
    return 1.0 if x.sum().item() < float("inf") else 0.0


def reads(x):
    return 1.0 if x.sum().cpu().numpy() < float("inf") else 0.0


@pytest.mark.parametrize("tell", [synchronises, reads])
@pytest.mark.usefixtures("favoured")
def test_a_network_that_cannot_be_captured_serves_without_graphs(pace, tell):
    model = pace.of(on_device(tell))
    report = choose(model, pace.options(), quietly)
    assert report.preset in GRAPHED.values()
    assert "graphed fails: AcceleratorError" in report.note
    check_answers(model, 3 * report.deviation + 1e-5)


def test_graphs_that_are_named_and_cannot_be_captured_leave_the_preset_that_they_replay(
    caplog, pace
):
    model = pace.of(on_device(synchronises))
    with caplog.at_level(logging.WARNING):
        report = choose(model, pace.options("graphed"), quietly)
    assert report.preset == "folded"
    assert report.note.startswith("graphed fails: AcceleratorError")
    assert 'speed = "graphed" cannot be used, and "folded" serves' in caplog.text
    check_answers(model, 1e-5)


@pytest.mark.usefixtures("favoured", "not_fused")
def test_graphs_that_compute_something_else_at_one_size_are_refused(pace):
    def double(x):
        return 2.0 if torch.sim.is_current_stream_capturing() and len(x) == 2 else 1.0

    model = pace.of(on_device(double))
    report = choose(model, pace.options(), quietly)
    assert report.preset not in GRAPHED
    assert report.note.count("graphs compute something else") == len(GRAPHED)


class Strays:
    """A tolerance that nothing is within, with a deviation for each comparison in turn."""

    def __init__(self, *deviations):
        self._deviations = list(deviations)

    def judge(self, exact, other):
        deviation = self._deviations.pop(0) if len(self._deviations) > 1 else self._deviations[0]
        return Agreement(is_within=False, deviation=deviation, text=f"off by {deviation}")


@pytest.mark.parametrize("deviations", [(math.inf,), (math.nan,), (0.21, 0.1)])
@pytest.mark.usefixtures("not_fused")
def test_graphs_that_stray_much_further_than_what_they_replay_are_refused(pace, deviations):
    model = on_device()
    model.tolerance = Strays(*deviations)
    with pytest.raises(ValueError, match="graphs compute something else: off by"):
        pace.trial(model).prepare("graphed")


@pytest.mark.usefixtures("not_fused")
def test_graphs_that_stray_about_as_far_as_what_they_replay_are_taken(pace):
    model = on_device()
    model.tolerance = Strays(*[0.19, 0.1] * 3)  # at each of three sizes
    assert pace.trial(model).prepare("graphed").num_graphs == 3


@pytest.mark.usefixtures("favoured", "not_fused")
def test_a_capture_that_breaks_the_device_is_not_tried_again_for_a_day(tmp_path, pace):
    def lose(x):
        if torch.sim.is_current_stream_capturing():
            torch.sim.lose(0)
        return 1.0

    with pytest.raises(torch.AcceleratorError):
        choose(pace.of(on_device(lose)), pace.options(cache_dir=tmp_path), quietly)
    torch.sim.revive(0)  # as for the next process
    model = pace.of(on_device(lose))
    report = choose(model, pace.options(cache_dir=tmp_path), quietly)
    assert report.preset in GRAPHED.values()
    assert report.is_cut_short
    assert "graphs not tried today" in report.note


class Framed(FewSamples):
    """A classifier that gets every other picture with a frame, which it cuts off."""

    has_fixed_shapes = False
    num_pictures = 0

    def preprocess(self, item):
        self.num_pictures += 1
        image = super().preprocess(item)["image"]
        return {"image": nn.functional.pad(image, (0, 0, 0, self.num_pictures % 2))}

    def collate(self, instances):
        return super().collate([{"image": each["image"][:, :32]} for each in instances])


@pytest.mark.usefixtures("favoured")
def test_a_model_whose_inputs_differ_in_shape_serves_without_graphs(pace):
    model = pace.of(on_device(model_class=Framed))
    assert choose(model, pace.options(), quietly).preset in GRAPHED.values()
    model = pace.of(on_device(model_class=Framed))
    report = choose(model, pace.options("graphed"), quietly)
    assert report.preset == "folded"
    assert "graphs are for inputs of one shape" in report.note


def test_the_best_preset_serves_when_time_is_over(pace):
    pace.batch_s, pace.gains = 1.0, {"folded": 2.0}
    wanted = pace.options(times=pace.times(budget_s=22.0))
    report = choose(pace.of(on_device()), wanted, quietly)
    assert (report.preset, report.is_cut_short) == ("folded", True)
    assert "no time was left for tf32, bf16, fp16" in report.note


class Noting(FewSamples):
    """A classifier that notes the batches that it computes."""

    def forward(self, batch):
        x = batch["image"]
        self.seen.append((len(x), "pinned" if x.is_pinned() else x.device.type))
        return super().forward(batch)

    def postprocess(self, outputs):
        pytest.fail("it is the same for all presets")


class NotingOnDevice(Noting):
    can_run_ahead = True

    def forward(self, batch):
        return super().forward(batch)


@pytest.mark.parametrize(("model_class", "where"), [(Noting, "pinned"), (NotingOnDevice, "sim")])
def test_presets_are_timed_as_service_computes_them_and_without_what_follows(
    pace, model_class, where
):
    model = on_device(model_class=model_class)
    model.seen = []
    trial = pace.trial(model, max_batch_size=128)
    trial.gain(trial.exact)
    assert {size for size, _ in model.seen} == {1, 2, 4, 8, 16, 32, 64, 128}
    assert model.seen[-1] == (128, where)
    assert {place for _, place in model.seen} == {where}


class Busy(FewSamples):
    """A classifier that gives the device work as it makes a batch, and after it."""

    def collate(self, instances):
        torch.sim.busy(20_000)
        return super().collate(instances)

    def forward(self, batch):
        outputs = super().forward(batch)
        torch.sim.busy(20_000)
        return outputs


def test_timing_waits_for_what_was_told_before_and_for_the_end(pace):
    are_idle = []

    def clock():
        are_idle.append(torch.sim.current_stream().query())
        return 0.0

    model = on_device(model_class=Busy)
    times = replace(pace.times(), clock=clock)
    trial = Trial(model, SpeedOptions(max_batch_size=1, times=times))
    assert list(trial.sizes) == [1]
    assert are_idle == [True] * 6  # before and after three calls


def test_sizes_end_where_a_batch_does_not_fit(pace):
    def take(x):
        torch.empty(len(x) * 300 << 20, dtype=torch.uint8, device=x.device)
        return 1.0

    assert list(pace.trial(on_device(take), max_batch_size=8).sizes) == [1, 2]


def test_sizes_end_where_a_batch_takes_long(pace):
    pace.seconds = lambda kind, size: 0.04 * size
    assert list(pace.trial(on_device(), max_batch_size=64).sizes) == [1, 2]


def test_devices_of_other_kinds_and_names_share_no_verdict(pace, monkeypatch):
    keys = {pace.trial(small()).key}
    for name in ("cpu", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB MIG 1g.10gb"):
        monkeypatch.setattr(torch.sim, "get_device_name", lambda device, name=name: name)
        keys |= {pace.trial(on_device()).key, pace.trial(on_device()).key}
    assert len(keys) == 4


@pytest.mark.parametrize("preset", ["tf32", "graphed_tf32"])
@pytest.mark.parametrize("is_fused", [True, False])
def test_rounding_to_tf32_is_a_preset_while_exact_is_float32(monkeypatch, pace, preset, is_fused):
    seen = {"capturing": set(), "else": set()}

    def note(x):
        is_capturing = torch.sim.is_current_stream_capturing()
        seen["capturing" if is_capturing else "else"].add(has_tf32())
        return 1.0

    def kernel(*arguments):
        note(arguments)
        return fused_convolution(*arguments)

    use_kernel(monkeypatch, kernel if is_fused else failing)
    pace.gains = {"graphed_folded": 2.0}
    model = pace.of(on_device(note))
    assert "tf32" in presets_for(model.network, torch.device("sim"))
    run(model, model.samples()[:2])
    assert seen["else"] == {False}
    report = choose(model, pace.options(preset), quietly)
    assert report.preset == preset
    assert seen == {"capturing": {True} if preset in GRAPHED else set(), "else": {False, True}}
    seen["else"].clear()
    run(model, model.samples()[:2])
    assert seen["else"] == (set() if preset in GRAPHED else {True})
    assert not has_tf32()


def test_a_model_that_asks_for_tf32_has_it_in_exact():
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert "tf32" not in presets_for(small().network, torch.device("sim"))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
