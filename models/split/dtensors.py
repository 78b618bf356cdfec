"""The styles of a tensor plan that no shard of ours can stand in for: they are left to DTensor.

Imported only where a plan has such a style, since DTensor takes seconds to import.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from inferpool.models.errors import ModelError


def word_for(style: object, module: nn.Module) -> str | None:
    """Return a plan's word for the style of a Linear; None if it has none.

    Raises:
        ModelError: The plan has something that is no style.
    """
    if not isinstance(style, ParallelStyle):
        raise ModelError(
            f"tensor_plan: {style!r} is neither a word nor a style of "
            "torch.distributed.tensor.parallel"
        )
    if type(module) is not nn.Linear or not getattr(style, "use_local_output", False):
        return None
    assert isinstance(style, ColwiseParallel | RowwiseParallel)
    layouts = (style.input_layouts, style.output_layouts)
    if type(style) is ColwiseParallel and layouts == ((Replicate(),), (Shard(-1),)):
        return "column"
    if type(style) is ColwiseParallel and layouts == ((Replicate(),), (Replicate(),)):
        return "gather"
    if type(style) is RowwiseParallel and layouts == ((Shard(-1),), (Replicate(),)):
        return "row"
    return None


def apply_styles(network: nn.Module, styles: Mapping[str, object], device: str, size: int) -> None:
    """Apply styles to the submodules of those names; the weights are to be read afterwards."""
    mesh = init_device_mesh(device, (size,))
    for name, style in styles.items():
        assert isinstance(style, ParallelStyle)
        parallelize_module(network.get_submodule(name), mesh, style, src_data_rank=None)


def read_local(empty: Tensor, read: Callable[..., Tensor], device: torch.device) -> DTensor:
    """Read the part that this rank holds of a distributed tensor.

    Args:
        empty: A parameter as `apply_styles` has left it.
        read: Returns the part of the stored tensor at an index, one slice for each dimension.
        device: Where to put it.
    """
    assert isinstance(empty, DTensor)
    mesh, placements = empty.device_mesh, empty.placements
    shape, offset = compute_local_shape_and_global_offset(empty.shape, mesh, placements)
    index = [slice(begin, begin + n) for begin, n in zip(offset, shape, strict=True)]
    local = read(*index).to(device, empty.dtype)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=empty.shape, stride=empty.stride()
    )


def local_bytes(tensor: Tensor) -> int:
    """Count the bytes of a tensor that this rank holds."""
    return tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes
