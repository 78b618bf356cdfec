"""JPEGs decoded and resized on the GPU that serves them. Worker processes only.

The GPU gets plain ones only: colour or gray in one scan, upright, whole, and of moderate size. The
CPU decodes all others.

Axes: B batch, C = 3 colours, H height, W width.
"""

# ruff: noqa: N806 - tensors carry their axes in their names

import logging
import re
import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pkgutil import resolve_name
from typing import Literal

import torch
from PIL import ExifTags, Image
from torch import Tensor

from inferpool.models.accelerator.device import finish_stream, synchronize
from inferpool.models.accelerator.kinds import accelerator_of
from inferpool.models.vision.device_pictures import DevicePictures
from inferpool.models.vision.transforms import ImageTransform

logger = logging.getLogger(__name__)

Decode = Callable[[list[Tensor]], list[Tensor]]
"""Decodes JPEGs (uint8 [bytes], on the CPU) to pixels, uint8 [C, H, W] on the GPU.

Raises `torch.OutOfMemoryError` for lack of memory, `torch.AcceleratorError` if the device's context
is lost, and another `RuntimeError` if it cannot decode one of them.
"""

MAX_PIXELS = 1 << 24
"""Larger ones would take 200 MB of the GPU's memory each while they are resized."""
_BEGIN, _END = b"\xff\xd8\xff", b"\xff\xd9"
_HEAD_BYTES = 1 << 14
"""Bytes that most headers fit into. To copy whole JPEGs takes five times as long as the rest."""
_RGB = b"RGB"
"""Names of components that libjpeg takes for red, green and blue, without another marker that says
so (jdapimin.c, `default_decompress_parms`). Other decoders take them for YCbCr."""
_MAX_SEGMENTS = 1000
"""Before the picture's scan. Encoders write about 10, and fill those of metadata up to 64 KiB."""
_SEGMENT = struct.Struct(">HH")
"""A marker, and the length that follows it (ITU-T T.81, B.1.1.4)."""
_FRAME = struct.Struct(">BHHB")
"""Bits of a sample, height, width, and number of components (ITU-T T.81, B.2.2)."""
_TABLE_BYTES = 65
"""A quantization table of 8 bits: a byte with its number, and 64 steps (ITU-T T.81, B.2.4.1)."""

# ITU-T T.81, table B.1.
_SOF = (0xFFC0, 0xFFC1)
"""Sequential frames with Huffman codes."""
_DHT, _SOS, _DQT, _DRI, _COM = 0xFFC4, 0xFFDA, 0xFFDB, 0xFFDD, 0xFFFE
_APP0, _APP1, _APP2, _APP13, _APP14 = 0xFFE0, 0xFFE1, 0xFFE2, 0xFFED, 0xFFEE
_NEVER = 1 << 16
_LEAST_BYTES = dict.fromkeys((_DHT, _DRI, _COM, *range(0xFFE0, 0xFFF0)), 0) | {
    _APP0: 14,
    _APP2: 14,
    _APP14: _NEVER,
}
"""Bytes that a segment must have to be passed over.

Pillow refuses a shorter JFIF header (ITU-T T.871, 10.1) or part of a colour profile (ICC.1, B.4).
APP14 is Adobe's, and says what the colours are: not plain."""

# TIFF 6.0, section 2, and Exif 2.3, 4.6.2 and 4.6.4.
_TIFF_FIELDS = {b"II*\0": struct.Struct("<HHII"), b"MM\0*": struct.Struct(">HHII")}
"""Tag, type, number of values, and the values or where they are, by how a file begins."""
_FIELD_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8}
"""Bytes of a value of each type."""
_SHORT, _RATIONAL = (3, 1), (5, 1)
"""Type and number of values."""
_ORIENTATION, _X_RESOLUTION = ExifTags.Base.Orientation.value, ExifTags.Base.XResolution.value

_SHORTAGE = re.compile(r"out of memory|Failed to [^:]*: 5\b")
"""Errors of memory, as torchvision words them (decode_jpegs_cuda.cpp, version 0.29). It makes all
into "Error while decoding JPEG images: ...", with torch's text of a lack, or nvJPEG's status; 5 is
NVJPEG_STATUS_ALLOCATOR_FAILURE."""


