"""Starts threads with the same settings as the thread that starts them. Worker processes.

The model's code does not run in the thread that ran `load`, which may have changed settings of its
thread. In torch 2.15 these are the default device, autocast, the accelerator's current device and
stream, and context variables (`torch.*.config`, also the settings of decimal and NumPy). Other
settings belong to the whole process: the default dtype, deterministic algorithms, the precision of
matrix products, and the flags of `torch.backends`. A new thread inherits the flushing of tiny
numbers to zero. Its number of OpenMP threads is set by the first operation that asks torch for it,
which oneDNN's operations do not: to the number that any thread set last. Gradients are off
everywhere, because all threads run in inference mode.

Each thread has OpenMP threads of its own. The threads of a pool may share the number of the thread
that starts them. If each had all of it, they would crowd the cores when they work at the same time.
"""

import contextvars
import decimal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from inferpool.models.accelerator.device import current_stream, use_stream


def started_pool(num_threads: int, name: str, *, shares_openmp: bool = False) -> ThreadPoolExecutor:
    """Return a pool with all threads started, with the settings of the caller's thread.

    They are started now because the host may refuse new threads later, under load.

    Args:
        num_threads: Number of threads.
        name: Prefix of their names.
        shares_openmp: True if they share the caller's number of OpenMP threads. Each has at least
            one. Otherwise each has as many as the caller.

    Raises:
        RuntimeError: The host refuses new threads.
    """
    num_sharing = num_threads if shares_openmp else 1
    pool = ThreadPoolExecutor(num_threads, name, _copied_settings(num_sharing))
    together = threading.Barrier(num_threads)
    for waiting in [pool.submit(together.wait) for _ in range(num_threads)]:
        waiting.result()
    torch.set_num_threads(torch.get_num_threads())  # again the last, for threads of others
    return pool


def _copied_settings(num_sharing: int) -> Callable[[], None]:
    """Return a function that copies the present settings of this thread to another one.

    Args:
        num_sharing: Number of threads that share this one's number of OpenMP threads.
    """
    variables = contextvars.copy_context()
    num_openmp = max(1, torch.get_num_threads() // num_sharing)
    device = torch.get_default_device()
    is_autocast_cached = torch.is_autocast_cache_enabled()
    stream = current_stream()
    kinds = ("cpu",) if stream is None else ("cpu", stream.device.type)
    autocast = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds
    ]

    def become() -> None:
        for variable, value in variables.items():
            variable.set(value)
        decimal.setcontext(decimal.getcontext().copy())  # a copy for this thread
        torch.get_num_threads()  # else the first operation would undo the next line
        torch.set_num_threads(num_openmp)
        if device.type != "cpu":  # a default device slows each tensor factory by some microseconds
            torch.set_default_device(device)
        torch.set_autocast_cache_enabled(is_autocast_cached)
        for kind, is_enabled, dtype in autocast:
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)
        if stream is not None:
            use_stream(stream)

    return become
