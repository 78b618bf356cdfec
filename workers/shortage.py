"""Out of memory, on a device or on the host: to recognise it, and to get over it. In workers."""

import ctypes
import traceback
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Signature = tuple[tuple[str, torch.dtype, torch.Size], ...]
"""The names, dtypes and shapes of the tensors of one instance."""

_MESSAGES = (
    "DefaultCPUAllocator: ",  # c10/core/impl/alloc_cpu.cpp: can't allocate, not enough memory
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",  # cudaErrorMemoryAllocation, after which the context is well
)
_MAX_SIGNATURES = 256


def is_out_of_memory(error: Exception) -> bool:
    """Whether a computation failed for memory, so that a smaller one may succeed."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)


def release(error: Exception) -> None:
    """Let go of what a failed computation held, also outside of this process.

    Args:
        error: Its traceback has the frames, and they have the tensors.
    """
    traceback.clear_frames(error.__traceback__)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return  # another C library


class SafeSizes:
    """How many instances of each shape could be computed at once when memory ran out."""

    def __init__(self) -> None:
        self._sizes: dict[Signature, int] = {}

    def note(self, signature: Signature, num_rows: int) -> int:
        """That many were too many; returns how many to try from now on."""
        size = max(1, num_rows // 2)
        if signature not in self._sizes and len(self._sizes) >= _MAX_SIGNATURES:
            del self._sizes[next(iter(self._sizes))]
        self._sizes[signature] = min(size, self._sizes.get(signature, size))
        return self._sizes[signature]

    def split(
        self, indices: list[int], features: Sequence[Mapping[str, Tensor] | None]
    ) -> list[list[int]]:
        """The indices in pieces that are known to fit."""
        if not self._sizes or not indices:
            return [indices]
        size = min(self._sizes.get(signature_of(features[i]), len(indices)) for i in indices)
        return [indices[start : start + size] for start in range(0, len(indices), size)]


def signature_of(features: Mapping[str, Tensor] | None) -> Signature:
    """What decides over the memory that an instance takes."""
    if features is None:
        return ()
    return tuple((name, tensor.dtype, tensor.shape) for name, tensor in features.items())
