"""Tensors of instances that are prepared apart from their worker: where they lie in a slot.

The worker and its decoders use it.
"""

import logging
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from inferpool.models.accelerator.device import is_accelerator, pin_in_place
from inferpool.models.base import Model
from inferpool.models.item import Features, Item
from inferpool.models.spec import DTYPE_BYTES, TensorHeader
from inferpool.workers.decoders.ring import laid_out

logger = logging.getLogger(__name__)

_MAX_TENSORS = 64


def decodable(model: Model) -> list[Item]:
    """Return the model's samples that decoders could prepare."""
    return [item for item in (*model.warmup(), *model.encoded_samples()) if item.kind != "tensors"]


def digest_of(model: Model, items: Sequence[Item]) -> tuple[bytes, int]:
    """Prepare items, and return a digest of all tensors, and the bytes of the largest slot.

    A decoder serves only if its digest is that of its worker.

    Raises:
        Exception: The model cannot prepare one of them.
    """
    digest = blake2b(digest_size=16)
    most = 0
    for item in items:
        features = model.preprocess(item)
        headers = in_slot(features, 1 << 40)
        if headers is None:
            return b"", 0
        slot = bytearray(_end_of(headers))
        write_to(memoryview(slot), features, headers)
        digest.update(repr(headers).encode())
        digest.update(slot)
        most = max(most, len(slot))
    return digest.digest(), most


def in_slot(features: Features, slot_bytes: int) -> tuple[TensorHeader, ...] | None:
    """Return where tensors will lie in a slot; None if they are no plain tensors, or too large."""
    if not isinstance(features, Mapping) or not 0 < len(features) <= _MAX_TENSORS:
        return None
    tensors = features.values()
    if not all(isinstance(tensor, Tensor) and _is_plain(tensor) for tensor in tensors):
        return None
    offsets, end = laid_out([tensor.nbytes for tensor in tensors])
    if end > slot_bytes:
        return None
    return tuple(
        TensorHeader(name, _dtype_of(tensor), tuple(tensor.shape), offset)
        for (name, tensor), offset in zip(features.items(), offsets, strict=True)
    )


def write_to(slot: memoryview, features: Features, headers: Sequence[TensorHeader]) -> None:
    """Copy tensors to their places in a slot."""
    for header in headers:
        if header.num_bytes:
            view_in(torch.frombuffer(slot, dtype=torch.uint8), header).copy_(features[header.name])


def view_in(slot: Tensor, header: TensorHeader) -> Tensor:
    """Return a tensor in place in a slot, which is given as uint8 [bytes].

    Raises:
        ValueError: It does not lie in the slot.
    """
    begin, end = header.offset, header.offset + header.num_bytes
    if begin < 0 or end > len(slot) or min(header.shape, default=0) < 0:
        raise ValueError(f"a tensor at {begin} to {end} of a slot of {len(slot)} bytes")
    return slot[begin:end].view(getattr(torch, header.dtype)).view(header.shape)


def pin_ring(device: str, ring: Tensor) -> None:
    """Pin the ring for an accelerator, which then copies from it without a copy on the host."""
    if is_accelerator(device) and not pin_in_place(ring, device):
        logger.warning("the ring of the decoders cannot be pinned: each batch is copied first")


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and _dtype_of(tensor) in DTYPE_BYTES
        and not tensor.is_quantized
    )


def _dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _end_of(headers: Sequence[TensorHeader]) -> int:
    return max((header.offset + header.num_bytes for header in headers), default=0)
