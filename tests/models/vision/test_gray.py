"""Gray pictures with samples of other than 8 bits, as several writers make them."""

import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray
from PIL import Image, ImageOps

from inferpool.models.errors import InputError
from inferpool.models.vision import gray
from inferpool.models.vision.images import decode_image, decode_scaled
from tests.models.items import encoded, photo, pixels_of

GRAY = np.asarray(ImageOps.autocontrast(photo("chelsea").resize((90, 60)).convert("L")))
"""It has black and white in it."""
WIDE = GRAY.astype(np.uint16) * 257
SMIN, SMAX = 340, 341


def tiff(samples: NDArray[Any], **options: Any) -> bytes:
    """Return a TIFF of gray samples; `SMIN` and `SMAX` are options too, as (type, value)."""
    buffer = BytesIO()
    white = options.pop("white", "minisblack")
    ranged = [
        (tag, *options.pop(name), True) for name, tag in (("least", SMIN), ("most", SMAX))
        if name in options
    ]  # fmt: skip
    extratags = [(tag, kind, 1, value, once) for tag, kind, value, once in ranged]
    tifffile.imwrite(buffer, samples, photometric=white, extratags=extratags, **options)
    return buffer.getvalue()


def png(samples: NDArray[Any], significant: int | None = None) -> bytes:
    """Return a PNG of samples, with how many bits of them are significant."""
    data = encoded(Image.fromarray(samples), "PNG")
    if significant is None:
        return data
    chunk = b"sBIT" + bytes([significant])
    chunk = struct.pack(">I", 1) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return data[:33] + chunk + data[33:]  # after IHDR


SHORT, FLOAT, LONG, SIGNED_LONG, SIGNED_SHORT = "H", "f", "I", "i", "h"
TWELVE = WIDE >> 4
CERTAIN: dict[str, Callable[[], bytes]] = {
    "16 bits": lambda: tiff(WIDE),
    "16 bits, big-endian": lambda: tiff(WIDE, byteorder=">"),
    "16 bits, compressed": lambda: tiff(WIDE, compression="zlib"),
    "16 bits, white is zero": lambda: tiff(65535 - WIDE, white="miniswhite"),
    "16 bits, white is zero, compressed": lambda: tiff(
        65535 - WIDE, white="miniswhite", compression="zlib"
    ),
    "8 bits, white is zero": lambda: tiff(255 - GRAY, white="miniswhite"),
    "12 bits in 16": lambda: tiff(TWELVE, most=(SHORT, 4095)),
    "12 bits in 16, white is zero": lambda: tiff(
        4095 - TWELVE, white="miniswhite", most=(SHORT, 4095)
    ),
    "a range of its own": lambda: tiff(
        WIDE // 100 + 700, least=(SHORT, 700), most=(SHORT, 700 + 655)
    ),
    "float from 0 to 1": lambda: tiff((GRAY / 255).astype(np.float32)),
    "float from 0 to 1, big-endian": lambda: tiff(
        (GRAY / 255).astype(np.float32), byteorder=">"
    ),
    "float from 0 to 1, white is zero": lambda: tiff(
        (1 - GRAY / 255).astype(np.float32), white="miniswhite"
    ),
    "float from -1 to 1": lambda: tiff(
        (GRAY / 127.5 - 1).astype(np.float32), least=(FLOAT, -1.0), most=(FLOAT, 1.0)
    ),
    "float from 0 to 255": lambda: tiff(
        GRAY.astype(np.float32), least=(FLOAT, 0.0), most=(FLOAT, 255.0)
    ),
    "signed 32 bits": lambda: tiff(
        WIDE.astype(np.int32) * 1000 - 70_000,
        least=(SIGNED_LONG, -70_000), most=(SIGNED_LONG, 65_535_000 - 70_000),
    ),
    "unsigned 32 bits": lambda: tiff(
        WIDE.astype(np.uint32) * 65537, most=(LONG, 2**32 - 1)
    ),
    "signed 16 bits": lambda: tiff(
        (WIDE.astype(np.int32) - 32768).astype(np.int16),
        least=(SIGNED_SHORT, -32768), most=(SIGNED_SHORT, 32767),
    ),
    "signed 8 bits": lambda: tiff(
        (GRAY.astype(np.int16) - 128).astype(np.int8), least=("b", -128), most=("b", 127)
    ),
    "PNG": lambda: png(WIDE),
    "PNG of 12 bits, as the standard has it": lambda: png(TWELVE << 4 | TWELVE >> 8, 12),
    "PNG of 12 bits, left as they are": lambda: png(TWELVE, 12),
    "PNG of 5 bits, left as they are": lambda: png(GRAY >> 3, 5),
    "PNG of 8 bits": lambda: png(GRAY, 8),
    "black": lambda: tiff(np.zeros_like(WIDE)),
}  # fmt: skip


