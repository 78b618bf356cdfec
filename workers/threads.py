"""Pools of threads in a worker process."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def started_pool(
    num_threads: int, name: str, begin: Callable[[], object] = lambda: None
) -> ThreadPoolExecutor:
    """A pool whose threads are all there: under load, the host may have none to give any more.

    Args:
        num_threads: How many.
        name: What their names begin with.
        begin: Called by each of them first.

    Raises:
        RuntimeError: It has none to give now.
    """
    pool = ThreadPoolExecutor(num_threads, name, begin)
    together = threading.Barrier(num_threads)
    for waiting in [pool.submit(together.wait) for _ in range(num_threads)]:
        waiting.result()
    return pool
