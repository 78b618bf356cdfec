"""Tells errors that are for want of memory, on a device or on the host, from others. In workers."""

import errno

import torch

from inferpool.models.errors import RankError
from inferpool.models.texts import chain_of

_MESSAGES = (
    "DefaultCPUAllocator: ",  # c10/core/impl/alloc_cpu.cpp: can't allocate, not enough memory
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",  # cudaErrorMemoryAllocation, after which the context is well
)

_ERRNOS = frozenset(
    (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EAGAIN)
)
"""The kernel lacks something: the same call may succeed another time."""


def lacks_resources(error: BaseException) -> bool:
    """Whether an error, or what it came of, was for want of memory, descriptors or room on a disk.

    Then it is the fault of neither the input nor the model's files, and another try may succeed.
    """
    return any(
        (isinstance(each, OSError) and each.errno in _ERRNOS) or is_out_of_memory(each)
        for each in chain_of(error)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a computation failed for memory, so that a smaller one may succeed."""
    if isinstance(error, RankError):
        return error.is_out_of_memory
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)
