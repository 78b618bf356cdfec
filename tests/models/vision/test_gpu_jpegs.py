"""Choices between GPU and CPU, with a CPU decoder instead of nvJPEG; tests/gpu has the rest."""

from collections.abc import Iterator
from io import BytesIO
from random import Random

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from PIL.JpegImagePlugin import JpegImageFile

from inferpool.models.errors import InputError
from inferpool.models.vision.containers import check_container, check_exif
from inferpool.models.vision.gpu_jpegs import GpuJpegs, decoder_on
from inferpool.models.vision.images import check_size, decode_image
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

# Workers ignore it, too.
pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable")

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


def with_frame(data: bytes, place: int, value: int) -> bytes:
    """Change a byte of the frame's segment: 1 its kind, 4 the bits of a sample."""
    start = data.index(b"\xff\xc0")
    return data[: start + place] + bytes([value]) + data[start + place + 1 :]


def segment(marker: int, content: bytes) -> bytes:
    return bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2, "big") + content


def with_segment(data: bytes, marker: int, content: bytes) -> bytes:
    return data[:2] + segment(marker, content) + data[2:]


def camera_exif(orientation: int | None) -> Image.Exif:
    exif = Image.Exif() if orientation is None else orientation_exif(orientation)
    exif[ExifTags.Base.Make], exif[ExifTags.Base.Model] = "Maker", "Camera of a maker"
    exif[ExifTags.Base.XResolution] = exif[ExifTags.Base.YResolution] = 72.0
    return exif


@pytest.fixture
def decoder():
    return FakeNvjpeg()


@pytest.fixture
def model(decoder):
    model = loaded(SmallClassifier())
    model.decode = "device"
    model._gpu_jpegs = GpuJpegs(decoder, model.transform)
    return model


PLAIN = {
    "colour": encoded(COFFEE),
    "gray": encoded(COFFEE.convert("L")),
    "without JFIF": with_names(encoded(COFFEE), b"\1\2\3"),
    "upright": encoded(COFFEE, exif=orientation_exif(1)),
    "upright, by a camera": encoded(COFFEE, exif=camera_exif(1)),
    "no orientation": encoded(COFFEE, exif=camera_exif(None)),
    "upright, whatever XMP says": encoded(
        COFFEE, exif=camera_exif(1), xmp=b'<x tiff:Orientation="6"/>'
    ),
    "upright by XMP": encoded(COFFEE, xmp=b'<x tiff:Orientation="1"/>'),
    "profile": encoded(COFFEE, icc_profile=bytes(70_000)),
    "restarts": encoded(COFFEE, restart_marker_blocks=2),
    "comments": encoded(COFFEE, comment=b"a cup", optimize=True, dpi=(72, 72)),
    "resources": with_segment(encoded(COFFEE), 0xED, b"Photoshop 3.0\0" + bytes(9)),
    **{
        f"quality {quality}, {subsampling}": encoded(
            COFFEE, quality=quality, subsampling=subsampling
        )
        for quality in (1, 50, 100)
        for subsampling in ("4:4:4", "4:2:2", "4:2:0")
    },
}
LETTERS = (
    b"Exif\0\0MM\0*\0\0\0\x08\0\x02"
    b"\x01\x1a\0\x02\0\0\0\x021\0\0\0\x01\x28\0\x03\0\0\0\x01\0\x02\0\0\0\0\0\0"
)
"""EXIF with a text as XResolution, which Pillow reads as if it were two numbers."""
OTHERS = {
    "png": encoded(COFFEE, "PNG"),
    "cmyk": encoded(COFFEE.convert("CMYK")),
    "rgb": encoded(COFFEE, keep_rgb=True),
    "rgb by name": with_names(encoded(COFFEE), b"RGB"),
    "adobe": with_segment(encoded(COFFEE), 0xEE, b"Adobe\0\x64\0\0\0\0\1"),
    "progressive": encoded(COFFEE, progressive=True),
    "progressive gray": encoded(COFFEE.convert("L"), progressive=True),
    "12 bits": with_frame(encoded(COFFEE), 4, 12),
    "no rows": with_frame(with_frame(encoded(COFFEE), 5, 0), 6, 0),
    "cut": encoded(COFFEE)[:5000],
    "large": encoded(Image.new("RGB", (5000, 4000))),
    "segments": encoded(COFFEE)[:2] + b"\xff\xfe\x00\x02" * 20_000 + encoded(COFFEE)[2:],
    "turned by XMP": encoded(COFFEE, xmp=b"<tiff:Orientation>6<"),
    "turned, by a camera": encoded(COFFEE, exif=camera_exif(6)),
    "turned by XMP beside EXIF": encoded(
        COFFEE, exif=camera_exif(None), xmp=b'<x tiff:Orientation="6"/>'
    ),
    "broken EXIF": encoded(COFFEE, exif=b"Exif\0\0rubbish", dpi=(72, 72)),
    "resolution in letters": with_segment(encoded(COFFEE), 0xE1, LETTERS),
    "broken resources": with_segment(encoded(COFFEE), 0xED, b"Photoshop 3.0\0008BIM\3\xed"),
    "broken table": with_segment(encoded(COFFEE), 0xDB, bytes(66)),
    "broken JFIF": with_segment(encoded(COFFEE), 0xE0, b"JFIF\0"),
    "broken profile": with_segment(encoded(COFFEE), 0xE2, b"ICC_PROFILE\0"),
    "rubbish": b"\xff\xd8\xff\xd9",
    "empty": b"",
    **{
        f"turned {orientation}": encoded(COFFEE, exif=orientation_exif(orientation))
        for orientation in range(2, 10)
    },
}
UNUSUAL = {
    "arithmetic coding": with_frame(encoded(COFFEE), 1, 0xC9),
    "lossless": with_frame(encoded(COFFEE), 1, 0xC3),
    "filled up": encoded(COFFEE)[:2] + b"\xff" + encoded(COFFEE)[2:],
    "a scan for each component": encoded(COFFEE).replace(b"\xff\xda\0\x0c\3", b"\xff\xda\0\x0c\1"),
    "two frames": with_segment(encoded(COFFEE), 0xC0, b"\x08\0\x40\0\x40\1\1\x11\0"),
    "two EXIF segments": with_segment(
        encoded(COFFEE, exif=orientation_exif(1)), 0xE1, b"Exif\0\0" + bytes(8)
    ),
}
"""JPEGs that Pillow opens, but no camera writes."""


