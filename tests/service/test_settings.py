import subprocess
import sys
from pathlib import Path

import pytest

from models import registry
from models.spec import Placement
from service.settings import (
    BUILT_IN_SOURCES,
    ModelSettings,
    Settings,
    is_source,
    slug,
    source_hint,
)
from service.settings_loader import load
from service.settings_words import SettingsError
from workers.devices import Host


def test_settings_cannot_be_changed(tmp_path):
    settings = load({}, {}, tmp_path).settings
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1


def test_the_arena_holds_two_of_the_largest_bodies(tmp_path):
    loaded = load({}, {"INFERPOOL_MAX_BODY_BYTES": "1000000000"}, tmp_path)
    assert loaded.settings.arena_bytes >= 2_000_000_000
    loaded = load({}, {"INFERPOOL_ARENA_BYTES": "auto"}, tmp_path)
    assert 2**25 <= loaded.settings.arena_bytes <= 2**28


def test_a_worker_is_told_what_the_settings_say(tmp_path):
    environ = {
        "INFERPOOL_MODELS__ECHO__WEIGHTS": "none",
        "INFERPOOL_MODELS__ECHO__OPTIONS__DELAY": "2",
        "INFERPOOL_MODELS__ECHO__MAX_BATCH_SIZE": "3",
    }
    model = load({}, environ, tmp_path).settings.models["echo"]
    config = model.worker_config_for(
        "echo", Placement(devices=("cpu",), num_threads=4), max_image_pixels=9
    )
    assert config.model.name == config.model.source == "echo"
    assert config.model.weights is None
    assert config.model.options == {"delay": 2}
    assert (config.max_batch_size, config.prepare_threads) == (3, 1)
    gpu = Placement(devices=("cuda:0",), visible=("GPU-1",), num_threads=4)
    assert model.worker_config_for("echo", gpu, max_image_pixels=9).prepare_threads == 4


def test_speed_and_its_cache_reach_the_worker(tmp_path):
    settings = load({"speed": "folded"}, {"HOME": "/nowhere"}, tmp_path).settings
    (model,) = settings.models.values()
    placement = Placement(devices=("cpu",))
    config = model.worker_config_for("m", placement, max_image_pixels=9, cache_dir="/c")
    assert (config.speed, config.cache_dir) == ("folded", "/c")
    assert load({}, {"INFERPOOL_CACHE_DIR": "none"}, tmp_path).settings.cache_folder() is None
    with pytest.raises(SettingsError, match="is not one of auto, exact"):
        load({"speed": "ludicrous"}, {}, tmp_path)


def test_a_split_model_is_served_exactly_with_threads_of_all_its_ranks_to_prepare(tmp_path):
    settings = load({"placement": "pipeline"}, {}, tmp_path).settings
    (model,) = settings.models.values()
    assert model.speed == "auto"
    host = Host(cpus=(0, 1), num_cores=2)
    (placement,) = model.placements_on(host)
    assert (placement.split, placement.devices) == ("pipeline", ("cpu", "cpu"))
    config = model.worker_config_for("m", placement, max_image_pixels=9)
    assert (config.speed, config.prepare_threads) == ("exact", 1)
    gpus = Placement(devices=("cuda:0", "cuda:1"), split="tensor", visible=("a", "b"))
    assert model.worker_config_for("m", gpus, max_image_pixels=9).prepare_threads == 2


def test_every_field_is_documented():
    for table in (Settings, ModelSettings):
        for name, field in table.model_fields.items():
            assert field.description, name


def test_the_settings_and_the_registry_agree_on_what_a_source_is():
    assert BUILT_IN_SOURCES == registry._BUILT_IN
    for suffix in (".pt2", *registry._SCRIPT_SUFFIXES):
        assert is_source(f"net{suffix}")
        assert slug(f"net{suffix}") == "net"
    for suffix in registry._WEIGHT_SUFFIXES:
        assert not is_source(f"net{suffix}")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("efficientnet_lite0", "efficientnet_lite0"),
        ("torchvision:resnet18", "resnet18"),
        ("my.mod:MyNet", "mynet"),
        ("path/to/net.pt2", "net"),
        ("./Big Net.pt", "big-net"),
        ("mod:_Private", "private"),
        ("mod:___", "model"),
        ("mod:" + "x" * 100, "x" * 64),
    ],
)
def test_the_name_of_a_source_is_fit_for_a_url(source, name):
    assert is_source(source)
    assert slug(source) == name


def test_every_classifier_of_torchvision_is_known_by_its_name():
    torchvision = pytest.importorskip("torchvision")
    for name in torchvision.models.list_models(module=torchvision.models):
        assert source_hint(name, []) == f"did you mean torchvision:{name}?"
    assert "did you mean" not in source_hint("my_net", [])


def test_the_front_end_does_without_torch():
    code = (
        "import sys, service.settings_loader, service.cli_config, service.logs, service.metrics, "
        "service.console; print([m for m in sys.modules if m in ('torch', 'models.base')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"
