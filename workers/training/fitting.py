"""Finds how many images fit into a device's memory at once, before the training begins."""

import copy

import psutil
import torch
from torch import Tensor, nn

from inferpool.models.accelerator.device import free_bytes, is_accelerator, release_memory
from inferpool.models.accelerator.failures import lacks_resources
from inferpool.workers.shared.cgroups import read_limits

_PROBED = 2
"""Images of the pass that is measured: batch norms need more than one."""
_COPIES = 4
"""Sizes of the weights that a training adds: gradients, two moments of Adam, the average."""
_WORK = 1.5
"""Memory of a pass for each byte that it keeps for its way back: the rest is work space and
gradients of what is between layers. Measured for torchvision's ResNets and EfficientNets on CPUs:
1.1 to 1.4."""
_USED = 0.85
"""Share of the free memory that a training may take."""


def most_images(network: nn.Module, edge: int, device: torch.device, num_local: int) -> int:
    """Return how many images of a size this rank can train on at once, at least 0.

    Args:
        network: On its device. Nothing of it is changed.
        edge: Both edges of an image, in pixels.
        device: The device of this rank.
        num_local: Ranks of this host, which share the memory of its CPUs.
    """
    probe = copy.deepcopy(network).train()
    try:
        kept_bytes = _kept_bytes(probe, edge, device)
    except Exception as error:
        if lacks_resources(error):
            return 0
        raise
    finally:
        del probe
        release_memory()
    weights = sum(each.nbytes for each in network.parameters())
    if is_accelerator(device):
        room = free_bytes(device) * _USED
    else:
        left = [psutil.virtual_memory().available, read_limits().memory_left_bytes]
        room = min(each for each in left if each is not None) * _USED / num_local
    return max(0, int((room - _COPIES * weights) / (_WORK * kept_bytes / _PROBED)))


def _kept_bytes(network: nn.Module, edge: int, device: torch.device) -> int:
    """Return the bytes that one pass keeps for its way back."""
    seen: dict[int, int] = {}
    own = {each.untyped_storage().data_ptr() for each in network.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    dtype = next(network.parameters()).dtype
    x_BCHW = torch.zeros(_PROBED, 3, edge, edge, device=device, dtype=dtype)  # noqa: N806 - its axes
    # The pass draws random numbers, which the training is to draw anew.
    devices = [device] if is_accelerator(device) else []
    kind = {"device_type": device.type} if devices else {}
    with (
        torch.random.fork_rng(devices, **kind),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        network(x_BCHW)
    return max(1, sum(seen.values()) + x_BCHW.nbytes)
