"""Makes one vector of those of a text's tokens, as sentence-transformers does. Workers only.

The ways are those of its module `Pooling` (sentence_transformer/modules/pooling.py, release 6.2).

Axes: B batch, T tokens, H features.
"""

# ruff: noqa: N803, N806 - tensors carry their axes in their names

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from inferpool.models.attached import attached
from inferpool.models.errors import ModelError
from inferpool.models.text.folder import DenseLayer

_FILES = ("model.safetensors", "pytorch_model.bin")


def pooled(x_BTH: Tensor, counts_BT: Tensor, poolings: Sequence[str]) -> Tensor:
    """Return float32 vectors [B, H * number of poolings].

    Args:
        x_BTH: Vectors of tokens.
        counts_BT: True at the tokens that count.
        poolings: Names of `folder.POOLINGS`.
    """
    x_BTH = x_BTH.float()
    parts = [_one(x_BTH, counts_BT, each) for each in poolings]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _one(x_BTH: Tensor, counts_BT: Tensor, pooling: str) -> Tensor:
    counts_BT1 = counts_BT[:, :, None]
    if pooling == "max":
        return x_BTH.masked_fill(~counts_BT1, -torch.inf).amax(1)
    if pooling in ("cls", "last"):
        places_BT = torch.arange(x_BTH.shape[1], device=x_BTH.device).expand_as(counts_BT)
        wrong = -1 if pooling == "last" else x_BTH.shape[1]
        found_BT = places_BT.masked_fill(~counts_BT, wrong)
        places_B = (found_BT.amax(1) if pooling == "last" else found_BT.amin(1)).clamp(
            0, x_BTH.shape[1] - 1
        )
        return x_BTH[torch.arange(len(x_BTH), device=x_BTH.device), places_B]
    if pooling == "weightedmean":  # by the tokens' places from 1 on
        places_T1 = torch.arange(1, x_BTH.shape[1] + 1, device=x_BTH.device)[:, None]
        counts_BT1 = counts_BT1 * places_T1
    num_B1 = counts_BT1.sum(1).clamp(min=1)
    # One product per text: `(x_BTH * counts_BT1).sum(1)` would copy all vectors of a batch.
    total_BH = (counts_BT1.to(x_BTH.dtype).mT @ x_BTH)[:, 0]
    return total_BH / (num_B1.sqrt() if pooling == "mean_sqrt_len_tokens" else num_B1)


def build_layers(layers: Sequence[DenseLayer], *, reads_weights: bool) -> nn.Sequential:
    """Build the layers after the pooling, with the weights of their folders or random ones.

    Raises:
        ModelError: Weights are missing, or are those of another layer.
    """
    parts: list[nn.Module] = []
    for layer in layers:
        dense = _Dense(layer)
        if reads_weights:
            file = next((layer.folder / n for n in _FILES if (layer.folder / n).is_file()), None)
            if file is None:
                raise ModelError(f"{layer.folder} has no weights: no {' and no '.join(_FILES)}")
            attached("weights")(dense, file)
        parts.append(dense)
    return nn.Sequential(*parts).eval().requires_grad_(False)


class _Dense(nn.Module):
    def __init__(self, layer: DenseLayer) -> None:
        super().__init__()
        self.linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias)
        self.activation: nn.Module = getattr(nn, layer.activation)()

    def forward(self, x_BH: Tensor) -> Tensor:
        y_BH: Tensor = self.activation(self.linear(x_BH))
        return y_BH