@pytest.mark.parametrize("data", PLAIN.values(), ids=PLAIN)
def test_plain_jpegs_are_for_the_gpu(decoder, data):
    jpeg = GpuJpegs(decoder, SMALL).accept(memoryview(data), MAX)
    assert jpeg is not None
    assert jpeg.numpy().tobytes() == data
    assert is_plain_to_pillow(data)


@pytest.mark.parametrize("data", OTHERS.values(), ids=OTHERS)
def test_all_others_are_for_the_cpu(decoder, data):
    assert GpuJpegs(decoder, SMALL).accept(memoryview(data), MAX) is None
    assert not is_plain_to_pillow(data)


@pytest.mark.parametrize("data", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_jpegs_are_for_the_cpu(decoder, data):
    assert GpuJpegs(decoder, SMALL).accept(memoryview(data), MAX) is None
    assert is_plain_to_pillow(data)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_no_damaged_jpeg_is_accepted_that_pillow_refuses():
    jpegs = GpuJpegs(FakeNvjpeg(), SMALL)
    num_accepted = 0
    for data in damaged(num=6000):
        if jpegs.accept(memoryview(data), MAX) is not None:
            num_accepted += 1
            assert is_plain_to_pillow(data), data[:2000].hex()
    assert num_accepted > 500


def is_plain_to_pillow(data: bytes) -> bool:
    """Tell what the GPU may get, from what Pillow reads in the header."""
    if not data.startswith(b"\xff\xd8\xff") or not data.endswith(b"\xff\xd9"):
        return False
    try:
        check_container("JPEG", data, check_size)
        image = JpegImageFile(BytesIO(data))
        check_exif(len(image.info.get("exif", b"")))
        SMALL.check(image.size)
        return (
            (image.mode, image.layers) in (("RGB", 3), ("L", 1))
            and not {"progressive", "adobe"} & image.info.keys()
            and [name for name, *_ in image.layer] != [*b"RGB"]
            and image.width * image.height <= 1 << 24
            and image.getexif().get(ExifTags.Base.Orientation, 1) == 1
        )
    except Exception:
        return False


def damaged(num: int) -> Iterator[bytes]:
    """Change headers: bytes at random, and segments that come, go, or come twice."""
    random = Random(0)
    small = COFFEE.resize((48, 32))
    exif = orientation_exif(1)
    exif[ExifTags.Base.XResolution] = 72.0
    turned = orientation_exif(6)
    turned[ExifTags.Base.Make] = "a camera"
    whole = [
        encoded(small),
        encoded(small.convert("L"), dpi=(72, 72)),
        encoded(small, exif=exif),
        encoded(small, exif=turned),
        encoded(small, exif=exif, xmp=b'<x tiff:Orientation="1"/>', icc_profile=bytes(200)),
        with_segment(encoded(small), 0xED, b"Photoshop 3.0\0008BIM\4\4" + bytes(8)),
    ]
    names = [b"", b"JFIF\0", b"Exif\0\0MM\0*\0\0\0\x08", b"ICC_PROFILE\0", b"Adobe"]
    for _ in range(num):
        data = bytearray(random.choice(whole))
        edges = [2]
        while data[edges[-1] + 1] != 0xDA:
            length = int.from_bytes(data[edges[-1] + 2 : edges[-1] + 4], "big")
            edges.append(edges[-1] + 2 + length)
        for _ in range(random.choice((1, 1, 2, 3))):
            at = random.randrange(2, edges[-1] + 14)
            edge = random.randrange(len(edges) - 1)
            match random.randrange(7):
                case 0:
                    data[at] = random.randrange(256)
                case 1:
                    data[at] ^= 1 << random.randrange(8)
                case 2:
                    data[at:at] = random.randbytes(random.randrange(1, 5))
                case 3:
                    del data[at : at + random.randrange(1, 8)]
                case 4:
                    data[at:] = random.choice((b"", b"\xff\xd9"))
                case 5:
                    content = random.choice(names) + random.randbytes(random.randrange(24))
                    data[edges[edge] : edges[edge]] = segment(random.randrange(192, 255), content)
                case 6:
                    data[edges[edge] : edges[edge]] = data[edges[edge] : edges[edge + 1]]
            if len(data) < edges[-1] + 14:
                break
        yield bytes(data)


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


def test_without_a_gpu_nothing_of_this_is_used():
    assert decoder_on(torch.device("cpu")) is None
    model = loaded(SmallClassifier())
    assert model._gpu_jpegs is None
