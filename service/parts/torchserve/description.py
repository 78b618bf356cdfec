"""Describes models as TorchServe's Management API does. Runs in the main process's event loop.

The names of fields are those of its `DescribeModelResponse` and `ListModelsResponse`.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any

import psutil

from inferpool.models.errors import SourceError
from inferpool.models.spec import ArchiveFacts
from inferpool.models.torchserve.archive import is_archive, read_facts
from inferpool.service.catalog.catalog import Catalog, ModelVersion
from inferpool.service.parts.torchserve.errors import NO_RESOURCE
from inferpool.service.report import worker_health
from inferpool.service.settings.properties import key_of_model
from inferpool.workers.host.slots import WorkerSlot

MAX_LISTED = 100
"""Models in one answer; TorchServe's `ApiUtils.getModelList`."""
_OF_SEQUENCES = (
    "sequenceMaxIdleMSec", "sequenceTimeoutMSec", "maxNumSequence", "maxSequenceJobQueueSize"
)  # fmt: skip
"""Numbers of its stateful models, which there are none of here."""
_READY = frozenset(["ready", "degraded"])


class ManagementRefusedError(Exception):
    """A call is refused; `kind` is the name of the exception that TorchServe has for it."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message


def no_version(message: str) -> ManagementRefusedError:
    """Return the error for a version that a model does not have."""
    return ManagementRefusedError(404, "ModelVersionNotFoundException", message)


def bad_request(text: str) -> ManagementRefusedError:
    """Return the error for parameters that cannot be used."""
    return ManagementRefusedError(400, "BadRequestException", text)


def conflict(text: str) -> ManagementRefusedError:
    """Return the error for something that does not go with what is served."""
    return ManagementRefusedError(409, "ConflictStatusException", text)


def not_allowed() -> ManagementRefusedError:
    """Return the error for a method that a path does not take."""
    text = "Requested method is not allowed, please refer to API document."
    return ManagementRefusedError(405, "MethodNotAllowedException", text)


def no_resource() -> ManagementRefusedError:
    """Return the error for a path without anything."""
    return ManagementRefusedError(404, "ResourceNotFoundException", NO_RESOURCE)


def key_of_version(name: str, label: str) -> str:
    """Return the name here of a further version of a model, as `load_models` gives it."""
    return key_of_model(f"{name[: 63 - len(label)]}-{label}")


class NamedModels:
    """The models of a catalog by the names and versions that clients of TorchServe know."""

    def __init__(self, catalog: Catalog) -> None:
        """Know the models that are served from the start.

        It reads the manifests of archives, for the time until workers are ready.
        """
        self._catalog = catalog
        self._at_start = frozenset(catalog.settings.models)
        self._facts: dict[str, ArchiveFacts] = {}
        for model in catalog.settings.models.values():
            path = Path(model.source.removeprefix("torchserve:"))
            if is_archive(path):
                with contextlib.suppress(SourceError):
                    facts = read_facts(path)
                    name = str(model.options.get("name") or facts.name)
                    self.remember(model.source, name, facts.version)

    def remember(self, source: str, name: str, label: str) -> None:
        """Remember what an archive is called, until a worker of it says so itself."""
        served = {each.source for each in self._catalog.settings.models.values()}
        self._facts = {key: each for key, each in self._facts.items() if key in served}
        self._facts[source] = ArchiveFacts(name=name, version=label, handler="")

    def name_of(self, version: ModelVersion) -> str:
        """Return the name of a model: its archive's, or its own."""
        archive = self._archive_of(version)
        if archive is None:
            return version.name
        own = (key_of_model(archive.name), key_of_version(archive.name, archive.version))
        return archive.name if version.name in own else version.name

    def label_of(self, version: ModelVersion) -> str:
        """Return the version of a model's archive; the number of ours for other models."""
        archive = self._archive_of(version)
        return archive.version if archive else str(version.number)

    def page(self, limit: int, first: int) -> Mapping[str, object]:
        """Return a page of the models that are served, by name.

        Args:
            limit: Models on the page.
            first: The place of the first of them, among all.
        """
        limit = limit if 0 <= limit <= MAX_LISTED else MAX_LISTED
        first = max(0, first)
        served: dict[str, ModelVersion] = {}
        for each in self._serving():
            served.setdefault(self.name_of(each), each)
        names = sorted(served)
        page = [
            {"modelName": name, "modelUrl": _url_of(served[name])}
            for name in names[first : first + limit]
        ]
        if first + limit > len(names):
            return {"models": page}
        return {"nextPageToken": str(first + limit), "models": page}

    def versions(self, name: str) -> Sequence[ModelVersion]:
        """Return the versions of a model that are loaded; first the one for calls that name none.

        Raises:
            ManagementRefusedError: There is none.
        """
        serving = [each for each in self._serving() if name in (self.name_of(each), each.name)]
        if not serving:
            raise ManagementRefusedError(
                404, "ModelNotFoundException", f"Model not found: {name[:80]}"
            )
        serving.sort(key=lambda each: each.name not in (name, key_of_model(name)))
        beside = [each for one in serving for each in self._catalog.versions(one.name)]
        return [*serving, *(each for each in beside if each not in serving)]

    def version(self, name: str, label: str | None = None) -> ModelVersion:
        """Return a version of a model by the version of its archive; None for the usual one.

        Raises:
            ManagementRefusedError: There is none.
        """
        for version in self.versions(name):
            if label is None or label == self.label_of(version):
                return version
        raise no_version(f"Model version: {label} does not exist for model: {name[:80]}")

    def describe(self, version: ModelVersion) -> object:
        """Return what TorchServe says of a version of a model, as far as it is so here."""
        settings, pool = version.settings, version.pool
        timeout_s = settings.batch_timeout_s
        waiting = pool.dispatcher.num_queued
        on_cpu = not any(map(_is_on_gpu, pool.slots))
        return {
            "modelName": self.name_of(version),
            "modelVersion": self.label_of(version),
            "modelUrl": _url_of(version),
            "runtime": "python",
            "minWorkers": len(pool.slots),
            "maxWorkers": len(pool.slots),
            "batchSize": pool.dispatcher.max_batch_size,
            "maxBatchDelay": int(settings.batch_wait_ms),
            **({} if timeout_s == "auto" else {"responseTimeout": int(timeout_s)}),
            "startupTimeout": int(settings.load_timeout_s),
            "clientTimeoutInMills": 0,
            "parallelType": "",
            "parallelLevel": 0,
            "deviceType": "cpu" if on_cpu else "gpu",
            "continuousBatching": version.interface.joins,
            "useJobTicket": False,
            "useVenv": False,
            "stateful": False,
            **dict.fromkeys(_OF_SEQUENCES, 0),
            "loadedAtStartup": version.name in self._at_start,
            "workers": [_worker(slot) for slot in pool.slots],
            "jobQueueStatus": {
                "remainingCapacity": max(0, pool.dispatcher.max_queue_length - waiting),
                "pendingRequests": waiting,
            },
        }

    def _archive_of(self, version: ModelVersion) -> ArchiveFacts | None:
        return version.interface.archive or self._facts.get(version.settings.source)

    def _serving(self) -> Iterator[ModelVersion]:
        for name in self._catalog.serving:
            yield self._catalog.version(name)


def _url_of(version: ModelVersion) -> str:
    """Return the file of a model without its folder."""
    return PurePath(version.settings.source.removeprefix("torchserve:")).name


def _worker(slot: WorkerSlot) -> Mapping[str, Any]:
    health = worker_health(slot)
    on_gpu = _is_on_gpu(slot)
    began = "" if health.pid is None or health.host else _start_of(health.pid)
    return {
        "id": health.name,
        **({"startTime": began} if began else {}),
        "status": "READY" if health.state in _READY else "UNLOADING",
        "memoryUsage": health.rss_bytes or 0,
        "pid": health.pid or -1,
        "gpu": on_gpu,
        "gpuUsage": health.device if on_gpu else "N/A",
    }


def _is_on_gpu(slot: WorkerSlot) -> bool:
    return slot.config.placement.devices[0] != "cpu"


def _start_of(pid: int) -> str:
    """Return when a process of this host began, in TorchServe's form; empty if it is gone."""
    try:
        began = datetime.fromtimestamp(psutil.Process(pid).create_time(), UTC)
    except psutil.Error:
        return ""
    return began.strftime("%Y-%m-%dT%H:%M:%S.") + f"{began.microsecond // 1000:03}Z"
