"""Speed presets and fast decoding on devices, against the exact network with exact pixels."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from inferpool.models.base import Model
from inferpool.models.sources.registry import build
from inferpool.models.speed_names import COMPILED, GRAPHED
from inferpool.models.vision.gpu_jpegs import decoder_on
from tests.e2e.running import Running, faulty, running, until
from tests.gpu.conftest import Devices
from tests.models.items import encoded, image_item, loaded, photo, run

PHOTOS = [encoded(photo(name)) for name in ("astronaut", "chelsea", "coffee", "rocket")]
PRESETS = ("auto", "graphed", "graphed_fp16", "compiled_fp16")
_SLACK = 0.05
"""Largest difference of a probability: presets may round to 16 bits."""
_UNDER_WAY = ("waiting", "searching", "changing")


def source_on(devices: Devices) -> str:
    """Return a classifier that the devices compute soon."""
    small = "tests.small_classifier:SmallClassifier"
    return small if devices.is_simulated else "efficientnet_lite0"


@pytest.fixture(scope="module")
def service(devices: Devices, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model for each preset. It need not be ready: what fails to load fails its own test."""
    model = faulty(
        source=source_on(devices),
        devices=devices.named(0),
        decode="fast",
        max_batch_size=2 if devices.is_simulated else 8,  # each size is timed, and slow there
    )["models"]["m"]
    models = {speed: {**model, "speed": speed} for speed in PRESETS}
    settings = {
        "cache_dir": str(tmp_path_factory.mktemp("cache")),
        "models": models,
        # So that `auto` has chosen before it is ready; simulated devices would take minutes.
        "speed_search": devices.is_simulated,
    }
    with running(settings=settings, ready=False) as service:
        yield service.wait_until_listening()


def check_answers(service: Running, model: str, expected: np.ndarray, times: int = 8) -> None:
    """Check answers to photographs, eight at once."""

    def ask(number: int) -> dict[int, float]:
        headers = {"Content-Type": "image/jpeg"}
        path = f"/predict/{model}?top_k=10"
        answer = service.post(path, content=PHOTOS[number], headers=headers)
        assert answer.status_code == 200, answer.text
        return {each["index"]: each["score"] for each in answer.json()["predictions"][0]}

    numbers = [*range(len(PHOTOS))] * times
    with ThreadPoolExecutor(8) as pool:
        for number, scores in zip(numbers, pool.map(ask, numbers), strict=True):
            for index, score in scores.items():
                assert abs(score - expected[number][index]) < _SLACK


@pytest.fixture(scope="module")
def expected(devices: Devices) -> np.ndarray:
    model = loaded(build(source_on(devices), "DEFAULT", {}))
    return run(model, [image_item(data) for data in PHOTOS])["probabilities"].numpy()


@pytest.mark.slow
@pytest.mark.parametrize("speed", PRESETS)
def test_preset_answers_photographs_as_exact_does(
    devices: Devices, service: Running, expected: np.ndarray, speed: str, record_property
):
    until(lambda: service.worker(speed)["state"] == "ready", 500)
    worker = service.worker(speed)
    assert speed in ("auto", worker["speed"])
    assert worker["speed_deviation"] < _SLACK
    check_answers(service, speed, expected)
    for name in ("speed", "speed_gain", "speed_deviation", "decode"):
        record_property(name, worker[name])


@pytest.mark.parametrize(
    "devices",
    [
        # It compiles nothing there, but searches for a minute at low priority.
        pytest.param("sim", marks=[pytest.mark.simulated, pytest.mark.compile]),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
    indirect=True,
)
def test_a_search_behind_a_worker_loses_no_request(
    devices: Devices, expected: np.ndarray, tmp_path: Path, record_property
):
    size, env = ("1", {"CXX": "no-such-compiler"}) if devices.is_simulated else ("8", {})
    arguments = (source_on(devices), "--speed", "auto", "--devices", devices.named(0))
    cache = {"INFERPOOL_CACHE_DIR": str(tmp_path)}
    with running(*arguments, "--max-batch-size", size, env=env | cache) as service:
        (worker,) = service.workers()
        assert (worker["speed"], worker["decode"], worker["incarnation"]) == ("exact", "exact", 0)
        model = service.model()["name"]

        def has_ended() -> bool:
            check_answers(service, model, expected, times=1)
            time.sleep(0.5)  # the search has what time is left over
            return service.model()["speed_search"]["state"] not in _UNDER_WAY

        until(has_ended, 500)
        (worker,) = service.workers()
        assert service.model()["speed_search"]["state"] != "failed", service.log
        if devices.is_simulated:  # where decoding fast always pays
            assert (worker["decode"], worker["incarnation"]) == ("fast", 1)
        assert {each["preset"] for each in worker["speed_tried"]} >= {*GRAPHED, *COMPILED}
        for name in ("speed", "speed_gain", "speed_tried"):
            record_property(name, worker[name])


@pytest.fixture(scope="module")
def model(devices: Devices) -> Model:
    model = build("efficientnet_lite0", "DEFAULT", {})
    model.load(devices.placement(0))
    return model


def test_pixels_decoded_on_the_device_give_about_the_same_scores(
    devices: Devices, model: Model, record_property
):
    if decoder_on(torch.device(devices.kind)) is None:
        pytest.fail("there is no decoder of JPEGs for this device: is nvJPEG installed?")
    items = [image_item(data) for data in PHOTOS]
    scores = {}
    for decode in ("exact", "device"):
        model.decode = decode  # type: ignore[assignment]  # one of the words
        with torch.inference_mode():
            batch = model.collate([model.preprocess(item) for item in items])
            assert batch["image"].device.type == ("cpu" if decode == "exact" else devices.kind)
            outputs = {name: out.cpu() for name, out in model.forward(batch).items()}
            scores[decode] = model.postprocess(outputs)["probabilities"].numpy()
    difference = np.abs(scores["exact"] - scores["device"]).max()
    record_property("largest difference", float(difference))
    assert (scores["exact"].argmax(1) == scores["device"].argmax(1)).all()
    assert difference < _SLACK
