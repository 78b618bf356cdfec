"""Sums and gatherings over the ranks of a replica. Worker processes of split replicas only."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional


class Collectives:
    """What a layer whose matrix lies in parts needs of the other ranks, on the default group.

    All ranks must call the same methods in the same order, with tensors of the same shapes.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.num_done = 0
        """Calls that have returned, for telling whether ranks stand at the same step."""

    def sum(self, part: Tensor) -> Tensor:
        """Add up the parts of all ranks. The result may be `part` itself, overwritten."""
        part = part.contiguous()
        dist.all_reduce(part)
        self.num_done += 1
        return part

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """Put the parts of all ranks side by side, along the last dimension.

        Args:
            part: This rank's; all its dimensions but the last are as in the others'.
            widths: The size of the last dimension in each rank's part.
        """
        widest = max(widths)
        sent = functional.pad(part, (0, widest - part.shape[-1])).contiguous()
        home = sent.device
        if home.type != "cpu" and dist.get_backend() == "gloo":  # it gathers on the CPU only
            sent = sent.cpu()
        parts = sent.new_empty((self.size, *sent.shape))
        dist.all_gather_into_tensor(parts.view(-1), sent.view(-1))  # gloo knows no other shapes
        self.num_done += 1
        parts = parts.to(home)
        return torch.cat(
            [each[..., :width] for each, width in zip(parts, widths, strict=True)], dim=-1
        )


def widths_of(units: int, size: int, per_unit: int = 1) -> list[int]:
    """How wide each rank's part is, if what must stay whole comes in units of `per_unit`.

    The first ranks have one unit more where they do not divide.
    """
    each, rest = divmod(units, size)
    return [(each + (rank < rest)) * per_unit for rank in range(size)]


def bounds_of(widths: Sequence[int], rank: int) -> tuple[int, int]:
    """Where one rank's part begins and ends."""
    begin = sum(widths[:rank])
    return begin, begin + widths[rank]
