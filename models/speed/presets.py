"""What each preset does to a network. Worker processes only."""

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from inferpool.models.speed.correction import correct_biases
from inferpool.models.speed.folding import fold_batch_norms
from inferpool.models.speed.graphs import Graphed
from inferpool.models.speed.names import GRAPHED

_LOW_BITS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def presets_for(network: nn.Module, device: torch.device) -> list[str]:
    """The presets that can make sense for a network on a device, in the order to try them."""
    modules = tuple(network.modules())
    names = []
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in modules):
        names.append("folded")
    elif any(isinstance(module, nn.Conv2d) for module in modules):
        names.append("channels_last")  # which `folded` has in it
    if device.type == "cuda":
        return [*names, "bf16", "fp16"]
    # Without the instructions it would be emulated, and slower.
    has_bf16 = device.type == "cpu" and (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )
    return [*names, "bf16"] if has_bf16 else names


def can_be_changed(network: object) -> bool:
    """Whether presets know what to do with it: a network in float32 that is Python's to call."""
    if not isinstance(network, nn.Module) or isinstance(network, torch.jit.ScriptModule):
        return False
    floats = {p.dtype for p in network.state_dict().values() if p.is_floating_point()}
    return floats == {torch.float32}


class Recast(nn.Module):
    """Calls a network with its inputs in the form that it wants; its outputs come in float32."""

    memory_format = torch.channels_last
    """What inputs are best made in."""

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.network = network
        self.dtype = dtype

    def forward(self, *inputs: Tensor) -> object:
        """Recast, call, and recast."""
        output = self.network(*(self._recast(x) for x in inputs))
        if self.dtype == torch.float32:
            return output
        return pytree.tree_map_only(Tensor, self._restored, output)

    def _recast(self, x: Tensor) -> Tensor:
        dtype = self.dtype if x.dtype == torch.float32 else x.dtype
        if x.dim() == 4:
            return x.to(dtype, memory_format=torch.channels_last)
        return x.to(dtype)

    def _restored(self, x: Tensor) -> Tensor:
        return x.float() if x.dtype == self.dtype else x


def prepare(name: str, network: nn.Module, run: Callable[[nn.Module], object]) -> nn.Module:
    """Make the network of a preset; the one given stays as it is.

    Args:
        name: The preset.
        network: The exact one.
        run: Computes samples of every kind with the network that it is given.
    """
    if name in GRAPHED:
        return Graphed(prepare(GRAPHED[name], network, run)).eval()
    if name not in ("channels_last", "folded", *_LOW_BITS):
        raise ValueError(f"there is no preset {name!r}")
    changed = deepcopy(network)
    if name != "channels_last":
        fold_batch_norms(changed, lambda: run(changed))
    dtype = _LOW_BITS.get(name, torch.float32)
    if dtype != torch.float32:
        correct_biases(changed, dtype, lambda: run(changed))
    return Recast(changed.to(dtype).to(memory_format=torch.channels_last), dtype).eval()
