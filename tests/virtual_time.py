"""An event loop whose clock jumps to the next thing that is due, so that waiting takes no time."""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import TypeVar, TypeVarTuple, Unpack

import pytest

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

_THREAD_LIMIT_S = 30.0
"""How long the clock stands still, at most, for threads that may wait for it themselves."""


class _Jump(selectors.SelectSelector):
    """Waits for threads alone: else the time that it should wait is added to the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.num_threads = 0
        """How many calls the loop's threads have to end before the clock may go on."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        is_waiting = self.num_threads and (timeout is None or timeout > 0)
        if not (ready := super().select(_THREAD_LIMIT_S if is_waiting else 0)):
            assert timeout is not None, "nothing will ever happen"
            self.now += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop for `asyncio.Runner`. Whatever measures time must read its clock."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[_Ts]], _T], *args: *_Ts
    ) -> asyncio.Future[_T]:
        """Call a function in a thread. Its work takes none of the loop's time."""
        future = super().run_in_executor(executor, func, *args)
        self._jump.num_threads += 1
        future.add_done_callback(self._count_down)
        return future

    async def shutdown_default_executor(self, *timeout_s: float) -> None:
        """Wait for the thread that waits for all others."""
        self._jump.num_threads += 1
        await super().shutdown_default_executor(*timeout_s)

    def _count_down(self, _future: asyncio.Future[_T]) -> None:
        self._jump.num_threads -= 1


def run_in_virtual_time(coroutine: Coroutine[object, object, None], limit_s: float = 10.0) -> None:
    """Run a coroutine on a `VirtualLoop`, whose clock is `time.monotonic` meanwhile.

    Args:
        limit_s: How long it may take, by that clock.
    """
    with (
        asyncio.Runner(loop_factory=VirtualLoop) as runner,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(time, "monotonic", runner.get_loop().time)
        runner.run(asyncio.wait_for(coroutine, limit_s))
