"""Recognizes errors of models, lack of memory, and lost devices. Worker processes only."""

import errno
import signal
import sys
import threading
from socket import gaierror

import torch

from inferpool.models.errors import PassesThrough, RankError
from inferpool.models.texts import chain_of

_MESSAGES = (
    "out of memory",  # after "CUDA error: ", "CUDA driver error: ", "HIP error: "; also in NCCL
    "DefaultCPUAllocator: ",  # c10/core/impl/alloc_cpu.cpp: can't allocate, not enough memory
    "_STATUS_ALLOC_FAILED",  # cuBLAS, cuSPARSE, cuSOLVER, and cuDNN before 9
    "_ALLOCATION_FAILED",  # cuDNN 9: CUDNN_STATUS_INTERNAL_ERROR_{HOST,DEVICE}_ALLOCATION_FAILED
    "CUFFT_ALLOC_FAILED",
    "NVJPEG_STATUS_ALLOCATOR_FAILURE",
    "_STATUS_NOT_INITIALIZED",  # a library's handle is made at its first use, and needs memory
    "unable to find an engine to execute",  # torch tries cuDNN's engines until one has the memory
    "Unable to find a valid cuDNN algorithm",
)
"""Parts of messages, in the words of NVIDIA's libraries and of torch.

"_STATUS_NOT_INITIALIZED" has other causes too, such as a lost context. So after an error of this
kind the caller waits for the device, which reports a lost context.
"""

_ERRNOS = frozenset(
    (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EAGAIN)
)
"""Errors of the kernel for lack of a resource: the same call may succeed another time."""


def raised() -> type[BaseException] | tuple[()]:
    """Return what an `except` clause around code of a model must catch: all that it may raise.

    Such errors fail an instance or a load, and no process: also those that are no `Exception`, such
    as what `sys.exit` and asyncio raise, and classes of the model's own. So the clause asks anew
    about each error: `except raised() as error`.
    """
    error = sys.exception()
    if isinstance(error, BaseExceptionGroup):  # raised by tasks of the model's
        is_ours = error.subgroup(PassesThrough) is not None
    elif isinstance(error, KeyboardInterrupt):
        is_ours = _may_be_interrupted()
    else:
        is_ours = isinstance(error, PassesThrough)
    return () if is_ours else BaseException


def _may_be_interrupted() -> bool:
    """Return whether this thread is the one that Ctrl-C interrupts by an exception."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def lacks_resources(error: BaseException) -> bool:
    """Return whether an error or its cause was a lack of memory, descriptors or disk space.

    Then neither the input nor the model's files are at fault, and another try may succeed.
    """
    return any(
        (isinstance(each, OSError) and each.errno in _ERRNOS) or is_out_of_memory(each)
        for each in chain_of(error)
    )


def is_unanswered(error: BaseException) -> bool:
    """Return whether an error or its cause was a service that does not answer for now."""
    return any(
        isinstance(each, ConnectionError | TimeoutError | gaierror) for each in chain_of(error)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a computation lacked memory, so that a smaller one may succeed."""
    if isinstance(error, RankError):
        return error.is_out_of_memory
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)


def is_lost_device(error: BaseException) -> bool:
    """Return whether an error says that a device's context is lost: this process must end."""
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)
