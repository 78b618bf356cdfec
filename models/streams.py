"""Streams: answers of a model that come in parts. Runs in worker processes only.

A model streams if its `forward` is a generator, or if it has `stream(self, batch)`; either may be
an `async def`. Both get a batch as any `forward` does.

- It may yield the parts of one instance, one by one. Then each call has a batch of one.
- Or each step yields `{position: part}` for a whole batch: positions are the rows of the batch, a
  missing one has no part in this step, and `END` as a part ends that stream. The generator's return
  ends all. It is closed once no stream is left, so that `finally` runs.
- With `joins = True` on its class, `admit(self, batch, positions)` is called between two steps with
  new instances, in the thread of the generator. Positions count on, and are not used again.
- `drop(self, position)`, if there is one, is called between two steps for a stream that nobody
  reads any more. Parts for such a position are ignored. Streams of one instance are closed instead.

A part is a dict of tensors as for a batch of one, which goes through `postprocess` and `render`; or
any value that JSON can show, which goes to the model's own `render` alone, if it has one.
"""

import asyncio
from collections.abc import AsyncIterator
from enum import Enum
from typing import Any

from inferpool.models.base import Model
from inferpool.models.item import Features


class EndOfStream(Enum):
    """The type of `END`."""

    END = "END"


END = EndOfStream.END
"""Part that ends the stream of its position."""


class StreamSteps:
    """The steps of one call of a model's generator, in the thread that computes."""

    def __init__(self, model: Model, batch: Features) -> None:
        """Call the model's generator, which computes nothing yet.

        Raises:
            TypeError: It is no generator.
        """
        has_stream = callable(getattr(type(model), "stream", None))  # not one of a device
        self.method = "stream" if has_stream else "forward"
        found: Any = getattr(model, self.method)(batch)
        self._sync: Any = None
        self._async: Any = None
        if hasattr(found, "__anext__"):
            self._async = found
        elif hasattr(found, "__next__"):
            self._sync = found
        else:
            if asyncio.iscoroutine(found):
                found.close()
            raise TypeError(f"{self.method} must be a generator (it has no `yield` in it)")
        self._loop: asyncio.AbstractEventLoop | None = None

    def next(self) -> object:
        """Compute the next step.

        Raises:
            StopIteration: It was the last one.
        """
        if self._sync is not None:
            return next(self._sync)
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        try:
            return self._loop.run_until_complete(_next_of(self._async))
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """Have the generator's `finally` run, if it is not over, and end its other tasks."""
        try:
            if self._loop is not None:
                self._loop.run_until_complete(_end(self._async))
            elif hasattr(self._sync, "close"):
                self._sync.close()
        finally:
            if self._loop is not None:
                self._loop.close()
                self._loop = None


async def _next_of(steps: AsyncIterator[object]) -> object:
    return await anext(steps)


async def _end(steps: Any) -> None:
    """Close an iterator, if it can be; then cancel all other tasks, as `asyncio.run` does."""
    try:
        if hasattr(steps, "aclose"):
            await steps.aclose()
    finally:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.get_running_loop().shutdown_asyncgens()
