"""What an operator can do to a running service. Lives in the event loop."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from service.api.errors import NotFoundError
from service.errors import ConflictError, UnknownModelError
from service.pool import Pool

logger = logging.getLogger(__name__)


class Operations:
    """Drains and restarts; owns the restarts that are under way."""

    def __init__(
        self,
        pools: Mapping[str, Pool],
        *,
        grace_s: float,
        drain: Callable[[bool], bool],
        settings_json: Callable[[], str],
    ) -> None:
        """Act on pools.

        Args:
            pools: By model; looked up anew each time.
            grace_s: How long a worker may take to finish what it holds.
            drain: Turns readiness red, or green again; False where that is no longer possible.
            settings_json: The settings in force.
        """
        self.settings_json = settings_json
        self._pools = pools
        self._grace_s = grace_s
        self._drain = drain
        self._restarts: dict[str, asyncio.Task[None]] = {}

    def set_draining(self, is_draining: bool) -> None:
        """See `AdminTarget`."""
        if not self._drain(is_draining):
            raise ConflictError("the service is shutting down")

    def restart(self, model: str, slot: int | None) -> Sequence[str]:
        """See `AdminTarget`."""
        pool = self._pools.get(model)
        if pool is None:
            names = ", ".join(self._pools) or "none"
            raise UnknownModelError(f"no model is called {model[:80]!r}; there are: {names}")
        slots = [each for each in pool.slots if slot is None or each.id.slot == slot]
        if not slots:
            raise NotFoundError(f"{model} has {len(pool.slots)} workers, counted from 0")
        if model in self._restarts:
            raise ConflictError(f"workers of {model} are being restarted")
        task = asyncio.create_task(pool.replace(slots, self._grace_s), name=f"restart {model}")
        self._restarts[model] = task
        task.add_done_callback(lambda _: self._restarts.pop(model, None))
        return [each.id.worker for each in slots]

    async def stop(self) -> None:
        """Begin no further restart."""
        tasks = list(self._restarts.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
