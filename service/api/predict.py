"""The endpoint `/predict` as it is set up: its models, its limits, and who is told of its calls.

`service.api.exchange` tells how a call to it goes.
"""

from collections.abc import Mapping

from inferpool.service.api.auth import Guard
from inferpool.service.api.call import ModelEntry, OnDone, OnFailure, Tracing
from inferpool.service.api.codecs.body import Limits
from inferpool.service.api.cors import Cors
from inferpool.service.api.wire.budgets import UnfinishedRequests
from inferpool.service.api.wire.connections import EdgeLimits
from inferpool.service.errors import UnknownModelError

PREFIX = "/predict"


class Predict:
    """What the calls to `/predict` of one process have in common."""

    def __init__(
        self,
        models: Mapping[str, ModelEntry],
        *,
        default: str | None = None,
        limits: Limits | None = None,
        unfinished: UnfinishedRequests | None = None,
        guard: Guard | None = None,
        cors: Cors | None = None,
        tracing: Tracing | None = None,
        on_done: OnDone | None = None,
        on_failure: OnFailure | None = None,
    ) -> None:
        """Serve models.

        Args:
            models: By the name in the path; looked up anew for each call.
            default: The one that `/predict` without a name means; None where there is none.
            limits: How much a call may ask for.
            unfinished: Counts the bodies that have begun to come.
            guard: Who may call; costs nothing where no key is needed.
            cors: Which pages may call; None: none, but for those of this host.
            tracing: Who traces calls; costs nothing while it is None.
            on_done: For metrics.
            on_failure: For the log.
        """
        self.models = models
        self.default = default
        self.limits = limits or Limits()
        self.unfinished = unfinished or UnfinishedRequests(EdgeLimits().max_unfinished_bytes)
        self.guard = guard if guard and guard.restricts_predict else None
        self.cors = cors
        self.tracing = tracing
        self.on_done = on_done
        self.on_failure = on_failure

    def unknown(self, path: str) -> UnknownModelError:
        """The error for a path that names no model that is served."""
        names = ", ".join(self.models) or "none"
        name = path[len(PREFIX) + 1 :]
        if not name:
            return UnknownModelError(f"no model is the default; name one in the path: {names}")
        return UnknownModelError(f"no model is called {name[:80]!r}; there are: {names}")


def is_predict(path: str) -> bool:
    """Whether a path belongs to this endpoint."""
    return path.startswith(PREFIX) and (len(path) == len(PREFIX) or path[len(PREFIX)] == "/")
