"""JPEGs decoded and resized on the GPU that serves them. Worker processes only.

The GPU gets plain ones only: baseline colour or gray, upright, whole, and of moderate size. The CPU
decodes all others.

Axes: H height, W width, C = 3 colours.
"""

import logging
import re
import warnings
from collections.abc import Callable, Sequence
from io import BytesIO
from pkgutil import resolve_name

import torch
from PIL import ExifTags
from PIL.JpegImagePlugin import JpegImageFile
from torch import Tensor

from inferpool.models.accelerator.device import finish_stream, synchronize
from inferpool.models.accelerator.kinds import accelerator_of
from inferpool.models.vision.containers import check_container, check_exif
from inferpool.models.vision.images import check_size
from inferpool.models.vision.transforms import ImageTransform

logger = logging.getLogger(__name__)

Decode = Callable[[list[Tensor]], list[Tensor]]
"""Decodes JPEGs (uint8 [bytes], on the CPU) to pixels, uint8 [C, H, W] on the GPU.

Raises `torch.OutOfMemoryError` for want of memory, `torch.AcceleratorError` if the device's context
is lost, and another `RuntimeError` if it cannot decode one of them.
"""

_MAX_PIXELS = 1 << 24
"""Larger ones would take 200 MB of the GPU's memory each while they are resized."""
_END = b"\xff\xd9"
_RGB = [*b"RGB"]
"""Names of components that libjpeg takes for red, green and blue, without another marker that says
so (jdapimin.c, `default_decompress_parms`). Other decoders take them for YCbCr."""
_SHORTAGE = re.compile(r"out of memory|Failed to [^:]*: 5\b")
"""Errors of memory, as torchvision words them (decode_jpegs_cuda.cpp, version 0.29). It makes all
into "Error while decoding JPEG images: ...", with torch's text of a lack, or nvJPEG's status; 5 is
NVJPEG_STATUS_ALLOCATOR_FAILURE."""


class GpuJpegs:
    """Decodes and transforms plain JPEGs on the GPU."""

    def __init__(self, decode: Decode, transform: ImageTransform) -> None:
        self._decode = decode
        self._transform = transform

    def accept(self, payload: memoryview, max_pixels: int) -> Tensor | None:
        """Copy a JPEG to uint8 [bytes]; None if its header or end says that it is for the CPU."""
        data = bytes(payload)
        # What was cut short must be refused, and the GPU might fill it up.
        if not data.startswith(b"\xff\xd8\xff") or not data.endswith(_END):
            return None
        try:
            check_container("JPEG", data, check_size)
            image = JpegImageFile(BytesIO(data))
            check_exif(len(image.info.get("exif", b"")))
            is_plain = (
                (image.mode, image.layers) in (("RGB", 3), ("L", 1))
                and not {"progressive", "adobe"} & image.info.keys()
                and [name for name, *_ in image.layer] != _RGB
                and image.width * image.height <= min(max_pixels, _MAX_PIXELS)
                and image.getexif().get(ExifTags.Base.Orientation, 1) == 1
            )
            self._transform.check(image.size)
        except Exception:  # the CPU's way says what is wrong with it
            return None
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) if is_plain else None

    def pixels(
        self, jpegs: Sequence[Tensor], on_cpu: Callable[[memoryview], Tensor]
    ) -> list[Tensor]:
        """Decode and resize accepted JPEGs to uint8 [crop, crop, C].

        Args:
            jpegs: Results of `accept`.
            on_cpu: Decodes on the CPU those that the GPU refuses.

        Raises:
            torch.OutOfMemoryError: The GPU has no room for so many.
            torch.AcceleratorError: The device's context is lost.
        """
        images = self._decoded([*jpegs])
        found = iter(self._transform.device_pixels([each for each in images if each is not None]))
        return [
            on_cpu(memoryview(jpeg.numpy().tobytes())) if image is None else next(found)
            for jpeg, image in zip(jpegs, images, strict=True)
        ]

    def _decoded(self, jpegs: list[Tensor]) -> list[Tensor | None]:
        """Decode JPEGs; return None for those that the GPU refuses.

        It does not say which of several it refuses, so halves are tried until these are alone.
        """
        try:
            return [*self._decode(jpegs)]
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError as error:
            logger.debug("the GPU decodes not all of %d JPEGs: %s", len(jpegs), error)
        if len(jpegs) == 1:
            return [None]
        middle = len(jpegs) // 2
        return [*self._decoded(jpegs[:middle]), *self._decoded(jpegs[middle:])]


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
