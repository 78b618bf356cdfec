import pytest

from inferpool.models.spec import Placement
from inferpool.service.settings.loader import load
from inferpool.service.settings.names import SettingsError
from inferpool.workers.host.devices import Host


def test_a_worker_is_told_what_the_settings_say(tmp_path):
    environ = {
        "INFERPOOL_MODELS__ECHO__WEIGHTS": "none",
        "INFERPOOL_MODELS__ECHO__OPTIONS__DELAY": "2",
        "INFERPOOL_MODELS__ECHO__MAX_BATCH_SIZE": "3",
        "INFERPOOL_MODELS__ECHO__MAX_BATCH_TOKENS": "99",
    }
    model = load({}, environ, tmp_path).settings.models["echo"]
    config = model.worker_config_for(
        "echo", Placement(devices=("cpu",), num_threads=4), max_image_pixels=9
    )
    assert config.model.name == config.model.source == "echo"
    assert config.model.weights is None
    assert config.model.options == {"delay": 2}
    assert (config.max_batch_size, config.max_batch_tokens, config.prepare_threads) == (3, 99, 1)
    gpu = Placement(devices=("cuda:0",), visible=("GPU-1",), num_threads=4)
    assert model.worker_config_for("echo", gpu, max_image_pixels=9).prepare_threads == 4


@pytest.mark.parametrize(
    ("device", "num_threads", "decoders"),
    [("cuda:0", 3, 0), ("cuda:0", 4, 2), ("cuda:0", 64, 32), ("cpu", 64, 0)],
)
def test_workers_with_a_gpu_and_cores_to_spare_have_decoders(
    tmp_path, device, num_threads, decoders
):
    model = load({"model": "echo"}, {}, tmp_path).settings.models["echo"]
    placement = Placement(devices=(device,), num_threads=num_threads)
    config = model.worker_config_for("echo", placement, max_image_pixels=9)
    assert config.decoders == decoders
    own = model.model_copy(update={"decoders": 5})
    assert own.worker_config_for("echo", placement, max_image_pixels=9).decoders == 5


def test_speed_and_its_cache_reach_the_worker(tmp_path):
    settings = load({"speed": "folded"}, {"HOME": "/nowhere"}, tmp_path).settings
    (model,) = settings.models.values()
    placement = Placement(devices=("cpu",))
    config = model.worker_config_for("m", placement, max_image_pixels=9, cache_dir="/c")
    assert (config.speed, config.cache_dir) == ("folded", "/c")
    assert load({}, {"INFERPOOL_CACHE_DIR": "none"}, tmp_path).settings.cache_folder() is None
    with pytest.raises(SettingsError, match="is not one of auto, exact"):
        load({"speed": "ludicrous"}, {}, tmp_path)


@pytest.mark.parametrize(
    ("device", "searches", "measures"),
    [("cpu", True, False), ("cpu", False, True), ("cuda:0", True, False)],
)
def test_a_worker_leaves_measuring_to_the_search(tmp_path, device, searches, measures):
    (model,) = load({}, {}, tmp_path).settings.models.values()
    placement = Placement(devices=(device,))
    config = model.worker_config_for(
        "m", placement, max_image_pixels=9, cache_dir="/c", searches_speed=searches
    )
    assert config.measures_speed is measures


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
