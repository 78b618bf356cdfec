"""Decodes pictures from hostile bytes to upright RGB pixels. Runs in worker processes only.

The first bytes of a picture decide its format, not a header or a file name. A picture that cannot
be decoded raises `InputError` and nothing else, except for want of memory or descriptors.
"""

import contextlib
import ctypes
from collections.abc import Callable
from functools import cache, partial
from io import BytesIO
from typing import TypeVar

from PIL import ExifTags, Image, ImageChops, _imaging
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile
from torch import Tensor

from inferpool.models.accelerator.failures import lacks_resources
from inferpool.models.errors import InputError
from inferpool.models.item import Item
from inferpool.models.spec import MAX_IMAGE_PIXELS
from inferpool.models.upload import Upload
from inferpool.models.vision.containers import check_container, check_exif
from inferpool.models.vision.gray import samples_of, to_8_bits

_Decoded = TypeVar("_Decoded")
_OPENERS: dict[bytes, type[ImageFile]] = {
    b"\xff\xd8\xff": JpegImageFile,
    b"\x89PNG\r\n\x1a\n": PngImageFile,
    b"GIF87a": GifImageFile,
    b"GIF89a": GifImageFile,
    b"BM": BmpImageFile,
    b"II*\0": TiffImageFile,
    b"MM\0*": TiffImageFile,
    b"II+\0": TiffImageFile,
    b"MM\0+": TiffImageFile,
}
_MAX_EDGE = 65_535
"""JPEG and GIF have the same limit. Pillow keeps a pointer for each row, so a picture of 1 x 49
million pixels takes 20 bytes for each pixel."""
_FORMATS = "JPEG, PNG, WEBP, GIF, BMP and TIFF"

_TILE_WIDTH, _TILE_LENGTH = 322, 323
"""TIFF 6.0, section 15."""
_SMALL_TILE_PIXELS = 1 << 20

_JPEG_END = b"\xff\xd9"
_END_BYTES = 64
_STRAYS = [
    b"".join([stray, *(bytes((0xFF, marker)) + stray for marker in range(0xD0, 0xD8))])
    for stray in (b"\x35\xca\x93\x6c" * 8, b"\x7e\xe7\x81\x18" * 8, b"\xda\x5b\x24\xa4" * 8)
]
"""Bytes that no picture goes on with: also behind each of the markers that begin a new part of the
entropy-coded data (ITU-T T.81, B.1.1.2): libjpeg may wait for one."""

# EXIF 2.3, 4.6.4 A, tag 274: what undoes each orientation.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_QUARTER_TURNS = {_UPRIGHT[orientation] for orientation in (5, 6, 7, 8)}


def decode_image(
    data: bytes | memoryview | Upload,
    *,
    max_pixels: int = MAX_IMAGE_PIXELS,
    check: Callable[[tuple[int, int]], None] = lambda _: None,
) -> Image.Image:
    """Decode a picture to RGB, turned upright as its EXIF orientation says.

    An animation yields its first frame. Grayscale, CMYK and palettes become RGB as Pillow's
    `convert("RGB")` makes them; so does alpha, which is dropped. Gray of more than 8 bits is scaled
    by what the file says, where `convert` would clip nearly all of it to white.

    Args:
        data: One encoded picture, or the file of a form that has one.
        max_pixels: A picture with more is refused by its header, before it is decoded.
        check: Called with the header's width and height before decoding; may raise `InputError`.

    Raises:
        InputError: It is no picture, or a damaged one, or too large; the message says which.
    """
    if isinstance(data, Upload):
        data = data.data
    image, _ = decode_scaled(data, least_edge=None, max_pixels=max_pixels, check=check)
    return image


def decode_scaled(
    data: bytes | memoryview,
    *,
    least_edge: int | None,
    max_pixels: int = MAX_IMAGE_PIXELS,
    check: Callable[[tuple[int, int]], None] = lambda _: None,
) -> tuple[Image.Image, tuple[int, int]]:
    """Decode a picture as `decode_image` does, but a JPEG perhaps smaller, by 2, 4 or 8.

    libjpeg then computes only the low frequencies of each block of 8 x 8 pixels, which averages
    over 2 x 2, 4 x 4 or 8 x 8 pixels.

    Args:
        data: One encoded picture.
        least_edge: Least length of both edges of a smaller picture; None for the full size.
        max_pixels: See `decode_image`.
        check: See `decode_image`.

    Returns:
        The picture, and the width and height it has upright and in full size.

    Raises:
        InputError: See `decode_image`.
    """

    def upright(image: ImageFile, data: bytes) -> tuple[Image.Image, tuple[int, int]]:
        width, height = image.size
        if isinstance(image, JpegImageFile):
            image = _loaded_jpeg(data, image, least_edge)
        else:
            image.load()
        turn = _turn(image)
        turned = image if turn is None else image.transpose(turn)
        turned = to_8_bits(turned, samples_of(image, data))
        return _to_rgb(turned), (height, width) if turn in _QUARTER_TURNS else (width, height)

    return _read(data, max_pixels, check, upright)


def decode_as_stored(
    data: bytes | bytearray,
    *,
    max_pixels: int = MAX_IMAGE_PIXELS,
    check: Callable[[tuple[int, int]], None] = lambda _: None,
) -> Image.Image:
    """Decode a picture with its own mode and orientation, as Pillow alone does.

    Args:
        data: One encoded picture.
        max_pixels: See `decode_image`.
        check: See `decode_image`.

    Raises:
        InputError: See `decode_image`.
    """

    def loaded(image: ImageFile, _: bytes) -> Image.Image:
        image.load()
        return image

    return _read(data, max_pixels, check, loaded)


