"""The paths that models have of their own, besides `/predict/NAME`: who has which.

Settings say them, or the classes of models, which are known once a worker is ready.
"""

from collections.abc import Callable, Mapping, MutableMapping
from typing import TypeVar

from inferpool.service.api.exchange import ModelEntry
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.paths import check_path, shared_path
from inferpool.service.settings.settings import Settings
from inferpool.workers.host.engine import WorkerHandle, WorkerId
from inferpool.workers.host.shared_check import Start
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.errors import WorkerStartError

EntryT = TypeVar("EntryT", bound=ModelEntry)


def path_fault(name: str, path: str, loaded: Mapping[int, ModelEntry], root_path: str) -> str:
    """Return why a model may not have a path; empty if it may.

    `loaded` are all versions that are loaded or load, of all models.
    """
    try:
        check_path(path, root_path)
    except ValueError as error:
        return str(error)
    return shared_path(name, path, ((each.name, each.interface.path) for each in loaded.values()))


def starting_if_free(
    start: Start,
    name: str,
    model: ModelSettings,
    loaded: Mapping[int, ModelEntry],
    settings: Settings,
) -> Start:
    """Return a function that starts workers, and refuses a model whose path it may not have.

    Args:
        start: Starts a worker.
        name: The name of the model.
        model: Its settings, which win over its class.
        loaded: See `path_fault`.
        settings: Those of the service.
    """

    async def start_checked(
        id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> WorkerHandle:
        worker = await start(id, config, on_progress)
        path = model.interface_over(worker.ready.interface).path
        if path and (why := path_fault(name, path, loaded, settings.root_path)):
            await worker.stop(0)
            raise WorkerStartError(
                f"its path {path!r} {why}; set another path for it, or an empty one",
                permanent=True,
            )
        return worker

    return start_checked


def open_own_paths(entries: MutableMapping[str, EntryT]) -> None:
    """Have each version that serves answer at its model's own path, and nobody at any other.

    The keys of `entries` are names of models and of versions, and these paths.
    """
    own = {
        version.interface.path: version
        for key, version in entries.items()
        if key == version.name and version.interface.path
    }
    for key in [key for key in entries if key.startswith("/") and key not in own]:
        del entries[key]
    entries.update(own)
