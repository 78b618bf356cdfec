"""The endpoint `/predict`: its models, its limits, and the callbacks for its calls.

`service.api.exchange` handles one call to it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field

from inferpool.service.api.auth import Guard
from inferpool.service.api.call import Call, ModelEntry, OnDone, OnFailure, Tracing
from inferpool.service.api.codecs.body import Limits
from inferpool.service.api.cors import Cors
from inferpool.service.api.preferences import is_async
from inferpool.service.api.wire.budgets import EdgeLimits, Refusals, UnfinishedRequests
from inferpool.service.errors import UnknownModelError
from inferpool.service.queue.shares import owner_of_address

PREFIX = "/predict"
JOBS = "/jobs"
VERSION_HEADER = b"x-model-version"
"""With it a call asks for a version of the model in the path."""
_VERSIONS = "/versions/"


@dataclass(slots=True, eq=False)
class Predict:
    """Settings that all calls to `/predict` in one process share."""

    models: Mapping[str, ModelEntry]
    """Versions of models by the rest of the path: the model's name, or what `path_of` returns.
    They come and go while the service runs."""
    _: KW_ONLY
    default: str | None = None
    """The model of `/predict` without a name."""
    root_path: bytes = b""
    """The path that may stand before all paths of calls over sockets, as in a URL."""
    limits: Limits = field(default_factory=Limits)
    unfinished: UnfinishedRequests = field(
        default_factory=lambda: UnfinishedRequests(EdgeLimits().max_unfinished_bytes)
    )
    refusals: Refusals = field(default_factory=Refusals)
    guard: Guard | None = None
    """Checks keys; None if calls need none."""
    cors: Cors | None = None
    """Pages that may call; None allows only pages of this host."""
    tracing: Tracing | None = None
    """Traces calls; costs nothing if None."""
    on_done: OnDone | None = None
    on_failure: OnFailure | None = None

    def __post_init__(self) -> None:
        """Drop a guard that allows every call, so that it costs nothing."""
        if self.guard is not None and not self.guard.restricts_predict:
            self.guard = None

    @property
    def names(self) -> list[str]:
        """The models that are served."""
        return [path for path in self.models if "/" not in path]

    def owner_of(self, headers: Mapping[bytes, bytes], client: str | None) -> str:
        """Return the owner of the memory that a call takes: its key if known, else its address.

        Args:
            headers: Those of the call.
            client: The address that it comes from.
        """
        if self.guard is not None and self.guard.allows("predict", headers):
            return self.guard.owner_of("predict", headers, client)
        return owner_of_address(client)

    def find(self, call: Call) -> ModelEntry | None:
        """Return the version that a call is for now; None if there is none."""
        name = self._name_in(call)
        return None if name is None else self.models.get(name)

    def find_now(self, call: Call) -> ModelEntry | None:
        """Return the version that computes a call: a canary, if it is the call's turn.

        Calls that name a version get that one.
        """
        name = self._name_in(call)
        entry = None if name is None else self.models.get(name)
        if entry is None or entry.canary is None or name != entry.name:
            return entry
        canary = entry.canary
        return self.models.get(canary.path, entry) if canary.gets(call.request_id) else entry

    def unknown(self, call: Call) -> UnknownModelError:
        """Return the error for a call to a model or version that is not served."""
        names, path = ", ".join(self.names) or "none", self._name_in(call)
        if path is None:
            return UnknownModelError(f"no model is the default; name one in the path: {names}")
        name, asks_for_version, version = path.partition(_VERSIONS)
        if name == self.default and name not in self.models and is_unnamed(call):
            return UnknownModelError(
                f"the default model {name!r} is not served now; name one in the path: {names}"
            )
        if _VERSIONS in version:
            return UnknownModelError(
                "the path asks for one version of the model, and X-Model-Version for another one"
            )
        if asks_for_version and name in self.models:
            prefix = name + _VERSIONS
            there = [each for each in self.models if each.startswith(prefix)]
            numbers = ", ".join(each.removeprefix(prefix) for each in there)
            return UnknownModelError(
                f"{name} has no version {version[:20]!r} loaded; there are: {numbers}"
            )
        return UnknownModelError(f"no model is called {name[:80]!r}; there are: {names}")

    def _name_in(self, call: Call) -> str | None:
        """Return the key in `models` that a call asks for; None if it names nothing."""
        rest = call.path[len(PREFIX) + 1 :]
        name = rest.removesuffix("/") if rest else self.default
        version = call.headers.get(VERSION_HEADER)
        if name is None or version is None:
            return name
        asked_for = f"{_VERSIONS}{version.decode('latin-1')}"
        return name if name.endswith(asked_for) else name + asked_for


def path_of(name: str, version: int) -> str:
    """Return the rest of the path of a version of a model."""
    return f"{name}{_VERSIONS}{version}"


def is_unnamed(call: Call) -> bool:
    """Return whether a call leaves the choice of the model to the service."""
    return len(call.path) <= len(PREFIX) + 1


def is_job(path: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether a call is for the routes of jobs: by its path, or as the client prefers."""
    if path == JOBS or path.startswith(JOBS + "/"):
        return True
    return is_predict(path) and is_async(headers)


def is_predict(path: str) -> bool:
    """Return whether a path belongs to this endpoint."""
    return path.startswith(PREFIX) and (len(path) == len(PREFIX) or path[len(PREFIX)] == "/")
