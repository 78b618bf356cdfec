"""Carries out what an operator asks of a running service. Lives in the event loop."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from inferpool.service.api.errors import NotFoundError
from inferpool.service.catalog.catalog import BusyModels
from inferpool.service.errors import (
    ConflictError,
    RestartFailedError,
    UnavailableError,
    UnknownModelError,
)
from inferpool.service.queue.pool import Pool

logger = logging.getLogger(__name__)

_ANSWER_S = 30.0
"""How long an HTTP call waits for a restart. Many proxies give up after a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpeed:
    """Bandwidth to and from a host of the cluster, beside all else that used the connection."""

    host: str
    to_bytes_per_s: int
    """From the front end to the host."""
    from_bytes_per_s: int
    round_trip_s: float
    """A beat to the host and back, on average."""
    num_bytes: int
    """Bytes that were sent each way."""


class Operations:
    """Drains and restarts; owns the running restarts."""

    def __init__(
        self,
        pools: Mapping[str, Pool],
        busy: BusyModels,
        *,
        grace_s: float,
        drain: Callable[[bool], bool],
        settings_json: Callable[[], str],
        measure_host: Callable[[str], Awaitable[HostSpeed]],
    ) -> None:
        """Prepare to act on pools.

        Args:
            pools: The pools by model, looked up each time.
            busy: Says which models are being changed; none of them is restarted.
            grace_s: How long a worker may take to finish what it holds.
            drain: Turns readiness red or green; returns False during a shutdown.
            settings_json: Returns the settings in force.
            measure_host: Measures the connection to a host.
        """
        self.settings_json = settings_json
        """Returns every setting in force and its origin, without secrets."""
        self.measure_host = measure_host
        """Measures the connection to a host of the cluster."""
        self._pools = pools
        self._busy = busy
        self._grace_s = grace_s
        self._drain = drain
        self._restarts: dict[str, asyncio.Task[None]] = {}
        self._is_ending = False

    def set_draining(self, is_draining: bool) -> None:
        """Turn readiness red, or green again.

        Raises:
            ConflictError: The service is shutting down, which cannot be undone.
        """
        if not self._drain(is_draining):
            raise ConflictError("the service is shutting down")

    def restart(self, model: str, slot: int | None, *, old_first: bool) -> Sequence[str]:
        """Begin to replace one worker of a model, or each in turn if `slot` is None, and name them.

        With `old_first`, each worker leaves before its successor starts.

        Raises:
            UnknownModelError: There is no such model.
            NotFoundError: There is no such worker.
            ConflictError: Workers of the model are being replaced.
        """
        pool = self._pools.get(model)
        if pool is None:
            names = ", ".join(self._pools) or "none"
            raise UnknownModelError(f"no model is called {model[:80]!r}; there are: {names}")
        slots = [each for each in pool.slots if slot is None or each.id.slot == slot]
        if not slots:
            raise NotFoundError(f"{model} has {len(pool.slots)} workers, counted from 0")
        if self._is_ending:
            raise ConflictError("the service is shutting down")
        self._busy.begin(model, "workers of it are being restarted")
        replaced = pool.replacer.replace(slots, self._grace_s, old_first=old_first)
        task = asyncio.create_task(replaced, name=f"restart {model}")
        self._restarts[model] = task
        task.add_done_callback(lambda task: self._on_done(model, task))
        return [each.id.worker for each in slots]

    def retry_lost(self) -> None:
        """Try the models again that have lost all workers.

        A signal asks for it, and the kernel has checked its sender, so it needs no key.
        """
        lost = [name for name, pool in self._pools.items() if pool.is_lost]
        if not lost:
            logger.info("no model to try again: none was given up")
        for name in lost:
            try:
                self.restart(name, None, old_first=False)
            except ConflictError as error:
                logger.warning("%s is not tried again: %s", name, error.message)
            else:
                logger.info("%s is tried again", name)

    async def until_restarted(self, model: str) -> bool:
        """Wait until the restart of a model is over; return False if it takes very long.

        Raises:
            RestartFailedError: A worker could not be replaced.
            UnavailableError: The service was told to stop.
        """
        task = self._restarts.get(model)
        if task is None:
            return True
        done, _ = await asyncio.wait([task], timeout=_ANSWER_S)
        if not done:
            return False
        if task.cancelled():
            raise UnavailableError("the service is shutting down", retry_after_s=1)
        task.result()
        return True

    def end(self) -> None:
        """Start no further restart, and end the running ones; their old workers serve on."""
        self._is_ending = True
        for task in self._restarts.values():
            task.cancel()

    async def stop(self) -> None:
        """End the running restarts, and wait for them."""
        self.end()
        await asyncio.gather(*self._restarts.values(), return_exceptions=True)

    def _on_done(self, model: str, task: asyncio.Task[None]) -> None:
        self._restarts.pop(model, None)
        self._busy.end(model)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, RestartFailedError):
            logger.error("the restart of %s failed", model, exc_info=error)
