"""The versions and changes of models, as answers of /admin/models show them."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal
from uuid import uuid4

from inferpool.service.api.routes.health import SwapFigures, VersionInfo, VersionState
from inferpool.service.catalog.catalog import ModelVersion
from inferpool.service.errors import InternalError, ServiceError
from inferpool.service.parts.live.events import ChangeEvent
from inferpool.service.settings.model import ModelSettings

logger = logging.getLogger(__name__)

ChangeKind = Literal["add", "remove", "swap", "rollback"]
ChangeState = Literal["going_on", "done", "failed"]
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
_NUM_REMEMBERED = 20
"""Versions of a model that are remembered, and changes."""
_NUM_STEPS = 50
"""Steps of changes that are kept for people to look at."""
_NUM_ABSENT = 100
"""Models that failed to come, and are remembered."""
_USELESS: Sequence[VersionState] = ("refused", "rolled_back")
"""States of versions that are forgotten first: no rollback goes back to them."""
_LEVELS = {"refused": logging.WARNING, "rolled_back": logging.ERROR}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeInfo:
    """A change of a model, and how it went."""

    id: str
    """No other change has it."""
    kind: ChangeKind
    state: ChangeState
    """`going_on` until it is decided; `failed` if it came to nothing, and all is as it was."""
    since: float
    """When it began, in seconds of the Unix epoch."""
    version: int | None = None
    """The version that it loads, or goes back to."""
    code: str = ""
    """The code of the error that it failed with."""
    reason: str = ""
    """Why it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """One model and its versions."""

    name: str
    version: int | None
    """The version that serves; null while the model loads for the first time."""
    ready: bool
    change: str = ""
    """The change that goes on, for a person; empty if there is none."""
    saved: bool = False
    """The next start of the service will serve this version too."""
    versions: Sequence[VersionInfo] = ()
    """The newest first; those that are gone too, as far as they are remembered."""
    changes: Sequence[ChangeInfo] = ()
    """The newest first, since the start of the service, as far as they are remembered."""


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
    served_until: float = 0.0
    """When another version took over, on a clock that is never set."""
    reason: str = ""
    figures: SwapFigures | None = None

    def become(self, state: VersionState, reason: str = "") -> None:
        """Set another state, and show it to people."""
        if self.state == "serving":
            self.served_until = time.monotonic()
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
        """End the wait for its decision with an error, if it is not decided."""
        if not self.decided.done():
            self.decided.set_exception(error)
            self.decided.exception()  # perhaps no caller waits for it


class VersionHistory:
    """The versions and changes of all models, as far as they are remembered."""

    def __init__(self) -> None:
        """Remember nothing yet."""
        self.steps = Steps(maxlen=_NUM_STEPS)
        """The latest steps of changes, the newest first."""
        self._records: dict[str, list[Record]] = {}
        self._ended: dict[str, deque[ChangeInfo]] = {}

    def versions(self, name: str) -> Sequence[Record]:
        """Return the records of a model, the newest version first."""
        return sorted(self._records.get(name, ()), key=lambda each: -each.number)

    def changes(self, name: str) -> Sequence[ChangeInfo]:
        """Return the changes of a model that are over, the newest first."""
        return self._ended.get(name, ())

    def record(self, version: ModelVersion, state: VersionState) -> Record:
        """Return the record of a version; make it in this state if there is none."""
        records = self._records.setdefault(version.name, [])
        for record in records:
            if record.number == version.number:
                return record
        record = Record(
            name=version.name,
            number=version.number,
            settings=version.settings,
            steps=self.steps,
            state=state,
        )
        if len(records) == _NUM_REMEMBERED:  # the serving one, and one to go back to, must stay
            states = [each.state for each in records]
            useless = [states.index(state) for state in _USELESS if state in states]
            del records[min(useless, default=0)]
        records.append(record)
        return record

    def former(self, name: str, number: int) -> Record | None:
        """Return the version that served before the one with this number."""
        earlier = [
            record
            for record in self._records[name]
            if record.number != number and record.state in ("kept", "leaving", "gone")
        ]
        return max(earlier, key=lambda record: record.served_until, default=None)

    def note(self, name: str, change: ChangeInfo, served: Container[str]) -> None:
        """Record the outcome of a change, for callers that have not waited for it.

        Of the models that are not served, those that were changed last are remembered.
        """
        if change.kind == "remove" and change.state == "done":
            self._ended.pop(name, None)
            return
        self._ended.setdefault(name, deque(maxlen=_NUM_REMEMBERED)).appendleft(change)
        absent = [each for each in self._ended if each not in served]
        for each in absent[:-_NUM_ABSENT]:
            del self._ended[each]
            self._records.pop(each, None)

    def forget(self, name: str) -> None:
        """Drop the versions of a model."""
        self._records.pop(name, None)

    def tell_removal(self, name: str) -> None:
        """Log that a model is removed, and make it the newest step."""
        reason = "it is removed; what it has accepted is answered"
        logger.info("%s: %s", name, reason)
        now = round(time.time(), 3)
        self.steps.appendleft(
            ChangeEvent(time=now, model=name, version=None, state="gone", reason=reason)
        )


def why_of(error: BaseException) -> str:
    """Return why a version came to nothing, for a person."""
    if isinstance(error, asyncio.CancelledError):
        return "the service is shutting down"
    return error.message if isinstance(error, ServiceError) else repr(error)
