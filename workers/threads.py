"""Pools of threads in a worker process."""

import threading
from concurrent.futures import ThreadPoolExecutor


def started_pool(num_threads: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads are all there: under load, the host may have none to give any more.

    Raises:
        RuntimeError: It has none to give now.
    """
    pool = ThreadPoolExecutor(num_threads, name)
    together = threading.Barrier(num_threads)
    for waiting in [pool.submit(together.wait) for _ in range(num_threads)]:
        waiting.result()
    return pool
