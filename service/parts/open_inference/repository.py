"""The models of this service as the protocol's repository, which REST and gRPC share.

An operator can unload models and load them again: those that the service was configured with, and
those that were unloaded here. No caller can bring in a model or a setting. Runs in the main
process's event loop.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from inferpool.service.catalog.catalog import Catalog, ModelVersion
from inferpool.service.errors import (
    BadRequestError,
    ServiceError,
    UnavailableError,
    UnknownModelError,
)
from inferpool.service.parts.open_inference.metadata import (
    ModelMetadata,
    ServedConfig,
    ServerMetadata,
    model_config,
    model_metadata,
    server_metadata,
)
from inferpool.service.parts.open_inference.statistics import Statistics, StatisticsList

if TYPE_CHECKING:
    from inferpool.service.parts.swap.changes import Changes
    from inferpool.service.settings.model import ModelSettings

UNLOADED = "unloaded"
_UNLOAD_PARAMETER = "unload_dependents"
_ANSWER_S = 3600.0
"""The longest that a call waits until a model is loaded or unloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexEntry:
    """One version of a model."""

    name: str
    version: str
    state: Literal["READY", "LOADING", "UNAVAILABLE"]
    reason: str = ""
    """Why it is not ready; not there if it is."""


class Repository:
    """Finds versions of models, describes them, and loads and unloads models.

    A version is named by its number as a text; empty names the one that serves.
    """

    def __init__(
        self,
        catalog: Catalog,
        configured: Mapping[str, "ModelSettings"],
        changes: "Changes | None",
    ) -> None:
        """Change nothing yet.

        Args:
            catalog: All versions.
            configured: The models that the service was configured with.
            changes: Loads and unloads models; None if no operator may do that.
        """
        self._catalog = catalog
        self._changes = changes
        self._statistics = Statistics()
        self._absent: dict[str, ModelSettings] = dict(configured)
        """Settings of models that can be loaded if they are not: the last ones that served."""

    @property
    def names(self) -> list[str]:
        """The names of the models that are served."""
        return list(self._catalog.serving)

    def server_metadata(self) -> ServerMetadata:
        """Return what this server is."""
        return server_metadata(has_repository=self._changes is not None)

    def find(self, name: str, version: str = "") -> ModelVersion:
        """Return a version of a model that calls can name.

        Raises:
            UnknownModelError: There is none.
        """
        entries = self._catalog.entries
        found = entries.get(f"{name}/versions/{version}" if version else name)
        if found is not None and found.name == name:
            return found
        if name in self._catalog.serving:
            numbers = ", ".join(str(each.number) for each in self._open_versions(name))
            raise UnknownModelError(
                f"{name} has no version {version[:20]!r} loaded; there are: {numbers}"
            )
        names = ", ".join(self.names) or "none"
        raise UnknownModelError(f"no model is called {name[:80]!r}; there are: {names}")

    def check_ready(self, name: str, version: str = "") -> None:
        """Check that a worker takes calls for a version of a model.

        Raises:
            UnknownModelError: There is none.
            UnavailableError: None does.
        """
        pool = self.find(name, version).pool
        if not pool.is_ready:
            raise UnavailableError(f"{name} is not ready: {pool.reason}", retry_after_s=1)

    def metadata(self, name: str, version: str = "") -> ModelMetadata:
        """Return the metadata of a version of a model.

        Raises:
            UnknownModelError: There is none.
            UnavailableError: No worker of it has been ready yet.
        """
        numbers = [each.number for each in self._open_versions(name)]
        return model_metadata(self.find(name, version), numbers)

    def config(self, name: str, version: str = "") -> ServedConfig:
        """Return the configuration of a version of a model.

        Raises:
            UnknownModelError: There is none.
            UnavailableError: No worker of it has been ready yet.
        """
        return model_config(self.find(name, version))

    def statistics(self, name: str = "", version: str = "") -> StatisticsList:
        """Return the statistics of a version of a model, or of all its versions, or of all models.

        Raises:
            UnknownModelError: There is none.
        """
        if version or not name:
            names = [] if name else self.names
            versions = [each for one in names for each in self._open_versions(one)]
            return self._statistics.of([self.find(name, version)] if name else versions)
        self.find(name)
        return self._statistics.of(self._open_versions(name))

    def index(self, *, ready_only: bool = False) -> Sequence[IndexEntry]:
        """Return all versions of all models, and the models that can be loaded."""
        found = sorted(self._entries(), key=lambda each: (each.name, each.version))
        return [each for each in found if each.state == "READY" or not ready_only]

    def begin_load(self, name: str, parameters: Mapping[str, object]) -> bool:
        """Begin to load a model with the settings that it had; return False if it is loaded.

        Raises:
            BadRequestError: There are parameters: a caller may not say what is loaded.
            UnknownModelError: It is none of the models that can be loaded.
            UnavailableError: It is served, but no worker takes calls for it.
            ConflictError: It is being changed.
        """
        changes = self._changes_of_models()
        for parameter in parameters:
            what = "files" if parameter.startswith("file:") else "a configuration"
            if parameter == "config" or parameter.startswith("file:"):
                raise BadRequestError(
                    f"parameters.{parameter[:80]}: {what} from a caller cannot be loaded; a model "
                    "is loaded with the settings that the service has"
                )
            raise BadRequestError(f"parameters.{parameter[:80]}: is not known")
        if name in self._catalog.serving:
            self.check_ready(name)
            return False
        settings = self._absent.get(name)
        if settings is None:
            raise self._not_loadable(name)
        changes.begin_add({"name": name, **settings.model_dump()})
        return True

    def begin_unload(self, name: str, parameters: Mapping[str, object]) -> bool:
        """Begin to serve a model no longer; return False if it was unloaded.

        Its settings are kept, also for the time after the next start.

        Raises:
            BadRequestError: There are parameters that are not known.
            UnknownModelError: There is no such model.
            ConflictError: It is being changed.
        """
        changes = self._changes_of_models()
        for parameter in parameters:
            if parameter != _UNLOAD_PARAMETER:
                raise BadRequestError(f"parameters.{parameter[:80]}: is not known")
        if name not in self._catalog.serving:
            if name not in self._absent:
                raise self._not_loadable(name)
            return False
        settings = self._catalog.version(name).settings
        changes.begin_remove(name)
        self._absent[name] = settings
        return True

    async def until_changed(self, name: str) -> None:
        """Wait until what `begin_load` or `begin_unload` has begun is done, and all fronts know.

        Raises:
            ServiceError: It came to nothing; says why.
            UnavailableError: It takes longer than an hour, and goes on.
        """
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._changes_of_models().until_decided(name)
                await self._catalog.until_known()
        except TimeoutError:
            raise UnavailableError(f"{name}: it takes long, and goes on") from None

    def _changes_of_models(self) -> "Changes":
        if self._changes is None:
            raise UnavailableError("no model can be loaded or unloaded here: there is no admin key")
        return self._changes

    def _not_loadable(self, name: str) -> ServiceError:
        names = ", ".join(sorted({*self._absent, *self.names})) or "none"
        return UnknownModelError(
            f"{name[:80]!r} is neither served nor configured, and was not unloaded; those that can "
            f"be loaded are: {names}"
        )

    def _open_versions(self, name: str) -> list[ModelVersion]:
        """Return the versions of a model that calls can name."""
        entries = self._catalog.entries
        return [each for each in self._catalog.versions(name) if each.path in entries]

    def _entries(self) -> Iterator[IndexEntry]:
        catalog = self._catalog
        loading = {version.name for version in catalog.loaded.values()}
        for version in catalog.loaded.values():
            pool = version.pool
            if pool.is_ready and version.path in catalog.entries:
                yield IndexEntry(name=version.name, version=str(version.number), state="READY")
                continue
            is_lost = pool.is_lost or pool.has_served
            yield IndexEntry(
                name=version.name,
                version=str(version.number),
                state="UNAVAILABLE" if is_lost else "LOADING",
                reason=pool.reason or "not open to calls",
            )
        if self._changes is None:
            return
        for name in self._absent.keys() - loading:
            number = catalog.newest(name)
            yield IndexEntry(
                name=name, version=str(number or 1), state="UNAVAILABLE", reason=UNLOADED
            )
