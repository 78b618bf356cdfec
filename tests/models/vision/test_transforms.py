from io import BytesIO

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from inferpool.models.errors import InputError
from inferpool.models.vision.images import decode_scaled
from inferpool.models.vision.transforms import ImageTransform, Normalize
from tests.models.items import encoded, photo
from tests.models.reference import ImageClassification, InterpolationMode

SMALL = ImageTransform(resize=36, crop=32)


@settings(max_examples=80)
@given(
    width=st.integers(1, 300),
    height=st.integers(1, 300),
    edges=st.sampled_from([(64, 56), (64, 64), (58, 56), (48, 32), (64, 96), (65, 96)]),
    interpolation=st.sampled_from(["NEAREST", "BILINEAR", "BICUBIC", "LANCZOS"]),
)
@example(width=384, height=256, edges=(64, 56), interpolation="BICUBIC")
@example(width=384, height=256, edges=(64, 56), interpolation="NEAREST")
@example(width=80, height=80, edges=(64, 56), interpolation="BICUBIC")
@example(width=128, height=293, edges=(64, 56), interpolation="BILINEAR")  # vertically first
def test_the_transform_equals_torchvisions_for_every_size(width, height, edges, interpolation):
    resize, crop = edges
    assume(max(width, height) < 20 * min(width, height))
    image = noise(width, height)
    ours = ImageTransform(resize=resize, crop=crop, interpolation=Image.Resampling[interpolation])
    preset = ImageClassification(
        crop_size=crop,
        resize_size=resize,
        interpolation=InterpolationMode[interpolation],
    )
    normalized = Normalize(ours)(ours.pixels(image)[None])[0]
    assert torch.equal(normalized, preset(image))


@settings(max_examples=40)
@given(
    width=st.integers(1, 300),
    height=st.integers(1, 300),
    edges=st.sampled_from([(64, 56), (64, 64), (58, 56)]),
    interpolation=st.sampled_from(["BILINEAR", "BICUBIC"]),
)
@example(width=1, height=1, edges=(64, 56), interpolation="BICUBIC")
@example(width=52, height=62, edges=(58, 56), interpolation="BILINEAR")  # cut to its own height
def test_the_fast_way_is_off_by_next_to_nothing_for_every_size(width, height, edges, interpolation):
    resize, crop = edges
    assume(max(width, height) < 20 * min(width, height))
    transform = ImageTransform(
        resize=resize, crop=crop, interpolation=Image.Resampling[interpolation]
    )
    image = noise(width, height)
    quick = transform.quick_pixels(image, image.size)
    assert quick.is_contiguous()
    off_by = (quick.int() - transform.pixels(image).int()).abs()
    if height <= 2 * width:
        assert off_by.max() <= 2
    else:  # Pillow takes tall pictures by their columns first, which rounds otherwise
        assert off_by.float().mean() < 0.5


def test_the_fast_way_takes_images_that_lie_in_several_pieces():
    transform = ImageTransform(resize=64, crop=56)
    image = photo("coffee").resize((2600, 1800))
    assert image.width * image.height * 4 > 16 << 20
    quick = transform.quick_pixels(image, image.size)
    assert (quick.int() - transform.pixels(image).int()).abs().max() <= 1


@pytest.mark.parametrize("name", ["astronaut", "coffee", "retina"])
@pytest.mark.parametrize("turned", [False, True])
def test_pictures_that_come_scaled_down_keep_their_pixels_in_place(name, turned):
    transform = ImageTransform(resize=64, crop=56)
    image = photo(name)
    # No multiple of 8, so that the scaled edges are rounded.
    image = image.crop((0, 0, image.width - 5, image.height - 3))
    if turned:
        image = image.transpose(Image.Transpose.TRANSPOSE)
    data = encoded(image, quality=90)
    scaled, full_size = decode_scaled(data, least_edge=transform.least_edge)
    assert full_size == image.size
    assert scaled.width < image.width / 1.9
    exact = transform.pixels(Image.open(BytesIO(data))).float()
    quick = transform.quick_pixels(scaled, full_size).float()
    assert (quick - exact).abs().mean() < 1.5
    for shifted in (quick.roll(1, 0), quick.roll(1, 1), quick.roll(-1, 0), quick.roll(-1, 1)):
        assert (shifted - exact)[1:-1, 1:-1].abs().mean() > 1.5


def test_an_image_too_elongated_to_resize_is_refused():
    image = Image.new("RGB", (2, 3_000_000))
    for resize in (SMALL.pixels, lambda image: SMALL.quick_pixels(image, image.size)):
        with pytest.raises(InputError, match=r"36 x 54000000 = .* at most 50,000,000"):
            resize(image)


def test_only_some_transforms_have_a_fast_way():
    assert SMALL.can_be_quick
    assert not ImageTransform(
        resize=36, crop=32, interpolation=Image.Resampling.LANCZOS
    ).can_be_quick
    assert not ImageTransform(resize=32, crop=36).can_be_quick


def test_normalized_pixels_are_the_same_in_every_layout():
    normalize = Normalize(SMALL)
    pixels = torch.randint(0, 256, (3, 32, 32, 3), dtype=torch.uint8)
    last = normalize(pixels, torch.channels_last)
    assert torch.equal(normalize(pixels), last)
    assert normalize(pixels).is_contiguous()
    assert last.is_contiguous(memory_format=torch.channels_last)


def noise(width, height):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))
