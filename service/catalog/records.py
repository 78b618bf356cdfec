"""The versions and changes of models, as answers of /admin/models show them."""

import asyncio
import time
from dataclasses import dataclass, field, replace
from uuid import uuid4

from inferpool.service.api.routes.models import (
    ChangeInfo,
    ChangeKind,
    SwapFigures,
    VersionInfo,
    VersionState,
)
from inferpool.service.errors import InternalError
from inferpool.service.settings.model import ModelSettings


@dataclass(slots=True, kw_only=True)
class Record:
    """The fate of a version."""

    number: int
    settings: ModelSettings
    state: VersionState
    since: float
    reason: str = ""
    figures: SwapFigures | None = None

    def become(self, state: VersionState, reason: str = "") -> None:
        """Come into another state."""
        self.state, self.reason, self.since = state, reason, time.time()

    def info(self) -> VersionInfo:
        """Return it as an answer."""
        return VersionInfo(
            number=self.number,
            state=self.state,
            source=self.settings.source,
            weights=self.settings.weights,
            since=round(self.since, 3),
            reason=self.reason,
            figures=self.figures,
        )


@dataclass(slots=True, kw_only=True)
class Change:
    """One change of a model."""

    kind: ChangeKind
    what: str
    """For people."""
    decided: asyncio.Future[None]
    """Done once the change has taken effect, or failed with the error that says why."""
    version: int | None = None
    """The version that it loads, or goes back to."""
    task: asyncio.Task[None] | None = None
    id: str = field(default_factory=lambda: uuid4().hex)
    since: float = field(default_factory=time.time)

    def info(self) -> ChangeInfo:
        """Return it as an answer."""
        error = self.decided.exception() if self.decided.done() else None
        begun = ChangeInfo(
            id=self.id,
            kind=self.kind,
            state="done" if self.decided.done() else "going_on",
            since=round(self.since, 3),
            version=self.version,
        )
        if error is None:
            return begun
        code = getattr(error, "code", InternalError.code)
        reason = getattr(error, "message", "") or repr(error)
        return replace(begun, state="failed", code=code, reason=reason)

    def fail(self, error: Exception) -> None:
        """Tell who waits that it came to nothing, if it is not decided."""
        if not self.decided.done():
            self.decided.set_exception(error)
            self.decided.exception()  # nobody may be waiting for it
