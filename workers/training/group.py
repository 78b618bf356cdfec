"""The ranks of a training run, and their messages. Runs in each rank."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from inferpool.models.accelerator.device import is_accelerator
from inferpool.models.accelerator.kinds import accelerator_of

_TIMEOUT = timedelta(minutes=10)
"""Longest wait for another rank in a collective. A rank that dies ends the wait at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The place of a rank, from torchrun's variables in the environment."""

    rank: int
    num_ranks: int
    local_rank: int
    """Its number on this host."""
    num_local: int

    @property
    def has_several_hosts(self) -> bool:
        """True if not all ranks are on this host."""
        return self.num_local < self.num_ranks

    @classmethod
    def from_environment(cls) -> "RankPlace":
        """Read the variables that torchrun sets."""
        return cls(
            rank=int(os.environ["RANK"]),
            num_ranks=int(os.environ["WORLD_SIZE"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            num_local=int(os.environ["LOCAL_WORLD_SIZE"]),
        )


class RankGroup:
    """All ranks of a run. A single rank is a group, too, and waits for nobody."""

    def __init__(self, place: RankPlace, device: torch.device) -> None:
        self.place = place
        self._device = device
        if place.num_ranks > 1:
            backend = "cpu:gloo"  # figures travel between hosts' memories
            if is_accelerator(device):
                kind = accelerator_of(device.type)
                assert kind is not None, "the device is one of a known kind"
                backend += f",{kind.kind}:{kind.collectives}"
            distributed.init_process_group(backend, timeout=_TIMEOUT)

    @property
    def is_first(self) -> bool:
        """True for the rank that writes files."""
        return self.place.rank == 0

    def wrap(self, network: nn.Module) -> nn.Module:
        """Return a network that averages its gradients over all ranks."""
        if self.place.num_ranks == 1:
            return network
        ids = [self._device.index] if is_accelerator(self._device) else None
        return DistributedDataParallel(network, device_ids=ids, gradient_as_bucket_view=True)

    @property
    def keeps_files(self) -> bool:
        """True for one rank of each host: checkpoints are on all hosts, since any may be lost."""
        return self.place.local_rank == 0

    def share_buffers(self, network: nn.Module) -> None:
        """Copy the buffers of the first rank to all: statistics of norms differ by rank."""
        if self.place.num_ranks > 1:
            for buffer in network.buffers():
                distributed.broadcast(buffer, 0)

    def any(self, *claims: bool) -> list[bool]:
        """Return for each claim whether it is true for any rank."""
        return [bool(value) for value in self._reduced(claims, distributed.ReduceOp.MAX)]

    def sums(self, *values: float) -> list[float]:
        """Return the sum of each value over all ranks, in float64."""
        return self._reduced(values, distributed.ReduceOp.SUM)

    def least(self, value: int) -> int:
        """Return the smallest of the ranks' values."""
        return int(self._reduced((value,), distributed.ReduceOp.MIN)[0])

    def gather(self, value: object) -> list[object]:
        """Return the values of all ranks, by rank: numbers, texts, tensors, lists of them."""
        if self.place.num_ranks == 1:
            return [value]
        values: list[object] = [None] * self.place.num_ranks
        distributed.all_gather_object(values, value)
        return values

    def broadcast(self, value: bytes | None, source: int) -> bytes:
        """Return the bytes that one rank has."""
        if value is not None and self.place.num_ranks == 1:
            return value
        size = torch.tensor([len(value) if value is not None else 0])
        distributed.broadcast(size, source)
        if value is None:
            data = torch.empty(int(size.item()), dtype=torch.uint8)
        else:
            data = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        distributed.broadcast(data, source)
        return data.numpy().tobytes()

    def wait(self) -> None:
        """Wait until all ranks have come here."""
        self.any(False)

    def leave(self) -> None:
        """Leave the group, once nothing is awaited any more."""
        if self.place.num_ranks > 1:
            distributed.destroy_process_group()

    def _reduced(self, values: Sequence[float], how: distributed.ReduceOp.RedOpType) -> list[float]:
        if self.place.num_ranks == 1:
            return [float(value) for value in values]
        reduced: Tensor = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(reduced, how)
        found: list[float] = reduced.tolist()
        return found
