"""Presets tried and chosen on an accelerator: the simulated one."""

import gc
import logging
import math

import pytest
import torch
from msgspec.structs import replace as replace_report
from torch import nn

from inferpool.models.accelerator.device import has_tf32
from inferpool.models.agreement import Agreement
from inferpool.models.spec import Placement
from inferpool.models.speed import fused as fused_module
from inferpool.models.speed import trial as trying
from inferpool.models.speed.choose import SpeedOptions, choose
from inferpool.models.speed.graphs import Graphed
from inferpool.models.speed.names import GRAPHED
from inferpool.models.speed.presets import presets_for
from inferpool.models.speed.trial import Trial
from inferpool.models.speed.verdicts import VerdictStore
from tests.models.items import run
from tests.models.speed.test_choose import options, quietly, small
from tests.simulated_accelerator.convolutions import fused_convolution
from tests.small_classifier import SmallClassifier

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


def on_device(tell=None, model_class=SmallClassifier):
    """Return a classifier on the device; `tell` gets each input, and returns a factor."""

    class OnDevice(model_class):
        def build_network(self):
            network = super().build_network()
            return Watched(network, tell) if tell else network

    model = OnDevice()
    model.load(Placement(devices=("sim:0",)))
    return model


def tried(model, max_batch_size=4, **others):
    return Trial(model, max_batch_size, VerdictStore(None), **others)


def check_answers(model, within):
    """Compare answers with those of the exact network on the CPU, at all sizes and one more."""
    exact = small()
    items = exact.samples()
    for size in range(1, 6):
        want = run(exact, items[:size])["probabilities"]
        found = run(model, items[:size])["probabilities"].cpu()
        assert (found - want).abs().max() <= within


def test_auto_takes_graphs_of_a_preset_that_agrees_and_captures_none_in_service(always_faster):
    model = on_device()
    report = choose(model, options(), quietly)
    assert report.preset in GRAPHED
    assert report.is_final
    assert "graphed" in report.note
    assert isinstance(model.network, Graphed)
    assert model.network.num_graphs == 3  # of 4, 2 and 1
    check_answers(model, 3 * report.deviation + 1e-5)
    assert model.network.num_graphs == 3


def test_a_worker_that_is_restarted_captures_the_graphs_before_it_serves(always_faster):
    report = choose(on_device(), options("graphed"), quietly)
    model = on_device()
    told = SpeedOptions(speed="auto", max_batch_size=4, cache_dir=None, chosen=report)
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
    monkeypatch.setattr(fused_module, "resolve_name", lambda name: kernel)


@pytest.fixture
def not_fused(monkeypatch):
    """Let convolutions be what they are: the network's own code runs at a capture."""
    use_kernel(monkeypatch, failing)


@pytest.mark.parametrize(
    ("kernel", "gain", "is_used"),
    [(right, 2.0, True), (right, 0.9, False), (wrong, 2.0, False), (failing, 2.0, False)],
)
def test_graphs_have_fused_convolutions_if_these_are_right_and_faster(
    monkeypatch, kernel, gain, is_used
):
    plain = on_device()
    choose(plain, options("folded"), quietly)
    use_kernel(monkeypatch, kernel)
    monkeypatch.setattr(Trial, "_gain", lambda self, network, batch, other=None: gain)
    model = on_device()
    assert choose(model, options("graphed"), quietly).preset == "graphed"
    assert model.network.num_graphs == 3
    items = model.samples()[:4]
    scores = [run(each, items)["probabilities"].cpu() for each in (plain, model)]
    assert torch.equal(*scores) is not is_used
    check_answers(model, 1e-3)


@pytest.mark.parametrize("kernel", [right, wrong])
def test_a_preset_that_is_not_taken_gives_its_memory_back(monkeypatch, kernel):
    use_kernel(monkeypatch, kernel)
    trial = tried(on_device())
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
def test_a_network_that_cannot_be_captured_serves_without_graphs(monkeypatch, always_faster, tell):
    monkeypatch.setattr(Trial, "_gain", lambda *_: 2.0)
    model = on_device(tell)
    report = choose(model, options(), quietly)
    assert report.preset in GRAPHED.values()
    assert "graphed fails: AcceleratorError" in report.note
    check_answers(model, 3 * report.deviation + 1e-5)


def test_graphs_that_are_named_and_cannot_be_captured_leave_the_preset_that_they_replay(caplog):
    model = on_device(synchronises)
    with caplog.at_level(logging.WARNING):
        report = choose(model, options("graphed"), quietly)
    assert report.preset == "folded"
    assert report.note.startswith("graphed fails: AcceleratorError")
    assert 'speed = "graphed" cannot be used, and "folded" serves' in caplog.text
    check_answers(model, 1e-5)


