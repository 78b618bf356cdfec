"""Descriptions of tensors and devices. Imports no torch, since the front end uses them too."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import msgspec

Kind = Literal["image", "bytes", "json", "tensors", "form", "fields", "document"]
"""Form of a payload: an encoded image, opaque bytes, a JSON value, raw tensors with headers, a form
that is one instance (see `models.upload`), JSON in the place of such a form, or a JSON body that
stands for itself. Models get the last two as "json": files in the one are uploads, and nothing in
the other is decoded."""
Split = Literal["pipeline", "tensor"]
"""How a replica is split over several devices: into stages, or each matrix into parts."""
Decoding = Literal["exact", "fast", "device"]
"""How a model decodes its inputs: as its authors did; fast, with other rounding; or on its device
where that can be done, and exactly elsewhere."""

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
"""Most pixels of one encoded picture, by default: what the largest sensors of phones have. While a
picture is decoded, each pixel takes 4 to 17 bytes: 8 if it is turned, 17 as WebP."""


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The name, dtype and shape of one input or output of a model."""

    name: str
    dtype: str
    """A key of `DTYPE_BYTES`."""
    shape: tuple[int, ...]
    """Sizes with the batch dimension first; -1 for any size. Empty for any shape."""

    @property
    def batch_fault(self) -> str:
        """Complaint about a shape that does not begin with the batch, with the right one; or ""."""
        if not self.shape or self.shape[0] == -1:
            return ""
        right = (-1, *self.shape[self.shape[0] == 1 :])  # a batch of one is what people forget
        return (
            f"the shape of {self.name!r} must begin with -1, which stands for the batch: write "
            f"{list(right)}, not {list(self.shape)}"
        )

    @property
    def instance_shape(self) -> tuple[int, ...]:
        """The shape of one instance: without the batch dimension."""
        return self.shape[1:]


class TextFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a model of texts, for protocols that are about texts."""

    task: Literal["embedding", "reranking", "classification"]
    max_tokens: int
    """Most tokens of a text, with those for its start and end; longer ones are cut."""
    vocab_size: int
    """Ids of tokens are from 0 up to less than this."""
    num_dimensions: int = 0
    """Length of its vectors."""
    pooling: str = ""
    """How vectors of tokens become one."""
    is_multi_label: bool = False
    """A text may have several of the labels."""


class ArchiveFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about an archive of TorchServe's; its handler is built in, or a file of its own."""

    name: str
    version: str
    handler: str


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """How clients speak to a model, where that is not as usual."""

    media_types: tuple[str, ...] | None = ()
    """Types of the content that its answers may be, such as "image/png"; None until known."""
    accepts: Literal["", "image", "bytes"] = ""
    """Kind of a JSON string in the place of an instance, as base64; empty: it is a text."""
    form: Literal["instances", "instance"] = "instances"
    """Each file of a form is an instance, or the whole form is one."""
    envelope: bool = True
    """JSON bodies have `instances`, and answers `predictions`; if not, both stand as they are."""
    path: str = ""
    """A path of its own, besides `/predict/NAME`."""
    streams: bool = False
    """Its answers come in parts."""
    joins: bool = False
    """Streams may begin while others are under way."""
    alone: bool = False
    """Its parts are those of one instance, so that batches of one suit it."""
    labels: tuple[str, ...] = ()
    """Names of the classes that it tells apart, by their index."""
    text: TextFacts | None = None
    """Facts about it if it is a model of texts."""
    archive: ArchiveFacts | None = None
    """Facts about it if it is an archive."""

    @property
    def is_usual(self) -> bool:
        """True if clients speak to it as usual; what it does with inputs makes no difference."""
        return msgspec.structs.replace(self, labels=(), text=None, archive=None) == USUAL_INTERFACE


USUAL_INTERFACE = Interface()
UNKNOWN_INTERFACE = Interface(media_types=None)
"""The interface of a model whose workers are not ready yet."""


class TensorHeader(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The place of one tensor in a payload: row-major, little-endian, no padding.

    The names and the layout are those of the safetensors header.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the payload."""

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


class RankPart(msgspec.Struct, frozen=True):
    """The part of a network that one rank holds."""

    rank: int
    num_bytes: int
    """Parameters and buffers, counted in the rank's own process."""
    text: str
    """A description for a person: "layer3 to fc", "1/2 of each of 36 matrices"."""


class SplitReport(msgspec.Struct, frozen=True):
    """How a network was split; a restarted replica is given it."""

    cuts: tuple[str, ...] = ()
    """Submodules that the stages of a pipeline begin with, but for the first stage."""
    note: str = ""
    """The reason, for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Devices that one replica runs on, and the host's cores that go with them."""

    devices: tuple[str, ...]
    """Names that torch uses inside the worker: ("cpu",), ("cuda:0",). A split replica has one for
    each rank, in order: ("cuda:0", "cuda:1"), ("cpu", "cpu")."""
    split: Split | None = None
    """How the replica is split; None if it lies on one device."""
    visible: tuple[str, ...] = ()
    """UUIDs of the GPUs that a process may see, in order; `devices` counts them. Empty on CPUs."""
    cpus: tuple[int, ...] = ()
    """Cores for all processes of the replica; empty leaves the affinity as it is."""
    num_threads: int = 1
    """Intra-op threads of torch in each process."""
    memory_fraction: float | None = None
    """Part of the GPU's memory that torch may allocate in each process; None for all of it."""

    @property
    def num_ranks(self) -> int:
        """Processes of the replica: one for each device."""
        return len(self.devices)

    @property
    def num_at_once(self) -> int:
        """Batches computed at once, so that all stages of a pipeline are busy.

        With many stages, the pieces of a few batches suffice, and fewer are lost with a process.
        """
        return min(self.num_ranks, _MOST_AT_ONCE) if self.split == "pipeline" else 1

    @property
    def gpu_of_each_rank(self) -> list[str]:
        """UUIDs of the GPUs in the order of the ranks; empty on CPUs."""
        if not self.visible:
            return []
        return [self.visible[int(device.partition(":")[2])] for device in self.devices]

    def for_rank(self, rank: int) -> "Placement":
        """Return the placement of one rank's process: its own device, with all of them visible.

        On CPUs a rank gets its share of the cores; beside a GPU, all cores near it.
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
        """Name of each rank's device for people on this host."""
        kind = self.devices[0].partition(":")[0]
        return [f"{kind}:{uuid}" for uuid in self.gpu_of_each_rank] or list(self.devices)

    def __str__(self) -> str:
        """Name the devices for people on this host."""
        return "+".join(self.names)


def matches(shape: Sequence[int], pattern: Sequence[int]) -> bool:
    """Return whether a shape fits a pattern; -1 in the pattern stands for any size."""
    return len(shape) == len(pattern) and all(
        want in (-1, got) for got, want in zip(shape, pattern, strict=True)
    )
