"""Recognizes errors for want of memory, on a device or on the host. Worker processes only."""

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
"""Errors of the kernel for want of a resource: the same call may succeed another time."""


def lacks_resources(error: BaseException) -> bool:
    """Return whether an error or its cause was for want of memory, descriptors or disk space.

    Then neither the input nor the model's files are at fault, and another try may succeed.
    """
    return any(
        (isinstance(each, OSError) and each.errno in _ERRNOS) or is_out_of_memory(each)
        for each in chain_of(error)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a computation failed for memory, so that a smaller one may succeed."""
    if isinstance(error, RankError):
        return error.is_out_of_memory
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)
