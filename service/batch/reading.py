"""Reads inputs ahead in processes of their own, and decodes them where the model does not.

The readers are those of a torch `DataLoader`, forked by a forkserver. What they decode comes in
shared memory, from which the pool copies it once, into the arena that its workers read.
"""

import io
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from inferpool.models.errors import InputError
from inferpool.models.vision.images import decode_image
from inferpool.service.batch.inputs import BatchInput
from inferpool.service.batch.sources import BatchSource

_PREFETCHED = 4
"""Chunks that each reader holds ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedInput:
    """An input as a reader gives it."""

    input: BatchInput
    """Without its data, if there are pixels."""
    tensor: Tensor | None = None
    """The numbers of an .npy file, or a picture as uint8 [H, W, 3]; in shared memory."""


def read_ahead(
    source: BatchSource,
    indices: Sequence[int],
    *,
    num_readers: int,
    chunk: int,
    decodes: bool,
    pins: bool = False,
) -> Iterator[Sequence[DecodedInput]]:
    """Yield the inputs at some indices in chunks, in order.

    Args:
        source: The inputs.
        indices: The ones to read.
        num_readers: Processes that read; 0: this thread does.
        chunk: Inputs that come at once.
        decodes: Turn pictures into pixels.
        pins: Copy tensors to memory from which GPUs copy by themselves.
    """
    several: Mapping[str, object] = {}
    if num_readers:
        several = {
            "multiprocessing_context": get_context("forkserver"),
            "prefetch_factor": _PREFETCHED,
            "worker_init_fn": _begin,
        }
    yield from DataLoader(
        _Readable(source, decodes=decodes),
        batch_size=chunk,
        sampler=indices,
        num_workers=num_readers,
        collate_fn=_as_it_is,
        pin_memory=pins,
        **several,  # type: ignore[arg-type]  # mypy takes them for one type
    )


class _Readable(Dataset[DecodedInput]):
    def __init__(self, source: BatchSource, *, decodes: bool) -> None:
        self._source = source
        self._decodes = decodes

    def __getitem__(self, index: int) -> DecodedInput:
        """Read and decode an input; one that cannot be has an error."""
        found = self._source.read(index)
        try:
            if found.kind == "npy" and not found.error:
                array = np.load(io.BytesIO(found.data), allow_pickle=False)
                tensor = torch.from_numpy(np.ascontiguousarray(array))
            elif found.kind == "image" and not found.error and self._decodes:
                tensor = torch.from_numpy(np.array(decode_image(found.data)))
            else:
                return DecodedInput(input=found)
        except (InputError, ValueError, TypeError, OSError, EOFError) as error:
            return DecodedInput(input=replace(found, data=b"", error=str(error)))
        return DecodedInput(input=replace(found, data=b""), tensor=tensor)


def _begin(_: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends its readers


def _as_it_is(inputs: list[DecodedInput]) -> list[DecodedInput]:
    return inputs