def test_graphs_that_compute_something_else_at_one_size_are_refused(always_faster, not_fused):
    def double(x):
        return 2.0 if torch.sim.is_current_stream_capturing() and len(x) == 2 else 1.0

    model = on_device(double)
    report = choose(model, options(), quietly)
    assert report.preset not in GRAPHED
    assert "graphs compute something else" in report.note


@pytest.mark.parametrize("deviation", [math.inf, math.nan])
def test_graphs_without_a_measure_of_how_far_they_stray_are_refused(monkeypatch, deviation):
    stray = Agreement(is_within=False, deviation=deviation, text="the same as the preset's")
    monkeypatch.setattr(Trial, "_judged", lambda *_: stray)
    with pytest.raises(ValueError, match="graphs compute something else"):
        tried(on_device()).prepare("graphed")


def test_a_capture_that_breaks_the_device_is_not_tried_again_for_a_day(
    tmp_path, always_faster, not_fused
):
    def lose(x):
        if torch.sim.is_current_stream_capturing():
            torch.sim.lose(0)
        return 1.0

    with pytest.raises(torch.AcceleratorError):
        choose(on_device(lose), options(cache_dir=tmp_path), quietly)
    torch.sim.revive(0)  # as for the next process
    model = on_device(lose)
    report = choose(model, options(cache_dir=tmp_path), quietly)
    assert report.preset in GRAPHED.values()
    assert report.is_cut_short
    assert "graphs are not tried today" in report.note


def test_a_model_whose_inputs_differ_in_shape_serves_without_graphs(monkeypatch, always_faster):
    monkeypatch.setattr(Trial, "has_varying_shapes", True)
    assert choose(on_device(), options(), quietly).preset in GRAPHED.values()
    report = choose(on_device(), options("graphed"), quietly)
    assert report.preset == "folded"
    assert "graphs are for inputs of one shape" in report.note


class Noting(SmallClassifier):
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
def test_presets_are_timed_as_service_computes_them_and_without_what_follows(model_class, where):
    model = on_device(model_class=model_class)
    model.seen = []
    trial = tried(model, max_batch_size=128)
    trial.gain(trial.exact)
    assert {size for size, _ in model.seen} == {1, 2, 4, 8, 16, 32, 64, 128}
    assert model.seen[-1] == (128, where)
    assert {place for _, place in model.seen} == {where}


def test_timing_waits_for_what_was_told_before_and_for_the_end():
    trial = tried(on_device())
    batch = trial._timed_batch(1)
    are_idle = []

    def clock():
        are_idle.append(torch.sim.current_stream().query())
        return 0.0

    trial._clock = clock
    torch.sim.busy(20_000)
    trial._seconds(trial.exact, batch)
    assert are_idle == [True, True]


def test_sizes_end_where_a_batch_does_not_fit():
    def take(x):
        torch.empty(len(x) * 300 << 20, dtype=torch.uint8, device=x.device)
        return 1.0

    trial = tried(on_device(take), max_batch_size=8, clock=lambda: 0.0)  # time bounds them, too
    assert list(trial.sizes) == [1, 2]


def test_sizes_end_where_a_batch_takes_long():
    now = 0.0

    def take(x):
        nonlocal now
        now += 0.04 * len(x)
        return 1.0

    trial = tried(on_device(take), max_batch_size=64, clock=lambda: now)
    assert list(trial.sizes) == [1, 2]


def test_devices_of_two_kinds_share_no_verdict_even_if_their_names_are_the_same(monkeypatch):
    monkeypatch.setattr(trying, "name_of", lambda device: "the same")
    on_cpu = small()
    assert tried(on_device()).key != tried(on_cpu).key
    assert tried(on_device()).key == tried(on_device()).key


def test_devices_of_one_kind_with_other_names_share_no_verdict(monkeypatch):
    keys = set()
    for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB MIG 1g.10gb"):
        monkeypatch.setattr(trying, "name_of", lambda device, name=name: name)
        keys.add(tried(on_device()).key)
    assert len(keys) == 2


@pytest.mark.parametrize("preset", ["tf32", "graphed_tf32"])
@pytest.mark.parametrize("is_fused", [True, False])
def test_rounding_to_tf32_is_a_preset_while_exact_is_float32(monkeypatch, preset, is_fused):
    seen = {"capturing": set(), "else": set()}

    def note(x):
        is_capturing = torch.sim.is_current_stream_capturing()
        seen["capturing" if is_capturing else "else"].add(has_tf32())
        return 1.0

    def kernel(*arguments):
        note(arguments)
        return fused_convolution(*arguments)

    use_kernel(monkeypatch, kernel if is_fused else failing)
    monkeypatch.setattr(Trial, "_gain", lambda *_: 2.0)
    model = on_device(note)
    assert "tf32" in presets_for(model.network, torch.device("sim"))
    run(model, model.samples()[:2])
    assert seen["else"] == {False}
    report = choose(model, options(preset), quietly)
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
