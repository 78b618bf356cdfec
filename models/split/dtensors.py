"""What of a tensor plan is left to DTensor: the styles that no shard of ours can stand in for.

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
    """The word of a plan that means the same for a Linear as a style does; None if none does.

    Raises:
        ModelError: It is no style.
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
    """Read what this rank holds of a distributed tensor.

    Args:
        empty: What `apply_styles` made of the parameter.
        read: Gives the part of the stored tensor at an index, one slice for each dimension.
        device: Where it is to lie.
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
    """The bytes of a tensor that this rank holds."""
    return tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes
