"""Tells errors that are for want of memory, on a device or on the host, from others. In workers."""

import torch

from models.errors import RankError

_MESSAGES = (
    "DefaultCPUAllocator: ",  # c10/core/impl/alloc_cpu.cpp: can't allocate, not enough memory
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",  # cudaErrorMemoryAllocation, after which the context is well
)


def is_out_of_memory(error: Exception) -> bool:
    """Whether a computation failed for memory, so that a smaller one may succeed."""
    if isinstance(error, RankError):
        return error.is_out_of_memory
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)
