"""The versions and changes of models, as answers of /admin/models show them."""

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass, field, replace
from uuid import uuid4

from inferpool.service.api.routes.events import ChangeEvent
from inferpool.service.api.routes.models import (
    ChangeInfo,
    ChangeKind,
    SwapFigures,
    VersionInfo,
    VersionState,
)
from inferpool.service.errors import InternalError, ServiceError
from inferpool.service.settings.model import ModelSettings

logger = logging.getLogger(__name__)

Steps = deque[ChangeEvent]
"""The latest steps of changes of all models, the newest first."""
_SAID = {
    "loading": "loads",
    "comparing": "is compared with the one that serves",
    "serving": "serves",
    "kept": "serves no longer, but stays loaded",
    "leaving": "leaves",
    "gone": "has gone",
    "refused": "is refused",
    "rolled_back": "is rolled back",
}
_LEVELS = {"refused": logging.WARNING, "rolled_back": logging.ERROR}


@dataclass(slots=True, kw_only=True)
class Record:
    """The fate of a version."""

    name: str
    """The name of the model."""
    number: int
    settings: ModelSettings
    steps: Steps = field(repr=False)
    state: VersionState
    since: float = field(default_factory=time.time)
    reason: str = ""
    figures: SwapFigures | None = None

    def become(self, state: VersionState, reason: str = "") -> None:
        """Come into another state, and tell people."""
        self.state, self.reason, self.since = state, reason, time.time()
        self.tell()

    def tell(self) -> None:
        """Log the state, and make it the newest step."""
        why = f": {self.reason}" if self.reason else ""
        level = _LEVELS.get(self.state, logging.INFO)
        logger.log(level, "%s: version %d %s%s", self.name, self.number, _SAID[self.state], why)
        self.steps.appendleft(
            ChangeEvent(
                time=round(self.since, 3),
                model=self.name,
                version=self.number,
                state=self.state,
                reason=self.reason,
            )
        )

    def info(self, progress: str = "") -> VersionInfo:
        """Return it as an answer; `progress` is said where there is no other reason."""
        return VersionInfo(
            number=self.number,
            state=self.state,
            source=self.settings.source,
            weights=self.settings.weights,
            since=round(self.since, 3),
            reason=self.reason or progress,
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


def tell_removal(name: str, steps: Steps) -> None:
    """Log that a model is removed, and make it the newest step."""
    reason = "it is removed; what it has accepted is answered"
    logger.info("%s: %s", name, reason)
    now = round(time.time(), 3)
    steps.appendleft(ChangeEvent(time=now, model=name, version=None, state="gone", reason=reason))


def why_of(error: BaseException) -> str:
    """Return why a version came to nothing, for a person."""
    if isinstance(error, asyncio.CancelledError):
        return "the service is shutting down"
    return error.message if isinstance(error, ServiceError) else repr(error)
