"""Batches that an accelerator computes while the host does something else. Worker processes."""

import time
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from typing import Any

from inferpool.workers.inside.compute import Computer
from inferpool.workers.inside.preparing import Prepared


class LaunchedBatch:
    """A batch that the device was told to compute. Used by the worker's main thread."""

    def __init__(self, prepared: Prepared, computer: Computer, waiting: Executor) -> None:
        """Launch a batch.

        Args:
            prepared: The batch.
            computer: Launches it.
            waiting: Has a thread that waits for the device.

        Raises:
            torch.AcceleratorError: The device's context is lost.
        """
        self.prepared = prepared
        began = time.monotonic()
        computer.launch(prepared)
        self._launch_s = time.monotonic() - began
        self._over = waiting.submit(computer.wait, prepared)

    def is_before(self, coming: "Future[Prepared | None]") -> bool:
        """Wait until it is over, or the next batch is prepared; return whether it was first.

        If the model waits for the device itself, or takes longer to tell it what to do than that
        takes, the batch is over soon after its launch. Then to launch the next would only delay its
        answers. So it is given the time of its launch once more.

        There is no other timeout: the front end ends a worker whose batch takes too long.
        """
        awaited: set[Future[Any]] = {self._over, coming}
        wait({self._over}, self._launch_s)
        wait(awaited, return_when=FIRST_COMPLETED)
        return self._over.done()

    def wait(self) -> None:
        """Wait until the device is done with it."""
        self._over.result()
