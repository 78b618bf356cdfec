"""Makes a network's input of pictures of any sizes on the network's device. Worker processes only.

The pictures of a batch that lie on the host are copied to the device, and one launch resizes, crops
and normalises them with those that were decoded there.

Axes: B batch, C = 3 colours, H height, W width, S steps along an edge of the result.
"""

# ruff: noqa: N803, N806 - tensors carry their axes in their names

import logging
from collections.abc import Callable, Sequence
from pkgutil import resolve_name

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from inferpool.models.accelerator.failures import is_lost_device
from inferpool.models.accelerator.kinds import accelerator_of
from inferpool.models.vision.picture_facts import REACHES
from inferpool.models.vision.transforms import ImageTransform, Normalize

logger = logging.getLogger(__name__)

Launch = Callable[[Sequence[Tensor], NDArray[np.int64], Image.Resampling, Tensor, Tensor], None]
"""See `inferpool.models.vision.one_launch:transform`."""

_MAX_PINNED_BYTES = 1 << 26
"""Most bytes of a batch's pictures that are copied from pinned memory: torch keeps that memory, and
64 gray pictures of 16 million pixels would take 3 GB of it."""
_TRIAL_SIZES = ((53, 38), (47, 90))
"""Height and width of pictures that a launch must get right before it is used."""


class DevicePictures:
    """Makes the input of a network on a device."""

    def __init__(self, launch: Launch, transform: ImageTransform, device: torch.device) -> None:
        self._launch = launch
        self._transform = transform
        self._device = device
        self._normalization = torch.tensor([transform.mean, transform.std]).to(device)

    def inputs(
        self,
        images_CHW: Sequence[Tensor],
        are_done: Sequence[bool],
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> Tensor:
        """Resize, crop and normalise pictures to [B, C, S, S].

        Args:
            images_CHW: Pictures uint8 of any strides, on this device or on the CPU.
            are_done: Whether each is resized and cropped already.
            dtype: The network's.
            memory_format: Layout that the network prefers.

        Raises:
            torch.OutOfMemoryError: The device has no room for them.
            torch.AcceleratorError: The device's context is lost.
        """
        windows_B4 = self._transform.windows([each.shape[1:] for each in images_CHW])
        edge = self._transform.crop
        if any(are_done):
            windows_B4[np.array(are_done)] = edge, edge, 0, 0
        out_BCSS = torch.empty(
            (len(images_CHW), 3, edge, edge),
            dtype=dtype,
            device=self._device,
            memory_format=memory_format,
        )
        self._launch(
            self._uploaded(images_CHW),
            windows_B4,
            self._transform.interpolation,
            self._normalization,
            out_BCSS,
        )
        return out_BCSS

    def check(self) -> None:
        """Compare a launch with the exact way.

        Raises:
            Exception: It fails, or a value is off by more than a level.
        """
        random = np.random.default_rng(0)
        pictures = [random.integers(0, 256, (*size, 3), np.uint8) for size in _TRIAL_SIZES]
        exact = torch.stack([self._transform.pixels(Image.fromarray(each)) for each in pictures])
        wanted = Normalize(self._transform)(exact)
        images = [torch.from_numpy(each).permute(2, 0, 1) for each in pictures]
        found = self.inputs(images, [False] * len(images))
        std = torch.tensor(self._transform.std).view(3, 1, 1)
        levels = ((found.cpu() - wanted) * std * 255).abs().max().item()
        if not levels < 1.01:
            raise ValueError(f"its pixels are off by {levels:.3g} levels of 256")

    def _uploaded(self, images_CHW: Sequence[Tensor]) -> Sequence[Tensor]:
        """Copy those on the host to the device, with one copy unless they are large."""
        on_host = [each.permute(1, 2, 0) for each in images_CHW if each.device.type == "cpu"]
        if not on_host:
            return images_CHW
        sizes = [each.numel() for each in on_host]
        if sum(sizes) > _MAX_PINNED_BYTES:
            return [each.to(self._device) for each in images_CHW]
        pinned = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
        torch.cat([each.reshape(-1) for each in on_host], out=pinned)
        parts = pinned.to(self._device, non_blocking=True).split(sizes)
        copies = iter(
            part.view(like.shape).permute(2, 0, 1)
            for part, like in zip(parts, on_host, strict=True)
        )
        return [next(copies) if each.device.type == "cpu" else each for each in images_CHW]


def pictures_on(device: torch.device, transform: ImageTransform) -> DevicePictures | None:
    """Return the way to make inputs on a device; None if it has none that is right.

    Raises:
        torch.AcceleratorError: The device's context is lost.
    """
    accelerator = accelerator_of(device.type)
    if accelerator is None or transform.interpolation not in REACHES:
        return None
    if not accelerator.transform_pictures:
        return None
    try:
        pictures = DevicePictures(resolve_name(accelerator.transform_pictures), transform, device)
        pictures.check()
    except ImportError as error:
        logger.info("pictures are resized without a kernel of their own: %s", error)
        return None
    except Exception as error:  # Triton's compiler may raise anything, and needs room on a disk
        if is_lost_device(error):
            raise
        logger.warning("the kernel that resizes pictures is not used: %s", error, exc_info=True)
        return None
    return pictures
