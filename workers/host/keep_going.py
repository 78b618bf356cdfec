"""Keeps whatever watches as long as the service runs from being ended by one error."""

import logging
import time
from types import TracebackType

import psutil

logger = logging.getLogger(__name__)

_QUIET_S = 60.0


class KeepGoing:
    """A context for one round of a watch: an error ends the round, and is logged once a minute.

    Put the pause between two rounds outside of it. It lets pass what is no `Exception`, such as the
    end of a task.
    """

    def __init__(self, name: str) -> None:
        """Log nothing yet.

        Args:
            name: What watches, for the log.
        """
        self._name = name
        self._quiet_until = 0.0

    def __enter__(self) -> None:
        """Begin a round."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """End it; an error is over with this."""
        if not isinstance(error, Exception):
            return False
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + _QUIET_S
            # The host is short of something, most likely for a moment; all else is our mistake.
            is_foreseen = isinstance(error, OSError | psutil.Error)
            logger.error(
                "%s was disturbed, and goes on: %r",
                self._name,
                error,
                exc_info=None if is_foreseen else error,
            )
        return True
