"""Folds batch normalisation into the convolutions before it. Worker processes only."""

from collections import Counter
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def fold_batch_norms(network: nn.Module, run: Callable[[], object]) -> int:
    """Fold, in place, each batch norm that takes a convolution's output as it comes.

    Which belong together is seen by running the network, not by reading its code: that works for
    any, and whether the result still computes the same is for the caller to verify.

    Args:
        network: In eval mode, without gradients.
        run: Calls the network once.

    Returns:
        How many were folded.
    """
    pairs = _pairs(network, run)
    names = {module: name for name, module in network.named_modules()}
    for convolution, norm in pairs:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        convolution.weight, convolution.bias = fuse_conv_bn_weights(
            convolution.weight,
            convolution.bias,
            norm.running_mean,
            norm.running_var,
            norm.eps,
            norm.weight,
            norm.bias,
        )
        parent, _, name = names[norm].rpartition(".")
        setattr(network.get_submodule(parent), name, nn.Identity())
    return len(pairs)


def _pairs(network: nn.Module, run: Callable[[], object]) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    """The convolutions and batch norms that follow each other, each called once."""
    outputs: dict[int, tuple[nn.Module, object]] = {}
    """By id of a convolution's output, which is kept so that no other gets that id."""
    pairs = []
    num_calls: Counter[nn.Module] = Counter()

    def after(module: nn.Module, arguments: tuple[object, ...], output: object) -> None:
        num_calls[module] += 1
        if isinstance(module, _CONVOLUTIONS):
            outputs[id(output)] = module, output
        elif arguments and id(arguments[0]) in outputs and _is_frozen(module):
            pairs.append((outputs[id(arguments[0])][0], module))

    hooks = [
        module.register_forward_hook(after)
        for module in network.modules()
        if isinstance(module, (*_CONVOLUTIONS, *_NORMS))
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return [
        (convolution, norm)  # type: ignore[misc]  # the hooks have looked at their types
        for convolution, norm in pairs
        if num_calls[convolution] == num_calls[norm] == 1
    ]


def _is_frozen(norm: nn.Module) -> bool:
    """Whether it normalises by what it has learnt, and not by the batch."""
    return isinstance(getattr(norm, "running_mean", None), Tensor) and not norm.training
