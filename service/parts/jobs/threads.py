"""Runs blocking calls of the store in threads."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def in_thread(
    call: Callable[[*Ts], T], *arguments: *Ts, threads: Executor | None = None
) -> T:
    """Call a function of the store in a thread, to its end even if the caller is cancelled."""
    future = asyncio.get_running_loop().run_in_executor(threads, call, *arguments)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        future.exception()  # else asyncio logs that nobody retrieved it
        raise cancelled
    return future.result()
