"""Decodes JPEGs on simulated devices, with the calls of torchvision's decoder for CUDA, in order.

(torchvision/csrc/io/image/cuda/decode_jpegs_cuda.cpp, version 0.29.) It takes memory from the
allocator for the caller's stream, but writes to it on a stream of its own, which does not wait for
the caller's. All its errors have one type and begin alike. The pixels are those of the CPU.
"""

import threading
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import torch
import torchvision
from PIL import Image
from torch import Tensor

_BAD_JPEG = 3
"""NVJPEG_STATUS_BAD_JPEG."""
_lock = threading.Lock()
_streams: dict[torch.device, torch.Stream] = {}


def decode_jpeg(jpegs: Sequence[Tensor], *, mode: Any, device: torch.device) -> list[Tensor]:
    """Decode JPEGs, uint8 [bytes] on the CPU, to uint8 [C, H, W] on a device.

    Raises:
        RuntimeError: Anything failed; the work that was begun may go on.
    """
    with _lock:
        stream = _streams.setdefault(device, torch.Stream(device))
        try:
            return _decode(jpegs, mode, device, stream)
        except Exception as error:
            raise RuntimeError(f"Error while decoding JPEG images: {error}") from None


def _decode(
    jpegs: Sequence[Tensor], mode: Any, device: torch.device, stream: torch.Stream
) -> list[Tensor]:
    images = []
    for jpeg in jpegs:
        try:
            width, height = Image.open(BytesIO(jpeg.numpy().tobytes())).size
        except OSError:
            raise RuntimeError(f"Failed to get image info: {_BAD_JPEG}") from None
        images.append(torch.empty((3, height, width), dtype=torch.uint8, device=device))
    stream.synchronize()
    for jpeg, image in zip(jpegs, images, strict=True):
        try:
            pixels = torchvision.io.decode_jpeg(jpeg, mode=mode)
        except RuntimeError:
            raise RuntimeError(f"Failed to decode jpeg stream: {_BAD_JPEG}") from None
        with stream:
            image.copy_(pixels.pin_memory(), non_blocking=True)
    stream.synchronize()
    return images
