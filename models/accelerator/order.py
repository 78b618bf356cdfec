"""Orders the work that several threads and streams queue. Worker processes only."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from inferpool.models.accelerator.device import (
    Device,
    HandOver,
    SideStream,
    current_stream,
    is_accelerator,
    mark_here,
)


class OwnStream:
    """A stream of a device beside those of the threads, for work that they need not wait for.

    For the CPU it is nothing, and none of its methods does anything.
    """

    def __init__(self, device: Device | None = None) -> None:
        """Create a stream of a device (which may initialise it), or of the one in use, if any."""
        if device is None and (stream := current_stream()) is not None:
            device = stream.device
        is_apart = device is not None and is_accelerator(device)
        self._stream = SideStream(device) if is_apart and device is not None else None

    def used(self) -> AbstractContextManager[None]:
        """Use it as this thread's stream in the block."""
        return nullcontext() if self._stream is None else self._stream.in_use()

    def inserted(self) -> AbstractContextManager[None]:
        """Use it as this thread's stream in the block, in order with the thread's other work.

        So what one of the two makes may be used by the other, and freed once that is done.
        """
        return nullcontext() if self._stream is None else self._in_order(self._stream)

    def mark(self) -> HandOver | None:
        """Mark the moment at which the device has done all that this thread has queued until now.

        The thread need not be using this stream. None if nothing was queued yet.
        """
        return None if self._stream is None or current_stream() is None else mark_here()

    def follow(self, marked: HandOver | None, values: Iterable[object] = ()) -> None:
        """Have the device begin this thread's next work after a moment.

        Args:
            marked: The moment.
            values: See `HandOver.take`.
        """
        if marked is not None:
            marked.take(values)

    def finish(self) -> HandOver | None:
        """Wait until the device has done all work of this thread; return that moment.

        Raises:
            torch.AcceleratorError: The device's context is lost, perhaps by an earlier call.
        """
        if (marked := self.mark()) is not None:
            marked.wait()
        return marked

    @contextmanager
    def _in_order(self, stream: SideStream) -> Iterator[None]:
        before, after = self.mark(), None
        try:
            with stream.in_use():
                self.follow(before)
                try:
                    yield
                finally:
                    after = self.mark()
        finally:
            self.follow(after)
