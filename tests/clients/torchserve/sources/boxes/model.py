"""Finds bright places in pictures, and answers as torchvision's detectors do; has no weights."""

import torch
from torch import nn


class Boxes(nn.Module):
    """Gives a box for each ninth of a picture, scored by its brightness."""

    def forward(self, pictures: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        height, width = pictures.shape[-2:]
        means_BC9 = torch.nn.functional.adaptive_avg_pool2d(pictures, 3).flatten(2)
        places = torch.arange(9)
        left, top = places % 3 * width / 3, places // 3 * height / 3
        boxes = torch.stack([left, top, left + width / 3, top + height / 3], dim=1)
        return [
            {
                "boxes": boxes,
                "labels": means_C9.argmax(0) + 1,
                "scores": torch.sigmoid(12 * (means_C9.mean(0) - 0.4)),
            }
            for means_C9 in means_BC9
        ]
