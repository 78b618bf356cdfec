"""The endpoint `/predict`: its models, its limits, and who is told of its calls.

`service.api.exchange` handles one call to it.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

from inferpool.service.api.auth import Guard
from inferpool.service.api.call import ModelEntry, OnDone, OnFailure, Tracing
from inferpool.service.api.codecs.body import Limits
from inferpool.service.api.cors import Cors
from inferpool.service.api.wire.budgets import EdgeLimits, UnfinishedRequests
from inferpool.service.errors import UnknownModelError

PREFIX = "/predict"


@dataclass(slots=True, eq=False)
class Predict:
    """Settings that all calls to `/predict` in one process share."""

    models: Mapping[str, ModelEntry]
    """Models by the name in the path; looked up anew for each call."""
    _: KW_ONLY
    default: str | None = None
    """The model of `/predict` without a name."""
    limits: Limits = field(default_factory=Limits)
    unfinished: UnfinishedRequests = field(
        default_factory=lambda: UnfinishedRequests(EdgeLimits().max_unfinished_bytes)
    )
    guard: Guard | None = None
    """Checks keys; None if calls need none."""
    cors: Cors | None = None
    """Pages that may call; None allows only pages of this host."""
    tracing: Tracing | None = None
    """Traces calls; costs nothing if None."""
    on_done: OnDone | None = None
    on_failure: OnFailure | None = None

    def __post_init__(self) -> None:
        """Drop a guard that lets everybody pass, so that it costs nothing."""
        if self.guard is not None and not self.guard.restricts_predict:
            self.guard = None

    def unknown(self, path: str) -> UnknownModelError:
        """Return the error for a path that names no model that is served."""
        names = ", ".join(self.models) or "none"
        name = path[len(PREFIX) + 1 :]
        if not name:
            return UnknownModelError(f"no model is the default; name one in the path: {names}")
        return UnknownModelError(f"no model is called {name[:80]!r}; there are: {names}")


def is_predict(path: str) -> bool:
    """Return whether a path belongs to this endpoint."""
    return path.startswith(PREFIX) and (len(path) == len(PREFIX) or path[len(PREFIX)] == "/")
