"""Takes back what rounding weights does to a network's values on average. Worker processes only.

Rounding shifts the mean of each output channel by (W - rounded W) times the mean of the inputs,
which those of a rectifier make large; a bias takes that shift back at no cost. After Nagel et al.,
"Data-Free Quantization Through Weight Equalization and Bias Correction" (ICCV 2019), section 4.2,
with the means taken from samples.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def correct_biases(network: nn.Module, dtype: torch.dtype, run: Callable[[], object]) -> None:
    """Change, in place, the biases of a network whose weights are going to be rounded.

    Args:
        network: In eval mode, without gradients.
        dtype: What weights are going to be rounded to.
        run: Calls the network once, with samples of every kind.
    """
    for layer, mean in _mean_inputs(network, run).items():
        assert isinstance(layer, _LAYERS)
        weight = layer.weight.detach()
        lost = weight - weight.to(dtype).to(weight.dtype)
        groups = 1 if isinstance(layer, nn.Linear) else layer.groups
        # A filter's taps see about the same mean: [groups, out per group, in per group]
        per_input = lost.flatten(2).sum(2) if lost.dim() > 2 else lost
        per_group = per_input.reshape(groups, -1, per_input.shape[1])
        shift = (per_group @ mean.reshape(groups, -1, 1)).flatten()
        bias = shift if layer.bias is None else layer.bias + shift
        layer.bias = nn.Parameter(bias, requires_grad=False)


def _mean_inputs(network: nn.Module, run: Callable[[], object]) -> Mapping[nn.Module, Tensor]:
    """What each channel of each layer's input is on average, over samples and places."""
    means: dict[nn.Module, list[Tensor]] = {}

    def before(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].detach()
        x = x.flatten(0, -2) if isinstance(layer, nn.Linear) else x.transpose(1, -1).flatten(0, -2)
        means.setdefault(layer, []).append(x.mean(0))

    hooks = [
        layer.register_forward_pre_hook(before)
        for layer in network.modules()
        if isinstance(layer, _LAYERS)
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return {layer: torch.stack(each).mean(0).clone() for layer, each in means.items()}