class GpuJpegs:
    """Decodes and transforms plain JPEGs on the GPU."""

    def __init__(
        self,
        decode: Decode,
        transform: ImageTransform,
        pictures: DevicePictures | None = None,
    ) -> None:
        self._decode = decode
        self._transform = transform
        self.pictures = pictures
        """The way to make a network's input of decoded pictures at once, if there is one."""

    def accept(self, payload: memoryview, max_pixels: int) -> Tensor | None:
        """Return a JPEG in place, uint8 [bytes]; None if it is one for the CPU."""
        # What was cut short must be refused, and the GPU might fill it up.
        if payload[:3] != _BEGIN or payload[-2:] != _END:
            return None
        if not self._is_plain(bytes(payload[:_HEAD_BYTES]), max_pixels) and (
            len(payload) <= _HEAD_BYTES or not self._is_plain(bytes(payload), max_pixels)
        ):
            return None
        return torch.frombuffer(payload, dtype=torch.uint8)

    def _is_plain(self, data: bytes, max_pixels: int) -> bool:
        """Return whether the GPU may decode a JPEG, by its header or as much as there is of it."""
        try:
            size = _plain_size(data)
            if size is None or not 0 < size[0] * size[1] <= min(max_pixels, MAX_PIXELS):
                return False
            self._transform.check(size)
        except Exception:  # the CPU's way says what is wrong with it
            return False
        return True

    def pixels(
        self, jpegs: Sequence[Tensor], on_cpu: Callable[[memoryview], Tensor]
    ) -> list[Tensor]:
        """Decode and resize accepted JPEGs to uint8 [crop, crop, C].

        Args:
            jpegs: Results of `accept`.
            on_cpu: Decodes on the CPU those that the GPU refuses.

        Raises:
            torch.OutOfMemoryError: The GPU has no room for them.
            torch.AcceleratorError: The device's context is lost.
        """
        images = self.decoded([*jpegs])
        found = iter(self._transform.device_pixels([each for each in images if each is not None]))
        return [
            on_cpu(memoryview(jpeg.numpy().tobytes())) if image is None else next(found)
            for jpeg, image in zip(jpegs, images, strict=True)
        ]

    def inputs(
        self,
        images: Sequence[Tensor],
        on_cpu: Callable[[memoryview], Tensor],
        dtype: torch.dtype,
        memory_format: torch.memory_format,
    ) -> Tensor:
        """Make a network's input [B, C, crop, crop] of pictures by one launch.

        Args:
            images: Results of `accept`, whole pictures uint8 [1, C, H, W], or the pixels of a crop,
                uint8 [crop, crop, C].
            on_cpu: Decodes on the CPU those that the GPU refuses, to the pixels of the crop.
            dtype: The network's.
            memory_format: Layout that the network prefers.

        Raises:
            torch.OutOfMemoryError: The GPU has no room for them.
            torch.AcceleratorError: The device's context is lost.
        """
        assert self.pictures is not None
        decoded = iter(self.decoded([each for each in images if each.dim() == 1]))
        images_CHW, are_done = [], []
        for image in images:
            picture = next(decoded) if image.dim() == 1 else image[0] if image.dim() == 4 else None
            are_done.append(picture is None)
            if picture is None:
                is_refused = image.dim() == 1
                pixels = on_cpu(memoryview(image.numpy().tobytes())) if is_refused else image
                picture = pixels.permute(2, 0, 1)
            images_CHW.append(picture)
        return self.pictures.inputs(images_CHW, are_done, dtype, memory_format)

    def decoded(self, jpegs: list[Tensor]) -> list[Tensor | None]:
        """Decode accepted JPEGs to [C, H, W]; return None for those that the GPU refuses.

        It does not say which of several it refuses, so halves are tried until these are alone.

        Raises:
            torch.OutOfMemoryError: The GPU has no room for them.
            torch.AcceleratorError: The device's context is lost.
        """
        if not jpegs:
            return []
        try:
            return [*self._decode(jpegs)]
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError as error:
            logger.debug("the GPU decodes not all of %d JPEGs: %s", len(jpegs), error)
        if len(jpegs) == 1:
            return [None]
        middle = len(jpegs) // 2
        return [*self.decoded(jpegs[:middle]), *self.decoded(jpegs[middle:])]


