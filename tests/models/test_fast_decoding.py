"""What fast decoding does to real photographs, with the packaged network and its weights."""

from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from inferpool.models.errors import InputError
from inferpool.models.sources.registry import build
from tests.models.items import CPU, encoded, image_item, photo, run

PHOTOS = ("astronaut", "chelsea", "coffee", "rocket", "retina", "hubble_deep_field")


@pytest.fixture(scope="module")
def model():
    model = build("efficientnet_lite0", "DEFAULT", {})
    model.load(CPU)
    return model


def scores(model, datas, decode):
    model.decode = decode
    try:
        return run(model, [image_item(data) for data in datas])["probabilities"]
    finally:
        model.decode = "exact"


def views():
    """Parts of photographs, some of them enlarged, at several qualities."""
    rng = np.random.default_rng(0)
    datas = []
    for name in PHOTOS:
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
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return encoded(photo("astronaut").resize((1100, 1100)), exif=exif)


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


def test_too_large_a_picture_is_refused_though_it_would_be_scaled_down(model):
    data = encoded(Image.new("RGB", (9000, 6000)))
    assert verdict(model, data, "fast").startswith("the image has 9000 x 6000")


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
