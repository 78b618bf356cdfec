import re
import warnings
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from inferpool.models.errors import InputError
from inferpool.models.upload import Upload
from inferpool.models.vision.images import decode_as_stored, decode_image, decode_scaled
from tests.fuzz import bombs
from tests.models.items import encoded, orientation_exif, photo, pixels_of

CHELSEA = photo("chelsea").resize((90, 60))
COFFEE = photo("coffee")


def reference(data):
    """Decode by the methods that Pillow's documentation recommends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ImageOps.exif_transpose(Image.open(BytesIO(data))).convert("RGB")


def assert_as_reference(data):
    image = decode_image(data)
    assert image.mode == "RGB"
    assert np.array_equal(pixels_of(image), pixels_of(reference(data)))
    return image


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_every_format_decodes_as_pillow_does(format):
    assert_as_reference(encoded(COFFEE, format))
    assert_as_reference(memoryview(encoded(COFFEE, format)))


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("BMP", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("TIFF", {"compression": "tiff_deflate"}),
    ],
)
def test_lossless_formats_give_the_pixels_back(format, options):
    data = encoded(CHELSEA, format, **options)
    assert np.array_equal(pixels_of(decode_image(data)), pixels_of(CHELSEA))


MODES = {
    "JPEG": ("L", "CMYK"),
    "PNG": ("1", "L", "LA", "P", "RGBA"),
    "WEBP": ("RGBA",),
    "GIF": ("L", "P"),
    "BMP": ("1", "P"),
    "TIFF": ("1", "CMYK", "LA", "RGBA", "YCbCr"),
}


@pytest.mark.parametrize(
    ("format", "mode"), [(format, mode) for format, modes in MODES.items() for mode in modes]
)
def test_every_colour_mode_becomes_rgb_as_pillow_converts_it(format, mode):
    options = {"compression": "jpeg"} if mode == "YCbCr" else {}
    assert_as_reference(encoded(CHELSEA.convert(mode), format, **options))


def test_inverted_cmyk_is_told_by_its_adobe_marker():
    data = encoded(CHELSEA.convert("CMYK"), quality=95)
    assert b"Adobe" in data
    difference = pixels_of(assert_as_reference(data)) - pixels_of(CHELSEA)
    assert np.abs(difference).mean() < 12


@pytest.mark.parametrize("format", ["PNG", "GIF"])
def test_transparent_palettes_keep_their_colours(format):
    palette = CHELSEA.quantize(16)
    for transparency in (3, bytes(range(0, 160, 10))) if format == "PNG" else (3,):
        assert_as_reference(encoded(palette, format, transparency=transparency))


def test_alpha_is_dropped_and_not_composed():
    image = CHELSEA.copy()
    image.putalpha(0)
    decoded = decode_image(encoded(image, "PNG"))
    assert np.array_equal(pixels_of(decoded), pixels_of(CHELSEA))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_undone(format, orientation):
    data = encoded(CHELSEA, format, exif=orientation_exif(orientation))
    image = assert_as_reference(data)
    assert image.size == (CHELSEA.size if orientation < 5 else CHELSEA.size[::-1])


# Pillow warns of it; a worker silences Pillow when it loads a classifier.
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("exif", [b"Exif\0\0rubbish", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"])
def test_damaged_exif_leaves_the_picture_as_it_lies(exif):
    data = encoded(CHELSEA, exif=exif)
    assert np.array_equal(pixels_of(decode_image(data)), pixels_of(Image.open(BytesIO(data))))


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animations_yield_their_first_frame(format):
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("red", "green", "blue")]
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:])
    red, green, blue = pixels_of(decode_image(data))[15, 20]
    assert red > 200
    assert max(green, blue) < 60


def test_a_picture_is_what_its_first_bytes_say():
    with pytest.raises(InputError, match="no image: JPEG, PNG, WEBP, GIF, BMP and TIFF"):
        decode_image(b"%PDF-1.7 and so on")
    with pytest.raises(InputError, match="no image"):
        decode_image(encoded(CHELSEA, "PPM"))
    with pytest.raises(InputError, match="the image is empty"):
        decode_image(b"")


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"])
def test_a_truncated_picture_is_refused_with_the_reason(format):
    data = encoded(COFFEE, format)
    with pytest.raises(InputError, match=rf"the {format} image cannot be decoded: \w"):
        decode_image(data[: len(data) // 2])


def png_header(width, height):
    """Return a PNG that has no pixels to be decoded."""
    return bombs.png_of(bombs.png_head(width, height), b"IDAT")


def test_too_many_pixels_and_none_are_refused_by_the_header_alone():
    with pytest.raises(InputError):
        decode_image(png_header(0, 10))
    with pytest.raises(InputError, match=r"30000 x 30000 = 900,000,000 pixels; at most 50,000,000"):
        decode_image(png_header(30000, 30000))
    data = encoded(CHELSEA)
    assert decode_image(data, max_pixels=90 * 60).size == (90, 60)
    with pytest.raises(InputError, match="90 x 60"):
        decode_image(data, max_pixels=90 * 60 - 1)


@pytest.mark.parametrize("size", [(1, 49_000_000), (49_000_000, 1), (65_536, 700)])
def test_an_edge_that_is_too_long_is_refused_by_the_header_alone(size: tuple[int, int]):
    width, height = size
    with pytest.raises(InputError, match=f"is {width} x {height} pixels; at most 65,535 along"):
        decode_image(png_header(width, height))
    with pytest.raises(InputError, match="cannot be decoded"):  # a panorama, whose data is missing
        decode_image(png_header(65_535, 700))


def test_a_caller_may_refuse_a_picture_by_its_header():
    def check(size: tuple[int, int]) -> None:
        raise InputError(f"not {size}")

    with pytest.raises(InputError, match=r"not \(90, 60\)"):
        decode_image(encoded(CHELSEA), check=check)


JPEGS = {
    "sequential": {},
    "progressive": {"progressive": True},
    "with all colours": {"subsampling": 0, "quality": 100},
    "with restarts": {"restart_marker_blocks": 2},
    "with a restart per row": {"restart_marker_rows": 1},
}


@pytest.mark.parametrize("name", JPEGS)
def test_jpeg_that_lacks_only_its_end_marker_is_decoded_and_a_shorter_one_is_not(name: str):
    data = encoded(COFFEE.resize((101, 67)), **JPEGS[name])
    assert data.endswith(b"\xff\xd9")
    for least_edge in (None, 20):
        expected, size = decode_scaled(data, least_edge=least_edge)
        for lacking in (1, 2):
            found, found_size = decode_scaled(data[:-lacking], least_edge=least_edge)
            assert np.array_equal(pixels_of(found), pixels_of(expected))
            assert found_size == size
    restarts = [each.start() for each in re.finditer(rb"\xff[\xd0-\xd7]", data)][:10]
    assert restarts or "restart" not in name
    for end in [len(data) - cut for cut in range(3, 40)] + restarts:
        with pytest.raises(InputError, match="cannot be decoded: "):
            decode_image(data[:end])


SAMPLES = [
    encoded(CHELSEA.resize((24, 16)), format)
    for format in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
] + [encoded(CHELSEA.resize((24, 16)), "TIFF", compression="tiff_lzw")]


@settings(max_examples=600)
@given(
    sample=st.sampled_from(SAMPLES),
    keep=st.floats(0, 1),
    edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=8),
)
def test_damaged_bytes_raise_nothing_but_input_errors(sample, keep, edits):
    data = bytearray(sample[: round(len(sample) * keep) or 1])
    for place, value in edits:
        data[int(place * len(data))] = value
    try:
        image = decode_image(bytes(data))
    except InputError:
        return
    assert image.mode == "RGB"


def test_a_file_of_a_form_is_decoded_as_its_bytes_are():
    upload = Upload(data=encoded(CHELSEA), media_type="text/plain", filename="no.txt")
    assert decode_image(upload) == decode_image(upload.data)


@pytest.mark.parametrize(
    ("format", "mode"), [(format, mode) for format, modes in MODES.items() for mode in modes]
)
def test_a_picture_may_keep_the_mode_and_orientation_that_it_is_stored_with(format, mode):
    data = encoded(CHELSEA.convert(mode), format, exif=orientation_exif(6))
    image, plain = decode_as_stored(bytearray(data)), Image.open(BytesIO(data))
    assert np.array_equal(np.array(image), np.array(plain))  # which turns TIFF alone
    assert (image.mode, image.size) == (plain.mode, plain.size)
    with pytest.raises(InputError, match="at most 5,399 are taken"):
        decode_as_stored(data, max_pixels=90 * 60 - 1)
