"""Choices between GPU and CPU, with a CPU decoder instead of nvJPEG; tests/gpu has the rest."""

from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from inferpool.models.errors import InputError
from inferpool.models.vision import gpu_jpegs
from inferpool.models.vision.gpu_jpegs import GpuJpegs, decoder_on
from inferpool.models.vision.images import decode_image
from inferpool.models.vision.transforms import ImageTransform
from tests.models.items import (
    encoded,
    image_item,
    loaded,
    orientation_exif,
    photo,
    run,
    tensor_item,
)
from tests.small_classifier import SmallClassifier

SMALL = ImageTransform(resize=36, crop=32)
COFFEE = photo("coffee")
MAX = 50_000_000


class FakeNvjpeg:
    """Decodes with Pillow; if one is no JPEG, refuses all without saying which."""

    def __init__(self):
        self.sizes = []

    def __call__(self, jpegs):
        self.sizes.append(len(jpegs))
        try:
            images = [Image.open(BytesIO(jpeg.numpy().tobytes())).convert("RGB") for jpeg in jpegs]
        except OSError:
            raise RuntimeError("Failed to decode batch: 3") from None
        return [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]


def with_names(data: bytes, names: bytes) -> bytes:
    """Rename the components of a JPEG, and leave out the marker that says what they are."""
    jfif, frame, scan = (data.index(b"\xff" + bytes([marker])) for marker in b"\xe0\xc0\xda")
    renamed = bytearray(data)
    for number, name in enumerate(names):
        renamed[frame + 10 + 3 * number] = renamed[scan + 5 + 2 * number] = name
    num_bytes = 2 + int.from_bytes(data[jfif + 2 : jfif + 4], "big")
    return bytes(renamed[:jfif] + renamed[jfif + num_bytes :])


@pytest.fixture
def decoder():
    return FakeNvjpeg()


@pytest.fixture
def model(decoder):
    model = loaded(SmallClassifier())
    model.decode = "device"
    model._gpu_jpegs = GpuJpegs(decoder, model.transform)
    return model


@pytest.mark.parametrize(
    "data",
    [encoded(COFFEE), encoded(COFFEE.convert("L")), with_names(encoded(COFFEE), b"\1\2\3")],
    ids=["colour", "gray", "without JFIF"],
)
def test_plain_jpegs_are_for_the_gpu(decoder, data):
    jpeg = GpuJpegs(decoder, SMALL).accept(memoryview(data), MAX)
    assert jpeg.numpy().tobytes() == data


@pytest.mark.parametrize(
    "data",
    [
        encoded(COFFEE, "PNG"),
        encoded(COFFEE.convert("CMYK")),
        encoded(COFFEE, keep_rgb=True),
        with_names(encoded(COFFEE), b"RGB"),
        encoded(COFFEE, progressive=True),
        encoded(COFFEE)[:5000],
        encoded(COFFEE, exif=orientation_exif(6)),
        encoded(Image.new("RGB", (5000, 4000))),
        b"\xff\xd8\xff\xd9",
        b"",
    ],
    ids=[
        "png",
        "cmyk",
        "rgb",
        "rgb by name",
        "progressive",
        "cut",
        "turned",
        "large",
        "rubbish",
        "empty",
    ],
)
def test_all_others_are_for_the_cpu(decoder, data):
    assert GpuJpegs(decoder, SMALL).accept(memoryview(data), MAX) is None


def test_a_jpeg_of_very_many_segments_is_refused_before_they_are_read(decoder, monkeypatch):
    many = encoded(COFFEE)[:2] + b"\xff\xfe\x00\x02" * 20_000 + encoded(COFFEE)[2:]
    monkeypatch.setattr(gpu_jpegs, "JpegImageFile", lambda _: pytest.fail("it is read"))
    assert GpuJpegs(decoder, SMALL).accept(memoryview(many), MAX) is None


def test_more_pixels_than_are_taken_are_for_the_cpu_to_refuse(decoder):
    data = memoryview(encoded(COFFEE))
    assert GpuJpegs(decoder, SMALL).accept(data, COFFEE.width * COFFEE.height - 1) is None


def test_the_jpegs_of_a_batch_are_decoded_together_and_score_alike(model, decoder):
    items = [
        image_item(encoded(photo("chelsea"))),
        image_item(encoded(photo("coffee"), "PNG")),
        image_item(encoded(photo("astronaut"))),
        tensor_item({"": torch.from_numpy(np.array(photo("rocket")))}),
    ]
    scores = run(model, items)["probabilities"]
    assert decoder.sizes == [2]
    model.decode = "exact"
    assert torch.allclose(scores, run(model, items)["probabilities"], atol=0.01)


def test_a_networks_own_input_goes_with_jpegs(model, decoder):
    own = tensor_item({"": torch.zeros(3, 32, 32)})
    together = run(model, [image_item(encoded(COFFEE)), own])["probabilities"]
    assert decoder.sizes == [1]
    assert torch.allclose(together[1], run(model, [own])["probabilities"][0], atol=1e-6)


def test_where_the_gpu_refuses_the_cpu_says_which_is_at_fault(model, decoder):
    good = encoded(COFFEE)
    rotten = good[:400] + b"\xff\xd9"  # no header says that it is
    accepted = model._gpu_jpegs
    jpegs = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in (good, rotten)]
    with pytest.raises(InputError, match="the JPEG image cannot be decoded"):
        accepted.pixels(jpegs, model._quick_pixels)
    (pixels,) = accepted.pixels(jpegs[:1], model._quick_pixels)
    assert (pixels.int() - SMALL.pixels(decode_image(good)).int()).abs().max() <= 2


def test_a_lack_of_memory_is_for_the_worker_to_handle(model):
    def decode(jpegs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    jpeg = torch.frombuffer(bytearray(encoded(COFFEE)), dtype=torch.uint8)
    with pytest.raises(torch.OutOfMemoryError):
        GpuJpegs(decode, SMALL).pixels([jpeg], model._quick_pixels)


def test_without_a_gpu_nothing_of_this_is_used():
    assert decoder_on(torch.device("cpu")) is None
    model = loaded(SmallClassifier())
    assert model._gpu_jpegs is None
