"""Keeps a watch loop running after an error, and logs such errors once a minute."""

import logging
import time
from types import TracebackType

import psutil

logger = logging.getLogger(__name__)

_QUIET_S = 60.0


class ErrorGuard:
    """Context manager for one round of a watch loop: an `Exception` ends the round, not the loop.

    Errors are logged once a minute. Put the pause between two rounds outside of the context.
    """

    def __init__(self, name: str) -> None:
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
        """End the round, and log its error."""
        if not isinstance(error, Exception):
            return False
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + _QUIET_S
            # The host lacks something for a moment, most likely; any other error is a bug of ours.
            is_expected = isinstance(error, OSError | psutil.Error)
            logger.error(
                "%s was disturbed, and goes on: %r",
                self._name,
                error,
                exc_info=None if is_expected else error,
            )
        return True