@pytest.mark.parametrize("name", CERTAIN)
def test_gray_of_a_certain_range_is_scaled_by_what_the_file_says(name: str):
    data = CERTAIN[name]()
    found = pixels_of(decode_image(data))
    expected = GRAY * (name != "black")
    most = 8 if "5 bits" in name else 1
    assert np.abs(found[:, :, 0].astype(int) - expected).max() <= most
    for least_edge in (None, 8):
        image, _ = decode_scaled(data, least_edge=least_edge)
        assert np.array_equal(pixels_of(image), found)


UNCERTAIN: dict[str, tuple[Callable[[], bytes], str]] = {
    "12 bits in 16": (lambda: tiff(TWELVE), r"none is above \d+ of 65535: it would be read as"),
    "PNG of 12 bits in 16": (lambda: png(TWELVE), "whether it has fewer bits is not certain"),
    "8 bits in 16": (lambda: tiff(GRAY.astype(np.uint16)), "none is above"),
    "white is zero": (lambda: tiff(4095 - TWELVE, white="miniswhite"), "none is above"),
    "signed 32 bits": (lambda: tiff(GRAY.astype(np.int32)), "signed samples of 32 bits, from"),
    "unsigned 32 bits": (lambda: tiff(WIDE.astype(np.uint32)), "unsigned samples of 32 bits"),
    "signed 16 bits": (lambda: tiff(GRAY.astype(np.int16)), "signed samples of 16 bits"),
    "signed 8 bits": (lambda: tiff((GRAY >> 1).astype(np.int8)), "signed samples of 8 bits"),
    "float to 255": (
        lambda: tiff(GRAY.astype(np.float32)),
        "floating-point samples of 32 bits, from .* to .*: which of them is white is not certain; "
        "say it in the file .SMinSampleValue",
    ),
    "NaN": (
        lambda: tiff(np.where(GRAY > 200, np.nan, GRAY / 255).astype(np.float32)),
        "NaN or infinite",
    ),
    "no range": (
        lambda: tiff(WIDE, least=(SHORT, 9), most=(SHORT, 9)), "says that its samples are from 9"
    ),
    "colours of 12 bits in 16": (
        lambda: tiff(np.stack([TWELVE] * 3, 2), white="rgb"), "16 bits a sample, of which"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNCERTAIN)
def test_gray_of_an_uncertain_range_is_refused_with_what_to_do(name: str):
    make, says = UNCERTAIN[name]
    with pytest.raises(InputError, match=says):
        decode_image(make())


def test_colours_of_sixteen_bits_are_as_bright_as_those_of_eight():
    colours = np.stack([WIDE, WIDE // 2, WIDE // 4], 2)
    found = pixels_of(decode_image(tiff(colours, white="rgb")))
    assert np.array_equal(found, colours >> 8)


def test_large_pictures_are_scaled_in_parts(monkeypatch: pytest.MonkeyPatch):
    whole = pixels_of(decode_image(CERTAIN["float from -1 to 1"]()))
    monkeypatch.setattr(gray, "_ROWS_PIXELS", 7 * 90)
    assert np.array_equal(pixels_of(decode_image(CERTAIN["float from -1 to 1"]())), whole)
