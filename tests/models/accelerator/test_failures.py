"""Errors for want of memory and of lost devices, in the words of those that raise them."""

import errno
import signal
import subprocess
import sys

import pytest
import torch

from inferpool.models.accelerator.failures import (
    is_lost_device,
    is_out_of_memory,
    lacks_resources,
    raised,
)
from inferpool.models.errors import OutOfStepError, RankError

SHORTAGES = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"),
    MemoryError(),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("GET was unable to find an engine to execute this computation"),
    RuntimeError("CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate`"),
    RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    torch.distributed.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:1331, unhandled cuda error\nncclUnhandledCudaError: "
        "Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
    ),
    RankError(1, "it ran out", is_out_of_memory=True),
]


@pytest.mark.parametrize("error", SHORTAGES, ids=str)
def test_want_of_memory_is_known_by_each_library_s_words(error: Exception):
    assert is_out_of_memory(error)
    assert lacks_resources(error)
    assert not is_lost_device(error)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        ValueError("out of memory"),
        OSError(errno.ENOENT, "No such file or directory"),
    ],
    ids=str,
)
def test_other_errors_are_no_want_of_memory(error: Exception):
    assert not is_out_of_memory(error)
    assert not lacks_resources(error)


def test_a_device_is_lost_by_any_error_of_its_own_but_want_of_memory():
    assert is_lost_device(torch.AcceleratorError("CUDA error: unspecified launch failure"))
    assert not is_lost_device(RuntimeError("CUDA error: unspecified launch failure"))


def test_what_a_model_raises_is_caught_but_not_what_passes_through_its_code():
    class OwnError(BaseException):
        pass

    def caught(error: BaseException) -> bool:
        try:
            raise error
        except raised():
            return True

    assert all(map(caught, (ValueError(), OwnError(), BaseExceptionGroup("a", [OwnError()]))))
    with pytest.raises(OutOfStepError):
        caught(OutOfStepError())
    with pytest.raises(BaseExceptionGroup):
        caught(BaseExceptionGroup("of tasks", [ValueError(), OutOfStepError()]))


def test_ctrl_c_ends_a_program_whose_main_thread_runs_a_model():
    code = """
import time
from inferpool.models.accelerator.failures import raised
try:
    print("runs", flush=True)
    time.sleep(600)
except raised():
    print("caught")
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "runs\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert out == ""
    assert err.splitlines()[-1] == "KeyboardInterrupt"
