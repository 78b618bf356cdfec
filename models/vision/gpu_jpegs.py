"""JPEGs decoded and resized on the GPU that serves them. Worker processes only.

The GPU gets plain ones only: baseline colour or gray, upright, whole, and of moderate size. The CPU
decodes all others.

Axes: H height, W width, C = 3 colours.
"""

import logging
import warnings
from collections.abc import Callable, Sequence
from io import BytesIO
from pkgutil import resolve_name

import torch
from PIL import ExifTags
from PIL.JpegImagePlugin import JpegImageFile
from torch import Tensor

from inferpool.models.accelerator.kinds import accelerator_of
from inferpool.models.vision.containers import check_exif
from inferpool.models.vision.transforms import ImageTransform

logger = logging.getLogger(__name__)

Decode = Callable[[list[Tensor]], list[Tensor]]
"""Decodes JPEGs (uint8 [bytes], on the CPU) to pixels, uint8 [C, H, W] on the GPU."""

_MAX_PIXELS = 1 << 24
"""Larger ones would take 200 MB of the GPU's memory each while they are resized."""
_END = b"\xff\xd9"


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
            image = JpegImageFile(BytesIO(data))
            check_exif(len(image.info.get("exif", b"")))
            is_plain = (
                (image.mode, image.layers) in (("RGB", 3), ("L", 1))
                and not {"progressive", "adobe"} & image.info.keys()
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
            on_cpu: Decodes on the CPU; used for all of them if the GPU refuses one.

        Raises:
            torch.OutOfMemoryError: The GPU has no room for so many.
        """
        try:
            decoded = self._decode([*jpegs])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # it does not say for which of them
            logger.debug("the GPU decodes not all of %d JPEGs: %s", len(jpegs), error)
            return [on_cpu(memoryview(jpeg.numpy().tobytes())) for jpeg in jpegs]
        return [self._transform.device_pixels(image_CHW) for image_CHW in decoded]


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
        images: list[Tensor] = decode_jpeg(jpegs, mode=ImageReadMode.RGB, device=device)
        return images

    return decode
