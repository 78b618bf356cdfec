import subprocess
import sys
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from inferpool.models.errors import CheckpointError, InputError
from inferpool.models.files.checkpoint import read_weights
from inferpool.models.vision import efficientnet
from inferpool.models.vision.efficientnet import EfficientNetLite0, packaged_weights
from inferpool.models.vision.images import decode_image
from tests.models.items import (
    CPU,
    answers,
    encoded,
    image_item,
    loaded,
    orientation_exif,
    photo,
    run,
)
from tests.models.reference import ImageClassification, InterpolationMode


@pytest.fixture(scope="module")
def model():
    return loaded(EfficientNetLite0())


def test_photographs_are_recognised(model):
    items = [image_item(encoded(photo(n)), top_k=3) for n in ("chelsea", "coffee", "rocket")]
    cat, coffee, rocket = answers(model, items)
    assert {each["label"] for each in cat} == {"tabby", "tiger cat", "Egyptian cat"}
    assert coffee[0]["label"] == "espresso"
    assert coffee[0]["score"] > 0.9
    assert rocket[0]["label"] == "missile"


def test_scores_equal_those_of_torchvisions_transforms(model):
    preset = ImageClassification(
        crop_size=224,
        resize_size=256,
        interpolation=InterpolationMode.BICUBIC,
        mean=(127 / 255,) * 3,
        std=(128 / 255,) * 3,
    )
    data = encoded(photo("astronaut"))
    with torch.inference_mode():
        expected = model.network(preset(decode_image(data))[None]).softmax(-1)[0]
    assert torch.allclose(run(model, [image_item(data)])["probabilities"][0], expected, atol=1e-5)


def test_the_network_pads_as_tensorflow_does_where_the_total_is_odd(model):
    stem = model.network._conv_stem
    x = torch.randn(1, 3, 8, 8)
    by_hand = torch.nn.functional.conv2d(
        torch.nn.functional.pad(x, (0, 1, 0, 1)), stem.weight, stride=2
    )
    assert torch.equal(stem(x), by_hand)


def test_weights_may_come_from_a_checkpoint_or_be_random(model, tmp_path):
    weights = {
        n: t.contiguous() for n, t in read_weights(packaged_weights(), model.network).items()
    }
    weights["_fc.bias"] = torch.arange(1000.0)
    save_file(weights, tmp_path / "own.safetensors")
    own = loaded(EfficientNetLite0(weights=str(tmp_path / "own.safetensors")))
    (answer,) = answers(own, [image_item(encoded(Image.new("RGB", (300, 300))))])
    assert answer[0]["index"] == 999
    loaded(EfficientNetLite0(weights=None))


def test_a_missing_package_of_weights_is_named(monkeypatch):
    monkeypatch.setattr(efficientnet, "_PACKAGE", "efficientnet_lite0_nowhere")
    with pytest.raises(CheckpointError, match="efficientnet-lite0-nowhere, which is not installed"):
        EfficientNetLite0().load(CPU)


@pytest.mark.slow
def test_it_loads_without_torchvision():
    code = (
        "import sys; from inferpool.models.sources.registry import build;"
        "from inferpool.models.spec import Placement;"
        "build('efficientnet_lite0', 'DEFAULT', {}).load(Placement(devices=('cpu',)));"
        "sys.exit('torchvision' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# Fast decoding


def scores(model, datas, decode):
    model.decode = decode
    try:
        return run(model, [image_item(data) for data in datas])["probabilities"]
    finally:
        model.decode = "exact"


def views():
    """Parts of photographs, some of them enlarged, at several qualities."""
    rng = np.random.default_rng(0)
    names = ("astronaut", "chelsea", "coffee", "rocket", "retina", "hubble_deep_field")
    datas = []
    for name in names:
        whole = photo(name)
        for quality, enlarge in ((95, 1), (85, 1), (90, 3)):
            part = rng.uniform(0.55, 1, 2)
            width, height = (int(edge * p) for edge, p in zip(whole.size, part, strict=True))
            left, top = rng.integers(0, whole.width - width), rng.integers(0, whole.height - height)
            view = whole.crop((left, top, left + width, top + height))
            view = view.resize([int(edge * enlarge) for edge in view.size])
            datas.append(encoded(view, quality=quality))
    return datas


@pytest.mark.slow
def test_photographs_keep_their_label_and_about_their_scores(model):
    datas = views()
    exact, fast = (scores(model, datas, decode) for decode in ("exact", "fast"))
    found = model.tolerance.judge({"probabilities": exact}, {"probabilities": fast})
    assert found.is_within, found.text
    assert found.deviation < 0.03
    assert (exact.argmax(1) == fast.argmax(1)).all()
    assert not torch.equal(exact, fast)


def turned(orientation):
    return encoded(photo("astronaut").resize((1100, 1100)), exif=orientation_exif(orientation))


@pytest.mark.parametrize(
    "data",
    [
        encoded(photo("astronaut").convert("L")),
        encoded(photo("astronaut").convert("CMYK")),
        encoded(photo("coffee").resize((1800, 1200)).convert("CMYK")),
        encoded(photo("coffee").resize((1800, 1200)), progressive=True),
        encoded(photo("coffee"), subsampling=0),
        turned(6),
        turned(3),
        encoded(photo("coffee"), "PNG"),
        encoded(photo("coffee").resize((20, 12))),
    ],
    ids=["gray", "cmyk", "large cmyk", "progressive", "4:4:4", "turned", "upside", "png", "tiny"],
)
def test_odd_pictures_score_alike(model, data):
    exact, fast = (scores(model, [data], decode)[0] for decode in ("exact", "fast"))
    assert (exact - fast).abs().max() < 0.03


LARGE = encoded(photo("coffee").resize((1800, 1200)))


@pytest.mark.parametrize(
    "data",
    [
        LARGE[: len(LARGE) // 2],
        LARGE[: len(LARGE) // 2] + b"\xff\xd9",
        LARGE[:300],
        b"",
        b"\xff\xd8\xff" + bytes(100),
    ],
    ids=["truncated", "cut short", "header", "empty", "rubbish"],
)
def test_damaged_pictures_get_the_same_verdict(model, data):
    assert verdict(model, data, "exact") == verdict(model, data, "fast")


def verdict(model, data, decode):
    try:
        scores(model, [data], decode)
    except InputError as error:
        return str(error)
    return "taken"


def test_a_large_jpeg_is_decoded_scaled_down(model, monkeypatch):
    sizes = []
    load = Image.Image.load
    monkeypatch.setattr(
        Image.Image, "load", lambda image: (sizes.append(image.size), load(image))[1]
    )
    scores(model, [LARGE], "fast")
    assert Image.open(BytesIO(LARGE)).size not in sizes
    assert (900, 600) in sizes
