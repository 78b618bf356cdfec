"""Gray samples of other than 8 bits, scaled to 8 by what their file says. Worker processes only.

Without a range, what is meant as white may come out as black. So a picture with a range that is
neither given nor certain is refused.
"""

from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.ImageFile import ImageFile
from PIL.TiffImagePlugin import TiffImageFile

from inferpool.models.errors import InputError
from inferpool.models.vision.containers import png_bits

# TIFF 6.0, sections 3, 4, 8 and 19.
_BITS_PER_SAMPLE, _PHOTOMETRIC = 258, 262
_SAMPLE_FORMAT, _LEAST, _MOST = 339, 340, 341
_UNSIGNED, _SIGNED, _FLOAT = 1, 2, 3
_WHITE_IS_ZERO = 0

_DARK_BITS = 4
"""High bits of 16 that are in use in any picture but one of 12 bits or fewer in 16."""
_HAS_HIGH_BITS = [int(byte >= 1 << 8 - _DARK_BITS) for byte in range(256)]
_ROWS_PIXELS = 1 << 20
"""Pixels that are scaled at once: each takes up to 24 bytes meanwhile."""
_HINT = "say it in the file (SMinSampleValue and SMaxSampleValue of TIFF), or send 8 bits a sample"


class Samples(NamedTuple):
    """Statements of a file about the samples of its pixels."""

    num_bits: int
    """Bits of a sample as it is stored."""
    significant_bits: int
    """Bits that the samples had before they were stored (sBIT of PNG); else the same."""
    format: int = _UNSIGNED
    is_white_zero: bool = False
    least: float | None = None
    most: float | None = None
    """The range (SMinSampleValue, SMaxSampleValue of TIFF)."""


def samples_of(image: ImageFile, data: bytes) -> Samples:
    """Return what a picture's file says about its samples."""
    if image.format == "PNG":
        return Samples(*png_bits(data))
    if not isinstance(image, TiffImageFile):
        return Samples(8, 8)
    tags = image.tag_v2
    bits, form, least, most = (
        _first(tags.get(tag)) for tag in (_BITS_PER_SAMPLE, _SAMPLE_FORMAT, _LEAST, _MOST)
    )
    num_bits = 1 if bits is None else int(bits)
    return Samples(
        num_bits=num_bits,
        significant_bits=num_bits,
        format=_UNSIGNED if form is None else int(form),
        is_white_zero=tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO,
        least=least,
        most=most,
    )


def to_8_bits(image: Image.Image, samples: Samples) -> Image.Image:
    """Scale a gray picture to 8 bits, if it has others; leave any other picture as it is.

    Raises:
        InputError: The range of its samples is not certain.
    """
    if image.mode == "L":
        if samples.num_bits != 8 or samples[1:3] == (8, _UNSIGNED):
            return image
    elif image.mode not in ("I", "F") and not image.mode.startswith("I;16"):
        if samples.num_bits == 16:
            _check_high_bits(image)
        return image
    values = np.asarray(image)
    if samples.format == _SIGNED and samples.num_bits == 8:
        values = values.view(np.int8)
    elif samples.format == _UNSIGNED and samples.num_bits == 32:
        values = values.view(np.uint32)
    gray = _scaled(values, *_range_of(values, samples))
    return Image.fromarray(255 - gray if samples.is_white_zero else gray)


def _check_high_bits(image: Image.Image) -> None:
    """Refuse 16-bit colours that use no high bits, since Pillow keeps only the high byte.

    Raises:
        InputError: The picture is refused.
    """
    colours = [image.getchannel(band) for band in image.getbands() if band.upper() != "A"]
    if all(colour.point(_HAS_HIGH_BITS).getbbox() is None for colour in colours):
        raise InputError(
            f"the image has 16 bits a sample, of which the {_DARK_BITS} high ones are zero all "
            "over: it would be read as one colour. Send 8 bits a sample"
        )


def _range_of(values: NDArray[Any], samples: Samples) -> tuple[float, float]:
    """Return the values of the two ends of the range, black and white.

    Raises:
        InputError: They are not certain.
    """
    lowest, highest = values.min().item(), values.max().item()
    if not (np.isfinite(lowest) and np.isfinite(highest)):
        raise InputError("the image has samples that are NaN or infinite")
    is_plain = samples.format == _UNSIGNED and samples.num_bits <= 16
    least, most = samples.least, samples.most
    if least is None and samples.format == _UNSIGNED:
        least = 0
    if least is not None and most is not None:
        if not least < most < float("inf"):
            raise InputError(f"the image says that its samples are from {least} to {most}")
        return least, most
    if samples.format == _FLOAT and lowest >= 0 and highest <= 1:
        return 0, 1
    if not is_plain:
        kind = {_SIGNED: "signed", _FLOAT: "floating-point"}.get(samples.format, "unsigned")
        raise InputError(
            f"the image has {kind} samples of {samples.num_bits} bits, from {lowest:g} to "
            f"{highest:g}: which of them is white is not certain; {_HINT}"
        )
    return 0, (1 << _num_bits(values, samples, int(highest))) - 1


def _num_bits(values: NDArray[Any], samples: Samples, highest: int) -> int:
    """Return the number of bits of unsigned samples.

    PNG (11.3.2.4) says that samples of fewer bits are scaled up to those that are stored. Some
    writers leave them as they are: then low bits are in use that would not be in a dark picture.

    Raises:
        InputError: It is not certain.
    """
    stored, significant = samples.num_bits, samples.significant_bits
    if significant < stored:
        low_bits = (1 << stored - significant) - 1
        is_left = highest < 1 << significant and np.any(values & np.uint16(low_bits))
        return significant if is_left else stored
    if stored == 16 and 0 < highest < 1 << 16 - _DARK_BITS:
        raise InputError(
            f"the image has 16 bits a sample, and none is above {highest} of 65535: it would be "
            f"read as black, and whether it has fewer bits is not certain; {_HINT}"
        )
    return stored


def _scaled(values: NDArray[Any], least: float, most: float) -> NDArray[np.uint8]:
    """Scale samples to bytes, some rows at a time; whole ones of 8 bits and more by a shift."""
    num_bits = int(most).bit_length()
    is_shift = (
        values.dtype.kind == "u"
        and (least, most) == (0, (1 << num_bits) - 1)
        and 8 <= num_bits <= 8 * values.itemsize
    )
    found = np.empty(values.shape, np.uint8)
    step = max(1, _ROWS_PIXELS // values.shape[1])
    for begin in range(0, len(values), step):
        rows = values[begin : begin + step]
        if is_shift:
            found[begin : begin + step] = np.minimum(rows, int(most)) >> (num_bits - 8)
        else:
            parts = (rows.astype(np.float64).clip(least, most) - least) / (most - least)
            found[begin : begin + step] = (parts * 255).round()
    return found


def _first(tag: object) -> float | None:
    """Return a tag's value, or its first if it has one for each sample; None if it has none."""
    value = tag[0] if isinstance(tag, tuple) and tag else tag
    return float(value) if isinstance(value, Real) else None
