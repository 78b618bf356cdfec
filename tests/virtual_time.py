"""An event loop whose clock jumps to the next thing that is due, so that waiting takes no time."""

import asyncio
import selectors
import time
from collections.abc import Coroutine

import pytest


class _Jump(selectors.SelectSelector):
    """Never waits: if nothing is ready, the time that it should wait is added to the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not (ready := super().select(0)):
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
