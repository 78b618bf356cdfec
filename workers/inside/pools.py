"""Threads that begin as the one that starts them. Worker processes.

The model's code runs in other threads than `load` did, which may have set what holds for a thread
alone. In torch 2.15 that is: the default device, autocast, CUDA's current device and stream, and
what is kept in context variables (`torch.*.config`, as also decimal's and NumPy's settings). For
the whole process hold the default dtype, deterministic algorithms, the precision of matrix products
and the flags of `torch.backends`; a new thread inherits that tiny numbers are taken as zero. It
gets its number of OpenMP threads with the first operation that asks torch for it, which oneDNN's
don't. Gradients are off everywhere, since all of it runs in inference mode.
"""

import contextvars
import decimal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

_AUTOCAST = ("cpu", "cuda")


def started_pool(num_threads: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads are all there: under load, the host may have none to give any more.

    Each has what is set in the caller's thread now.

    Args:
        num_threads: How many.
        name: What their names begin with.

    Raises:
        RuntimeError: The host has none to give now.
    """
    pool = ThreadPoolExecutor(num_threads, name, _likeness())
    together = threading.Barrier(num_threads)
    for waiting in [pool.submit(together.wait) for _ in range(num_threads)]:
        waiting.result()
    return pool


def _likeness() -> Callable[[], None]:
    """What makes another thread like this one is now."""
    variables = contextvars.copy_context()
    num_threads = torch.get_num_threads()
    device = torch.get_default_device()
    is_autocast_cached = torch.is_autocast_cache_enabled()
    autocast = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in _AUTOCAST
    ]
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def become() -> None:
        for variable, value in variables.items():
            variable.set(value)
        decimal.setcontext(decimal.getcontext().copy())  # which is not the thread's own yet
        torch.set_num_threads(num_threads)
        if device.type != "cpu":  # a default costs each call of a factory some microseconds
            torch.set_default_device(device)
        torch.set_autocast_cache_enabled(is_autocast_cached)
        for kind, is_enabled, dtype in autocast:
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)
        if stream is not None:
            torch.cuda.set_device(stream.device)
            torch.cuda.set_stream(stream)

    return become
