"""Searches on the simulated accelerator, by what its streams take."""

import math
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from inferpool.models.spec import Placement
from inferpool.models.speed.choose import choose
from inferpool.models.speed.compiled import Compiled, compile_network
from inferpool.models.speed.graphs import Graphed
from inferpool.models.speed.options import ON_DEVICE
from inferpool.models.speed.presets import presets_for
from inferpool.models.speed.search import search
from inferpool.models.speed.trial import Trial
from inferpool.models.speed_names import COMPILED, GRAPHED
from tests.models.items import run
from tests.models.speed.pace import FewSamples, Pace, options, quietly, small

pytestmark = pytest.mark.simulated


class Waits(nn.Sequential):
    """A network that waits for the device, which forbids a capture."""

    def forward(self, x):
        return super().forward(x) * (1.0 if x.sum().item() < math.inf else 0.0)


class WaitsOnDevice(FewSamples):
    def build_network(self):
        return Waits(*super().build_network())


@pytest.fixture(autouse=True)
def sim(monkeypatch, tmp_path_factory):
    """Begin with a device that is well, where nobody else searches."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # as workers have it
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("host")))
    torch.sim.set_device(0)
    yield
    torch.sim.revive(0)


def on_device(model_class=FewSamples):
    model = model_class()
    model.load(Placement(devices=("sim:0",)))
    return model


def compile_package(
    network, preset: str, path: Path, *, made: list[str], model_class=FewSamples
) -> None:
    """Compile in this process."""
    made.append(preset)
    model = on_device(model_class)
    model.network.load_state_dict(network.state_dict())
    calibrate = Trial(model, options()).calibrate
    compile_network(model.network, calibrate, preset, path, path.parent, max_batch_size=4)


class SearchesOnDevice:
    """Choices of workers, and searches behind them, by one clock and with one folder."""

    def __init__(self, pace: Pace, folder: Path) -> None:
        pace.gains = {"compiled": 3.0, "graphed_compiled": 4.0}
        self.pace, self.folder = pace, folder
        self.made: list[str] = []

    def options(self, **others):
        make = partial(compile_package, made=self.made)
        times = replace(ON_DEVICE, clock=self.pace, decode_clock=self.pace)
        return options(cache_dir=self.folder, **{"compile_package": make, "times": times, **others})

    def started(self, model=None):
        return choose(model or on_device(), self.options(measures=False), quietly)

    def searched(self, present):
        model = self.pace.of(on_device())
        return search(model, self.options(chosen=present), present.key, quietly)


@pytest.fixture
def service(pace, tmp_path):
    tmp_path.chmod(0o700)
    return SearchesOnDevice(pace, tmp_path)


def check_answers(model, within):
    exact = small()
    for size in (1, 3, 4, 5):
        items = exact.samples()[:size]
        want = run(exact, items)["probabilities"]
        assert (run(model, items)["probabilities"].cpu() - want).abs().max() <= within


@pytest.mark.slow
def test_a_search_finds_a_compiled_network_that_the_next_start_replays_in_graphs(
    service, monkeypatch
):
    monkeypatch.setenv("SIM_COMPILER_FAILS", "torch.float16")
    first = service.started()
    assert (first.preset, first.is_provisional) == ("exact", True)
    measured = service.searched(first)
    assert (measured.is_provisional, measured.is_final) == (False, False)
    assert not service.made
    left_out = {each.preset: each.lost for each in measured.tried if each.preset in COMPILED}
    assert left_out == dict.fromkeys(COMPILED, "not yet compiled")

    found = service.searched(measured)
    assert found.preset == "compiled_bf16"
    assert found.is_final
    assert found.gain == pytest.approx(4.0)
    tried = [each.preset for each in found.tried]
    everything = {*presets_for(on_device().network, torch.device("sim")), *GRAPHED, *COMPILED}
    assert (set(tried), len(tried)) == (everything, len(everything))
    assert [each.preset for each in found.tried if not each.lost] == [found.preset]
    lost = {each.preset: each.lost for each in found.tried}
    assert lost["compiled_fp16"] == "cannot be used: RuntimeError: a kernel is too large"
    assert lost["compiled"] == "not tried: compiled_bf16 is faster"
    assert service.made == ["compiled_bf16", "compiled_fp16"]

    model = on_device()
    again = service.started(model)
    assert (again.preset, again.tried) == (found.preset, found.tried)
    assert isinstance(model.network, Graphed)
    assert isinstance(model.network.network, Compiled)
    assert model.network.num_graphs == 3  # of 4, 2 and 1
    assert model.network.input_dtype == torch.bfloat16
    check_answers(model, 3 * found.deviation + 1e-5)
    assert len(service.made) == 2


@pytest.mark.slow
def test_a_start_that_measures_tries_packages_last_and_none_that_broke_the_device(
    service, pace, tmp_path
):
    pace.gains["graphed_folded"] = 4.0
    Trial(on_device(), service.options()).make_package("compiled")
    found = choose(pace.of(on_device()), service.options(), quietly)
    assert found.preset == "graphed"  # as a search chooses between these equals
    lost = {each.preset: each.lost for each in found.tried}
    assert lost["compiled"] in ("slower than graphed", "hardly faster than graphed")

    (tmp_path / f"{found.key}.json").unlink()
    (tmp_path / f"{found.key}-compiled.begun").touch()
    pace.gains["graphed_compiled"] = 9.0
    found = choose(pace.of(on_device()), service.options(), quietly)
    assert found.preset == "graphed"
    lost = {each.preset: each.lost for each in found.tried}
    assert lost["compiled"] == "not tried today: the last attempt ended its process"


@pytest.mark.slow
def test_a_package_for_another_device_or_software_is_not_used(service, monkeypatch):
    key = service.started().key
    for name, value in (
        ("get_device_name", "another device"),
        ("get_device_capability", (8, 0)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(torch.sim, name, lambda device=None, value=value: value)
            assert service.started().key != key
    with monkeypatch.context() as patch:
        patch.setattr("inferpool.models.accelerator.device.version", lambda name: "0.0")
        assert service.started().key != key
    assert service.started().key == key


def test_a_compiled_network_that_cannot_be_captured_serves_without_graphs(service, caplog):
    make = partial(compile_package, made=[], model_class=WaitsOnDevice)
    wanted = service.options(speed="compiled", compile_package=make)
    model = on_device(WaitsOnDevice)
    assert choose(model, wanted, quietly).preset == "compiled"
    assert isinstance(model.network, Compiled)
    assert "a compiled network serves without graphs: AcceleratorError" in caplog.text
    check_answers(model, 1e-4)


@pytest.mark.slow
def test_searches_of_presets_that_are_about_equal_choose_alike(service, pace):
    noise = random.Random(0)
    pace.gains = {"folded": 2.0, "bf16": 2.1, "graphed_folded": 4.0, "graphed_fp16": 4.1}
    usual = pace.seconds
    pace.seconds = lambda kind, size: usual(kind, size) * noise.uniform(0.96, 1.04)
    wanted = replace(service.options(), cache_dir=None)
    found = [choose(pace.of(on_device()), wanted, quietly) for _ in range(3)]
    assert {report.preset for report in found} == {"graphed"}
    assert {len(report.tried) for report in found} == {len(GRAPHED) * 2 + len(COMPILED)}
    lost = {each.preset: each.lost for each in found[0].tried}
    assert lost["graphed_fp16"] in ("hardly faster than graphed", "slower than graphed")
    assert lost["compiled"] == "not available: there is no cache_dir"