def _read(
    data: bytes | bytearray | memoryview,
    max_pixels: int,
    check: Callable[[tuple[int, int]], None],
    decode: Callable[[ImageFile, bytes], _Decoded],
) -> _Decoded:
    """Open a picture, check what its file says, and decode it."""
    if not len(data):
        raise InputError("the image is empty: 0 bytes")
    data = bytes(data)  # `BytesIO` shares what is bytes, and copies anything else
    opener = _opener_of(data[:16])
    if opener is None:
        raise InputError(f"these {len(data)} bytes are no image: {_FORMATS} are understood")
    try:
        check_container(opener.format, data, partial(check_size, max_pixels=max_pixels))
        # Not by `Image.open`: its size check is global, and warns where this one refuses.
        image = opener(BytesIO(data))
        check_size(*image.size, max_pixels=max_pixels)
        if max(image.size) > _MAX_EDGE:
            raise InputError(
                f"the image is {image.width} x {image.height} pixels; at most {_MAX_EDGE:,} along "
                "each edge are taken"
            )
        check(image.size)
        if isinstance(image, TiffImageFile):
            _silence_libtiff()
            _check_tile(image)
        return decode(image, data)
    except InputError:
        raise
    except Exception as error:  # hostile bytes make Pillow raise almost anything
        if lacks_resources(error):
            raise
        reason = str(error) or type(error).__name__
        raise InputError(f"the {opener.format} image cannot be decoded: {reason}") from error


def check_size(width: int, height: int, *, max_pixels: int = MAX_IMAGE_PIXELS) -> None:
    """Refuse a picture of no pixels, or of too many.

    Raises:
        InputError: The picture is refused.
    """
    if width < 1 or height < 1:
        raise InputError(f"the image has no pixels: it is {width} x {height}")
    if width * height > max_pixels:
        raise InputError(
            f"the image has {width} x {height} = {width * height:,} pixels; "
            f"at most {max_pixels:,} are taken"
        )


def _opener_of(head: bytes) -> type[ImageFile] | None:
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return WebPImageFile
    for magic, opener in _OPENERS.items():
        if head.startswith(magic):
            return opener
    return None


def _loaded_jpeg(data: bytes, image: JpegImageFile, least_edge: int | None) -> JpegImageFile:
    """Decode a JPEG, which may be smaller; one that lacks nothing but its end marker as well.

    Raises:
        OSError: It is damaged, or cut short.
    """
    if least_edge is not None:
        image.draft(None, (least_edge, least_edge))
    try:
        image.load()
    except OSError:
        whole = data.rstrip(b"\xff")  # half a marker
        if b"\xff\xd9" in data[-_END_BYTES:] or not _is_whole_without_end(whole):
            raise
        image = JpegImageFile(BytesIO(whole + _JPEG_END))
        if least_edge is not None:
            image.draft(None, (least_edge, least_edge))
        image.load()
    return image


def _is_whole_without_end(data: bytes) -> bool:
    """Return whether a JPEG without its end marker has all its pixels.

    libjpeg fills up what is missing, and does not say so. But where something is missing, it takes
    what comes next for it, and the pixels differ with that; else it skips that.
    """
    image = JpegImageFile(BytesIO(data + _JPEG_END))
    others = (JpegImageFile(BytesIO(data + stray + _JPEG_END)) for stray in _STRAYS)
    return all(ImageChops.difference(image, other).getbbox() is None for other in others)


@cache
def _silence_libtiff() -> None:
    """Prevent libtiff from writing to our stderr what is wrong with a client's picture."""
    with contextlib.suppress(OSError, AttributeError):  # built in, or built without
        libtiff = ctypes.CDLL(_imaging.__file__)  # found through what links it
        libtiff.TIFFSetErrorHandler(None)
        libtiff.TIFFSetWarningHandler(None)


def _check_tile(image: TiffImageFile) -> None:
    """Refuse a tile much larger than the picture, since it is decoded as a whole."""
    num_pixels = image.width * image.height
    width, height = (image.tag_v2.get(tag) or 1 for tag in (_TILE_WIDTH, _TILE_LENGTH))
    if width * height > 2 * num_pixels + _SMALL_TILE_PIXELS:
        raise InputError(
            f"the image of {image.width} x {image.height} pixels is in tiles of {width} x {height}"
        )


def _turn(image: Image.Image) -> Image.Transpose | None:
    """Return the transposition that makes the picture upright."""
    check_exif(len(image.info.get("exif", b"")))
    check_exif(len(image.info.get("Raw profile type exif", "")) // 2)
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception as error:  # damaged metadata does not make the picture unreadable
        if lacks_resources(error):
            raise  # or the picture would be left as it lies
        return None
    return _UPRIGHT.get(orientation) if isinstance(orientation, int) else None


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    # It changes no colour here, and makes `convert` warn about palettes.
    image.info.pop("transparency", None)
    return image.convert("RGB")


def only_tensor(item: Item) -> Tensor:
    """Return the tensor of an instance that is one picture, as a view of its payload.

    Raises:
        InputError: The instance has another tensor, several, or fewer bytes than they need.
    """
    if len(item.headers) != 1 or item.headers[0].name not in ("", "image"):
        names = ", ".join(repr(header.name) for header in item.headers)
        raise InputError(f"this model takes one tensor, 'image', not {names or 'none'}")
    header = item.headers[0]
    if header.offset + header.num_bytes > len(item.payload):
        raise InputError("tensor 'image': its bytes end after the payload does")
    (tensor,) = item.views().values()
    return tensor
