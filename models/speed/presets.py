"""Makes the network of each preset. Worker processes only."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from inferpool.models.accelerator.device import has_tf32, is_accelerator, tf32
from inferpool.models.speed.fused import fused

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_LAYERS = (nn.Linear, *_CONVOLUTIONS)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_LOW_BITS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_MADE_HERE = ("channels_last", "folded", "tf32", *_LOW_BITS)


def presets_for(network: nn.Module, device: torch.device) -> list[str]:
    """Return the presets that may help a network on a device, in the order to try them."""
    modules = tuple(network.modules())
    names = []
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in modules):
        names.append("folded")
    elif any(isinstance(module, nn.Conv2d) for module in modules):
        names.append("channels_last")  # which `folded` has in it
    if is_accelerator(device):
        # A model that has asked for TF32 has it in `exact`.
        return [*names, *([] if has_tf32() else ["tf32"]), "bf16", "fp16"]
    # Without the instructions it would be emulated, and slower.
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return [*names, "bf16"] if has_bf16 else names


def can_be_changed(network: object) -> bool:
    """Return whether presets can change it: a float32 network with code in Python."""
    if not isinstance(network, nn.Module) or isinstance(network, torch.jit.ScriptModule):
        return False
    floats = {p.dtype for p in network.state_dict().values() if p.is_floating_point()}
    return floats == {torch.float32}


class Recast(nn.Module):
    """A network that gets its inputs in its own dtype and layout, and returns float32."""

    memory_format = torch.channels_last
    """Best layout of inputs; `input_dtype` is their best dtype, which float32 is converted to."""

    def __init__(self, network: nn.Module, dtype: torch.dtype, *, is_tf32: bool = False) -> None:
        super().__init__()
        self.network = network
        self.dtype = self.input_dtype = dtype
        self._rounding = tf32 if is_tf32 else nullcontext

    def forward(self, *inputs: Tensor) -> object:
        """Convert the inputs, call the network, and convert its outputs."""
        with self._rounding():
            output = self.network(*(self._recast(x) for x in inputs))
        if self.dtype == torch.float32:
            return output
        return pytree.tree_map_only(Tensor, self._restored, output)

    def fused(self, inputs: Sequence[Tensor]) -> "Recast":
        """Return this network for inputs of these shapes, with fused convolutions: see `fused`."""
        whole = fused(self.network, [self._recast(x) for x in inputs])
        return Recast(whole, self.dtype, is_tf32=self._rounding is tf32).eval()

    def _recast(self, x: Tensor) -> Tensor:
        dtype = self.dtype if x.dtype == torch.float32 else x.dtype
        if x.dim() == 4:
            return x.to(dtype, memory_format=torch.channels_last)
        return x.to(dtype)

    def _restored(self, x: Tensor) -> Tensor:
        return x.float() if x.dtype == self.dtype else x


def prepare(name: str, network: nn.Module, run: Callable[[nn.Module], object]) -> Recast:
    """Return the network of a preset; the given one stays as it is.

    Args:
        name: The preset, neither compiled nor graphed.
        network: The exact network.
        run: Calls the given network with samples of every kind.
    """
    if name not in _MADE_HERE:
        raise ValueError(f"there is no preset {name!r}")
    changed = deepcopy(network)
    if name != "channels_last":
        fold_batch_norms(changed, lambda: run(changed))
    dtype = _LOW_BITS.get(name, torch.float32)
    if dtype != torch.float32:
        correct_biases(changed, dtype, lambda: run(changed))
    changed = changed.to(dtype).to(memory_format=torch.channels_last)
    return Recast(changed, dtype, is_tf32=name == "tf32").eval()


def fold_batch_norms(network: nn.Module, run: Callable[[], object]) -> int:
    """Fold, in place, each batch norm that follows a convolution.

    It runs the network to see which belong together, so it works for any code; the caller verifies
    that the results stay the same.

    Args:
        network: In eval mode, without gradients.
        run: Calls the network once.

    Returns:
        Number of batch norms folded.
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
    """Return the convolutions with the batch norms after them, where each is called only once."""
    outputs: dict[int, tuple[nn.Module, object]] = {}
    """Convolutions by the id of their output, which is kept so that no other gets the id."""
    pairs = []
    num_calls: Counter[nn.Module] = Counter()

    def after(module: nn.Module, arguments: tuple[object, ...], output: object) -> None:
        num_calls[module] += 1
        if isinstance(module, _CONVOLUTIONS):
            outputs[id(output)] = module, output
        elif arguments and id(arguments[0]) in outputs and _is_frozen(module):
            pairs.append((outputs[id(arguments[0])][0], module))

    modules = (m for m in network.modules() if isinstance(m, (*_CONVOLUTIONS, *_NORMS)))
    with _hooked(module.register_forward_hook(after) for module in modules):
        run()
    return [
        (convolution, norm)  # type: ignore[misc]  # the hooks have looked at their types
        for convolution, norm in pairs
        if num_calls[convolution] == num_calls[norm] == 1
    ]


def _is_frozen(norm: nn.Module) -> bool:
    """Return whether it normalises by learnt statistics, not by those of the batch."""
    return isinstance(getattr(norm, "running_mean", None), Tensor) and not norm.training


def correct_biases(network: nn.Module, dtype: torch.dtype, run: Callable[[], object]) -> None:
    """Correct, in place, the biases of a network before its weights are rounded.

    Rounding shifts the mean of each output channel by (W - rounded W) times the mean of the inputs,
    which is large after a rectifier; the bias undoes that shift at no cost. Source: Nagel et
    al., "Data-Free Quantization Through Weight Equalization and Bias Correction" (ICCV 2019),
    section 4.2, but with means of samples.

    Args:
        network: In eval mode, without gradients.
        dtype: Type that weights are going to be rounded to.
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
    """Return the mean of each channel of each layer's input, over samples and places."""
    means: dict[nn.Module, list[Tensor]] = {}

    def before(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].detach()
        x = x.flatten(0, -2) if isinstance(layer, nn.Linear) else x.transpose(1, -1).flatten(0, -2)
        means.setdefault(layer, []).append(x.mean(0))

    layers = (each for each in network.modules() if isinstance(each, _LAYERS))
    with _hooked(layer.register_forward_pre_hook(before) for layer in layers):
        run()
    return {layer: torch.stack(each).mean(0).clone() for layer, each in means.items()}


@contextmanager
def _hooked(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    handles = list(hooks)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