def _plain_size(data: bytes) -> tuple[int, int] | None:
    """Return the width and height of a plain, upright JPEG by its header; None for any other.

    Pillow accepts all of these, but needs four to five times as long for a header.

    Raises:
        Exception: The header is damaged.
    """
    size, num_components, metadata = None, 0, dict[str, bytes]()
    position = 2
    for _ in range(_MAX_SEGMENTS):
        marker, length = _SEGMENT.unpack_from(data, position)
        segment = data[position + 4 : position + 2 + length]
        if len(segment) != length - 2:
            return None
        if marker in _SOF and size is None:
            num_bits, height, width, num_components = _FRAME.unpack_from(segment)
            if (num_bits, len(segment)) != (8, 6 + 3 * num_components):
                return None
            if num_components not in (1, 3) or segment[6::3] == _RGB:
                return None
            size = width, height
        elif marker == _SOS and segment[0] == num_components:
            return size if _is_upright(metadata) else None
        elif marker == _DQT:
            if len(segment) % _TABLE_BYTES or max(segment[::_TABLE_BYTES]) > 15:
                return None
        elif marker == _APP1 and segment.startswith(b"Exif\0\0"):
            if "exif" in metadata:  # Exif 2.3, 4.5.4: it fits into one segment
                return None
            metadata["exif"] = segment
        elif marker == _APP1 and segment.startswith(b"http://ns.adobe.com/xap/1.0/\0"):
            metadata["xmp"] = segment
        elif len(segment) < _LEAST_BYTES.get(marker, _NEVER) or (
            marker == _APP13 and segment[-6:-2] == b"8BIM"  # cut short, and Pillow minds
        ):
            return None
        position += 2 + length
    return None


def _is_upright(metadata: Mapping[str, bytes]) -> bool:
    """Return whether EXIF or XMP say that a picture is upright, or nothing.

    Raises:
        Exception: The EXIF metadata is damaged.
    """
    if not metadata:
        return True
    if (is_upright := _plain_exif(metadata)) is not None:
        return is_upright
    image = Image.Image()
    image.info.update(metadata)
    exif = image.getexif()
    # Pillow fails to open a JPEG with some resolutions that are no number.
    is_measured = isinstance(exif.get(ExifTags.Base.XResolution, 72), Real)
    return is_measured and exif.get(ExifTags.Base.Orientation, 1) == 1


def _plain_exif(metadata: Mapping[str, bytes]) -> bool | None:
    """Return whether EXIF says that a picture is upright; None if that is for Pillow to find out.

    Pillow needs 20 to 100 us. This reads the first directory if all its fields are whole.
    """
    exif = metadata.get("exif", b"")[6:]
    if exif[:4] not in _TIFF_FIELDS:
        return None
    fields = _TIFF_FIELDS[exif[:4]]
    order: Literal["little", "big"] = "little" if exif[:1] == b"I" else "big"
    start = int.from_bytes(exif[4:8], order)
    num = int.from_bytes(exif[start : start + 2], order)
    found = {}
    for tag, kind, count, value in fields.iter_unpack(exif[start + 2 : start + 2 + 12 * num]):
        num_bytes = _FIELD_BYTES.get(kind, _NEVER) * count
        if num_bytes > 4 and value + num_bytes > len(exif):
            return None
        found[tag] = kind, count, value
    if len(found) != num or found.get(_X_RESOLUTION, _RATIONAL)[:2] != _RATIONAL:
        return None
    if _ORIENTATION not in found:
        return None if "xmp" in metadata else True
    kind, count, value = found[_ORIENTATION]
    return (value if order == "little" else value >> 16) == 1 if (kind, count) == _SHORT else None


def decoder_on(device: torch.device) -> Decode | None:
    """Return the device's decoder of JPEGs (nvJPEG on CUDA); None if it is not available."""
    accelerator = accelerator_of(device.type)
    if accelerator is None or not accelerator.decode_jpeg:
        return None
    try:
        from torchvision.io import (  # type: ignore[import-untyped]  # it ships no annotations
            ImageReadMode,
        )

        decode_jpeg = resolve_name(accelerator.decode_jpeg)
    except (ImportError, AttributeError, RuntimeError):
        return None
    # torchvision will hand this over to TorchCodec one day.
    warnings.filterwarnings("ignore", message="The image decoding and encoding capabilities")

    def decode(jpegs: list[Tensor]) -> list[Tensor]:
        # torchvision takes memory of this thread's stream, and nvJPEG writes to it on a stream that
        # waits for nothing: it would write over what the last owner's kernels have yet to read.
        finish_stream(device)
        try:
            images: list[Tensor] = decode_jpeg(jpegs, mode=ImageReadMode.RGB, device=device)
        except RuntimeError as error:
            # It may still write to memory that has been freed. And if the context is lost, then its
            # error does not say so, but this one does.
            synchronize(device)
            if _SHORTAGE.search(str(error)):
                raise torch.OutOfMemoryError(str(error)) from error
            raise
        return images

    return decode
