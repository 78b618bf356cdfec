import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inferpool.models.errors import ModelError
from inferpool.models.spec import Placement
from inferpool.models.speed.choose import choose
from inferpool.models.speed.compiled import Compiled, can_compile
from inferpool.models.speed.options import SpeedOptions
from inferpool.models.speed.trial import Trial
from inferpool.workers.shared.config import ModelConfig, WorkerConfig
from inferpool.workers.speed.worker_side import CompileError, compile_package
from tests.models.items import run
from tests.small_classifier import SmallClassifier

CPU = Placement(devices=("cpu",))
CONFIG = WorkerConfig(
    model=ModelConfig(name="m", source="tests.small_classifier:SmallClassifier"), placement=CPU
)
needs_compiler = pytest.mark.skipif(not can_compile(), reason="there is no C++ compiler")


def loaded(bias=0.0):
    """With weights that no other process could come by."""
    model = SmallClassifier()
    model.load(CPU)
    with torch.no_grad():
        model.network[3].bias += bias
    return model


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    compile_package(CONFIG, loaded(bias=1.5).network, "compiled", folder / "key.pt2")
    return folder / "key.pt2"


@needs_compiler
@pytest.mark.compile
@pytest.mark.timeout(600)
def test_a_package_computes_batches_of_any_size_with_the_weights_of_the_worker(package: Path):
    model = loaded(bias=1.5)
    items = model.samples()
    want = run(model, items)["probabilities"]
    model.network = Compiled(package)
    for size in (1, 2, 7, 60):
        found = run(model, items[:size])["probabilities"]
        torch.testing.assert_close(found, want[:size], rtol=1e-4, atol=1e-5)
    assert [path.name for path in package.parent.iterdir()] == ["key.pt2"]


@needs_compiler
@pytest.mark.compile
@pytest.mark.timeout(600)
def test_auto_chooses_a_compiled_package_that_exists(package: Path, tmp_path, monkeypatch):
    monkeypatch.setattr(
        Trial, "gain", lambda self, network: 3.0 if type(network) is Compiled else 2.0
    )
    options = SpeedOptions(
        speed="auto",
        max_batch_size=4,
        cache_dir=tmp_path,
        compile_package=lambda network, preset, path: shutil.copy(package, path),
    )
    assert choose(loaded(bias=1.5), options, lambda stage: None).preset != "compiled"
    named = SpeedOptions(
        speed="compiled",
        max_batch_size=4,
        cache_dir=tmp_path,
        compile_package=options.compile_package,
    )
    assert choose(loaded(bias=1.5), named, lambda stage: None).preset == "compiled"
    assert choose(loaded(bias=1.5), options, lambda stage: None).preset == "compiled"


@needs_compiler
@pytest.mark.compile
@pytest.mark.timeout(600)
def test_a_package_that_others_could_have_written_is_not_loaded(package: Path, tmp_path):
    tmp_path.chmod(0o700)
    copy = Path(shutil.copy(package, tmp_path))
    copy.chmod(0o666)
    with pytest.raises(PermissionError, match="written by others"):
        Compiled(copy)
    copy.chmod(0o600)
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="written by others"):
        Compiled(copy)


@pytest.mark.slow
@pytest.mark.simulated
def test_a_package_is_compiled_on_the_device_of_the_worker(tmp_path):
    """A stand-in compiles, in the real process for that."""
    tmp_path.chmod(0o700)
    device = torch.device("sim:0")
    torch.sim.set_device(device)
    placement = Placement(devices=(str(device),))
    model = SmallClassifier()
    model.load(placement)
    with torch.no_grad():
        model.network[3].bias += 1.5
    want = run(loaded(bias=1.5), model.samples()[:5])["probabilities"]
    path = tmp_path / "key.pt2"
    compile_package(replace(CONFIG, placement=placement), model.network, "compiled_bf16", path)
    model.network = Compiled(path, None, device)
    assert model.network.input_dtype == torch.bfloat16
    found = run(model, model.samples()[:5])["probabilities"].cpu()
    torch.testing.assert_close(found, want, rtol=0.05, atol=0.01)
    assert [each.name for each in tmp_path.iterdir()] == ["key.pt2"]


@pytest.mark.slow
def test_failed_compilation_says_why_and_leaves_nothing(tmp_path):
    config = WorkerConfig(
        model=ModelConfig(name="m", source="tests.no_such_module:Net"), placement=CPU
    )
    with pytest.raises(CompileError, match="no_such_module"):
        compile_package(config, loaded().network, "compiled", tmp_path / "key.pt2")
    assert not list(tmp_path.iterdir())


def test_compiled_preset_says_what_is_missing(tmp_path, monkeypatch):
    def options(cache_dir):
        return SpeedOptions(
            speed="compiled",
            max_batch_size=4,
            cache_dir=cache_dir,
            compile_package=lambda network, preset, path: None,
        )

    with pytest.raises(ModelError, match="needs a cache_dir"):
        choose(loaded(), options(None), lambda stage: None)
    monkeypatch.setitem(os.environ, "CXX", "no-such-compiler")
    with pytest.raises(ModelError, match="needs a C\\+\\+ compiler"):
        choose(loaded(), options(tmp_path), lambda stage: None)
