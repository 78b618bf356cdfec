"""Speed presets and fast decoding on devices, against the exact network with exact pixels."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from inferpool.models.base import Model
from inferpool.models.sources.registry import build
from inferpool.models.vision.gpu_jpegs import decoder_on
from tests.e2e.running import faulty, running
from tests.gpu.conftest import Devices
from tests.models.items import encoded, image_item, loaded, photo, run

PHOTOS = [encoded(photo(name)) for name in ("astronaut", "chelsea", "coffee", "rocket")]
_SLACK = 0.05
"""Largest difference of a probability: presets may round to 16 bits."""


def source_on(devices: Devices) -> str:
    """Return a classifier that the devices compute soon."""
    small = "tests.small_classifier:SmallClassifier"
    return small if devices.is_simulated else "efficientnet_lite0"


@pytest.mark.parametrize("speed", ["auto", "graphed", "graphed_fp16"])
def test_preset_answers_photographs_as_exact_does(
    devices: Devices, speed: str, tmp_path: Path, record_property
):
    source = source_on(devices)
    model = loaded(build(source, "DEFAULT", {}))
    expected = run(model, [image_item(data) for data in PHOTOS])["probabilities"].numpy()
    settings = faulty(source=source, devices=devices.named(0), decode="auto", max_batch_size=8)
    settings["cache_dir"] = str(tmp_path)  # type: ignore[assignment]  # a setting of all models
    flags = ("--speed", speed, "--decode", "fast")
    with running(*flags, settings=settings) as service, ThreadPoolExecutor(8) as pool:
        (worker,) = service.workers()
        assert speed in ("auto", worker["speed"])
        assert worker["speed_deviation"] < _SLACK
        numbers = [*range(len(PHOTOS))] * 8

        def ask(number: int) -> dict[int, float]:
            headers = {"Content-Type": "image/jpeg"}
            answer = service.post("/predict?top_k=10", content=PHOTOS[number], headers=headers)
            assert answer.status_code == 200, answer.text
            return {each["index"]: each["score"] for each in answer.json()["predictions"][0]}

        for number, scores in zip(numbers, pool.map(ask, numbers), strict=True):
            for index, score in scores.items():
                assert abs(score - expected[number][index]) < _SLACK
    for name in ("speed", "speed_gain", "speed_deviation", "decode"):
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
