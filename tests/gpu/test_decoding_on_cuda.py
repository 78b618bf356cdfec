"""JPEGs decoded by nvJPEG. Run with `uv run pytest -m gpu`; never yet run on a device."""

import pytest
import torch

from inferpool.models.sources.registry import build
from inferpool.models.spec import Placement
from inferpool.models.vision.gpu_jpegs import GpuJpegs, nvjpeg
from tests.models.items import encoded, image_item, photo, run

pytestmark = pytest.mark.gpu
DATAS = [encoded(photo(name)) for name in ("astronaut", "chelsea", "coffee", "rocket")]


@pytest.fixture(scope="module")
def model():
    model = build("efficientnet_lite0", "DEFAULT", {})
    model.load(Placement(devices=("cuda:0",)))
    return model


def test_pixels_are_made_on_the_device_and_about_the_same(model):
    decode = nvjpeg(model.device)
    assert decode is not None
    jpegs = GpuJpegs(decode, model.transform)
    accepted = [jpegs.accept(memoryview(data), 50_000_000) for data in DATAS]
    assert all(jpeg is not None for jpeg in accepted)
    pixels = jpegs.pixels(accepted, model._quick_pixels)
    assert {each.device.type for each in pixels} == {"cuda"}
    for each, data in zip(pixels, DATAS, strict=True):
        exact = model._quick_pixels(memoryview(data))
        assert (each.cpu().float() - exact.float()).abs().mean() < 2


def test_scores_are_those_of_exact_decoding(model):
    items = [image_item(data) for data in DATAS]
    exact = run(model, items)["probabilities"].cpu()
    model.decode = "fast"
    fast = run(model, items)["probabilities"].cpu()
    model.decode = "exact"
    assert torch.equal(exact.argmax(1), fast.argmax(1))
    assert (exact - fast).abs().max() < 0.05
