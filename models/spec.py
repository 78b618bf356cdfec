"""Values that describe tensors and devices; without torch, for the front end holds them too."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import msgspec

Split = Literal["pipeline", "tensor"]
"""How a replica is split over several devices: by stages, or each of its matrices by parts."""

_MOST_AT_ONCE = 4
"""Batches that a pipeline computes at once."""
DTYPE_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
"""Bytes of one element, by the name that torch gives a dtype (`torch.float32` is "float32")."""


MAX_IMAGE_PIXELS = 50_000_000
"""Of one encoded picture, unless told otherwise: as many as the largest sensors of telephones have.
While a picture is decoded each pixel takes 4 to 17 bytes (WebP most, one that is turned 8)."""


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The name, dtype and shape of one input or output of a model."""

    name: str
    dtype: str
    """A key of `DTYPE_BYTES`."""
    shape: tuple[int, ...]
    """With the batch dimension first; -1 where any length will do. Empty: any shape will do."""

    @property
    def instance_shape(self) -> tuple[int, ...]:
        """The shape of one instance: without the batch dimension."""
        return self.shape[1:]


class TensorHeader(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where one tensor lies in a payload: row-major, little-endian, no padding.

    The names and the layout are those of the safetensors header.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the payload."""

    @property
    def num_bytes(self) -> int:
        """The bytes that the tensor takes."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The devices that one replica runs on, and the host's cores that go with them."""

    devices: tuple[str, ...]
    """As torch names them, seen from the worker: ("cpu",), ("cuda:0",). If it is split there is one
    for each rank, in the order of the ranks: ("cuda:0", "cuda:1"), ("cpu", "cpu")."""
    split: Split | None = None
    """How it is split over them; None where it lies on one."""
    visible: tuple[str, ...] = ()
    """UUIDs for CUDA_VISIBLE_DEVICES, each once: `devices` counts them; empty on CPUs."""
    cpus: tuple[int, ...] = ()
    """The cores to run on, of all its processes; empty leaves the affinity as it is."""
    num_threads: int = 1
    """Intra-op threads of torch, in each of its processes."""
    memory_fraction: float | None = None
    """Of its GPU's memory, the most that torch may allocate in each process; None: all."""

    @property
    def num_ranks(self) -> int:
        """The processes of a replica: one for each device."""
        return len(self.devices)

    @property
    def num_at_once(self) -> int:
        """Batches that it computes at once: as many as keep all stages of a pipeline busy.

        With many stages the pieces of a few batches do that too, and fewer are lost with a process.
        """
        return min(self.num_ranks, _MOST_AT_ONCE) if self.split == "pipeline" else 1

    @property
    def gpu_of_each_rank(self) -> list[str]:
        """UUIDs, in the order of the ranks; empty on CPUs."""
        if not self.visible:
            return []
        return [self.visible[int(device.removeprefix("cuda:"))] for device in self.devices]

    def for_rank(self, rank: int) -> "Placement":
        """What the process of one rank is bound to: its own device, with all `visible` to it.

        On CPUs it has its share of the cores; beside a GPU, all that are near.
        """
        has_share = self.devices[rank] == "cpu"
        start = rank * self.num_threads
        return replace(
            self,
            devices=(self.devices[rank],),
            cpus=self.cpus[start : start + self.num_threads] if has_share else self.cpus,
        )

    @property
    def names(self) -> list[str]:
        """The device of each rank as a person would name it on this host."""
        return [f"cuda:{uuid}" for uuid in self.gpu_of_each_rank] or list(self.devices)

    def __str__(self) -> str:
        """The devices as a person would name them on this host."""
        return "+".join(self.names)


def matches(shape: Sequence[int], pattern: Sequence[int]) -> bool:
    """Whether a shape fits a spec's, in which -1 stands for any length."""
    return len(shape) == len(pattern) and all(
        want in (-1, got) for got, want in zip(shape, pattern, strict=True)
    )
