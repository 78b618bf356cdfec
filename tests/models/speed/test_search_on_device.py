"""Searches on the simulated accelerator, by what its streams take."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

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
from tests.models.speed.pace import FewSamples, options, quietly, small

pytestmark = pytest.mark.simulated

CONVOLUTION_US = 3000


@pytest.fixture(autouse=True)
def sim(monkeypatch, tmp_path_factory):
    """Let convolutions take their time, and nothing else."""
    monkeypatch.setenv(
        "SIM_DURATIONS_US", json.dumps({"aten::convolution_overrideable": CONVOLUTION_US})
    )
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("host")))
    torch.sim.set_device(0)
    torch.sim.set_duration_us("aten::convolution_overrideable", CONVOLUTION_US)
    yield
    torch.sim.set_duration_us("aten::convolution_overrideable", 0)
    torch.sim.revive(0)


def on_device():
    model = FewSamples()
    model.load(Placement(devices=("sim:0",)))
    return model


def compile_package(network, preset: str, path: Path, *, made: list[str]) -> None:
    """Compile in this process."""
    made.append(preset)
    model = on_device()
    model.network.load_state_dict(network.state_dict())
    calibrate = Trial(model, options()).calibrate
    compile_network(model.network, calibrate, preset, path, path.parent, max_batch_size=4)


class SearchesOnDevice:
    """Choices of workers, and searches behind them, with one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: list[str] = []

    def options(self, **others):
        make = partial(compile_package, made=self.made)
        return options(cache_dir=self.folder, compile_package=make, times=ON_DEVICE, **others)

    def started(self, model=None):
        return choose(model or on_device(), self.options(measures=False), quietly)

    def searched(self, present):
        return search(on_device(), self.options(chosen=present), present.key, quietly)


@pytest.fixture
def service(tmp_path):
    tmp_path.chmod(0o700)
    return SearchesOnDevice(tmp_path)


def check_answers(model, within):
    exact = small()
    for size in (1, 3, 4, 5):
        items = exact.samples()[:size]
        want = run(exact, items)["probabilities"]
        assert (run(model, items)["probabilities"].cpu() - want).abs().max() <= within


@pytest.mark.slow
def test_a_search_finds_a_compiled_network_that_the_next_start_replays_in_graphs(service):
    first = service.started()
    assert (first.preset, first.is_provisional) == ("exact", True)
    measured = service.searched(first)
    assert (measured.is_provisional, measured.is_final) == (False, False)
    assert not service.made
    left_out = {each.preset: each.lost for each in measured.tried if each.preset in COMPILED}
    assert left_out == dict.fromkeys(COMPILED, "not yet compiled")

    found = service.searched(measured)
    assert found.preset in COMPILED
    assert found.is_final
    assert found.gain > 2
    tried = [each.preset for each in found.tried]
    everything = {*presets_for(on_device().network, torch.device("sim")), *GRAPHED, *COMPILED}
    assert (set(tried), len(tried)) == (everything, len(everything))
    assert [each.preset for each in found.tried if not each.lost] == [found.preset]
    num_made = len(service.made)

    model = on_device()
    again = service.started(model)
    assert (again.preset, again.tried) == (found.preset, found.tried)
    assert isinstance(model.network, Graphed)
    assert isinstance(model.network.network, Compiled)
    assert model.network.num_graphs == 3  # of 4, 2 and 1
    assert model.network.input_dtype in (torch.bfloat16, torch.float16, torch.float32)
    check_answers(model, 3 * found.deviation + 1e-5)
    assert len(service.made) == num_made


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
