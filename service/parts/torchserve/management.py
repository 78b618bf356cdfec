"""TorchServe's Management API: describes, lists and scales models; registers and unregisters them.

It runs in the main process's event loop. A change is one of `Changes`, as those of /admin/models,
but the next start forgets it, as TorchServe does that is started with a file of properties.
"""

import asyncio
import contextlib
import re
from collections.abc import Mapping

from fastapi import Request, Response

from inferpool.service.api.errors import CALL_KEY
from inferpool.service.catalog.catalog import Catalog, ModelVersion
from inferpool.service.errors import RestartFailedError, ServiceError, VersionRefusedError
from inferpool.service.parts.admin.bodies import body_of, object_in
from inferpool.service.parts.admin.routes import record
from inferpool.service.parts.swap.changes import Changes
from inferpool.service.parts.torchserve.description import (
    MAX_LISTED,
    ManagementRefusedError,
    NamedModels,
    bad_request,
    conflict,
    key_of_version,
    no_resource,
    no_version,
    not_allowed,
)
from inferpool.service.parts.torchserve.errors import UNCACHED
from inferpool.service.parts.torchserve.json import pretty
from inferpool.service.parts.torchserve.store import ModelStore
from inferpool.service.settings.properties import key_of_model

MAX_BODY_BYTES = 64 * 1024
_ANSWER_S = 3600.0
"""The longest that a call waits for a change; as for /admin/models."""
_NEXT_PAGE = "next_page_token"
_IN_PROGRESS = "Processing worker updates..."
_AT_ONCE = {"policy": "force", "rollback_s": 0, "ephemeral": True}
"""Options of a change whose result is the same model: nothing is compared with what serves."""
_NUMBER = re.compile(r"-?[0-9]{1,9}")


class Management:
    """Answers the calls of the Management API. The key has been checked before."""

    def __init__(
        self, catalog: Catalog, served: NamedModels, changes: Changes, store: ModelStore
    ) -> None:
        """Answer for the models of a catalog.

        Args:
            catalog: The models.
            served: The same, by names of archives.
            changes: Makes the changes.
            store: Finds the archives that can be registered.
        """
        self._catalog = catalog
        self._served = served
        self._changes = changes
        self._store = store

    async def answer(self, request: Request) -> Response:
        """Answer a call.

        Raises:
            ManagementRefusedError: It is refused, in TorchServe's words.
            ServiceError: It is refused.
        """
        first, *rest = request.scope[CALL_KEY].path.strip("/").split("/")
        if not first:
            raise not_allowed()
        if first == "v1" and len(rest) == 2 and rest[0] == "models":
            return self._readiness(request, rest[1].partition(":")[0])
        if first != "models" or len(rest) > (3 if rest[2:] == ["set-default"] else 2):
            raise no_resource()
        if not rest:
            return await self._on_all(request)
        return await self._on_one(request, rest[0], *rest[1:])

    async def _on_all(self, request: Request) -> Response:
        if request.method == "GET":
            limit, first = _number(request, "limit", MAX_LISTED), _number(request, _NEXT_PAGE, 0)
            return _json(self._served.page(limit, first))
        if request.method == "POST":
            return await self._register(request)
        raise not_allowed()

    async def _on_one(
        self, request: Request, name: str, label: str | None = None, end: str = ""
    ) -> Response:
        if request.method == "GET":
            return self._described(name, label)
        if request.method == "PUT" and end:
            return await self._set_default(request, name, label or "")
        if request.method == "PUT":
            return await self._scale(request, name, label)
        if request.method == "DELETE":
            return await self._unregister(request, name, label)
        raise not_allowed()

    def _readiness(self, request: Request, name: str) -> Response:
        """Answer as KServe's version 1 does, which TorchServe has here too."""
        if request.method != "GET":
            raise not_allowed()
        ready = self._served.version(name).pool.is_ready
        return _json({"name": name, "ready": ready})

    def _described(self, name: str, label: str | None) -> Response:
        if label == "all":
            versions = self._served.versions(name)
        else:
            versions = [self._served.version(name, label)]
        return _json([self._served.describe(each) for each in versions])

    async def _scale(self, request: Request, name: str, label: str | None) -> Response:
        """Load the model again with another number of workers, which then take over."""
        num = _number(request, "min_worker", 1)
        if _number(request, "max_worker", num) < num:
            raise bad_request("max_worker cannot be less than min_worker.")
        if num < 1:
            raise bad_request("min_worker: a model has one worker at least; unregister it instead")
        label = label or request.query_params.get("model_version")
        version = self._served.version(name, label)
        if self._catalog.version(version.name) is not version:
            raise conflict(f"Model version: {label} does not serve; only one that does scales")
        is_patient = _is_true(request.query_params, default=False)
        if is_patient:  # what goes on may be an earlier call to scale
            with contextlib.suppress(ServiceError):
                await self._until_decided(version.name)
            version = self._served.version(name, label)
        replicas = version.settings.replicas  # on each host, if there are several
        if num != (len(version.pool.slots) if replicas == "auto" else replicas):
            self._changes.begin_swap(version.name, {"replicas": num, **_AT_ONCE})
            record(request, f"scale {version.name} to {num} workers")
        own = self._served.label_of(version)
        if not is_patient or not await self._until_decided(version.name, own):
            return _status(_IN_PROGRESS, 202)
        suffix = f", version: {label}" if label else ""
        return _status(f"Workers scaled to {num} for model: {name}{suffix}")

    async def _set_default(self, request: Request, name: str, label: str) -> Response:
        versions = self._served.versions(name)
        wanted = [each for each in versions if label == self._served.label_of(each)]
        if not wanted:
            raise no_version(f"Model version {label} does not exist for model {name}")
        if versions[0] not in wanted:
            record(request, f"default version of {name}: {label}")
            await self._exchange(name, versions[0], wanted[0])
        return _status(f'Default version successfully updated for model "{name}" to "{label}"')

    async def _exchange(self, name: str, usual: ModelVersion, wanted: ModelVersion) -> None:
        """Have another version answer the calls that name none. Both are served all the time."""
        if wanted.name == usual.name:
            self._changes.begin_rollback(usual.name)
            await self._until_decided(usual.name)
            return
        beside = key_of_version(name, self._served.label_of(usual))
        self._changes.begin_add({"name": beside, **_settings_of(usual), "ephemeral": True})
        await self._until_decided(beside)
        try:
            self._changes.begin_swap(usual.name, {**_settings_of(wanted), **_AT_ONCE})
            await self._until_decided(usual.name)
        except ServiceError:
            self._changes.begin_remove(beside, ephemeral=True)
            raise
        with contextlib.suppress(ServiceError):  # it may be scaled meanwhile
            await self._until_decided(wanted.name)
        self._changes.begin_remove(wanted.name, ephemeral=True)
        await self._until_decided(wanted.name)

    async def _register(self, request: Request) -> Response:
        asked = await _parameters(request)
        found = await asyncio.to_thread(self._store.find, asked)
        name, label = found.name, found.label
        key = self._key_of(name, label)
        self._changes.begin_add({"name": key, **found.settings, "ephemeral": True})
        self._served.remember(str(found.settings["source"]), name, label)
        record(request, f"add {key}, which is {found.file} of the model store")
        if not _is_true(asked, default=True) or not await self._until_decided(key, label):
            return _status(_IN_PROGRESS, 202)
        num = len(self._catalog.version(key).pool.slots)
        return _status(f'Model "{name}" Version: {label} registered with {num} initial workers')

    def _key_of(self, name: str, label: str) -> str:
        """Return the name here of a version of a model.

        Raises:
            ManagementRefusedError: It is served already.
        """
        key, own = key_of_model(name), key_of_version(name, label)
        if key not in self._catalog.serving:
            return key
        first = self._catalog.version(key)
        if self._served.name_of(first) != name:
            raise conflict(f"a model is called {key} here already, where names have small letters")
        if own in self._catalog.serving or self._served.label_of(first) == label:
            raise conflict(f"Model version {label} is already registered for model {name}")
        return own

    async def _unregister(self, request: Request, name: str, label: str | None) -> Response:
        version = self._served.version(name, label)
        others = [each for each in self._served.versions(name) if each.name != version.name]
        if others and version is self._served.version(name):
            text = f"Cannot remove default version for model {name}"
            raise ManagementRefusedError(403, "InvalidModelVersionException", text)
        self._changes.begin_remove(version.name, ephemeral=True)
        record(request, f"remove {version.name}")
        await self._changes.until_decided(version.name)
        return _status(f'Model "{name}" unregistered')

    async def _until_decided(self, name: str, label: str = "") -> bool:
        """Wait for a change of a model, but not forever; return whether it is done.

        Raises:
            ServiceError: It has failed.
        """
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._changes.until_decided(name)
                await self._catalog.until_known()
        except TimeoutError:
            return False
        except VersionRefusedError as error:
            text = f"Failed to start workers for model {name}"  # the log says why
            if label:
                text += f" version: {label}"
            raise RestartFailedError(text) from error
        return True


def _settings_of(version: ModelVersion) -> dict[str, object]:
    """Return the settings of a version, for another model: without a path of its own."""
    return {**version.settings.model_dump(), "path": None}


def _json(value: object, status: int = 200) -> Response:
    response = Response(pretty(value), status, media_type="application/json")
    response.raw_headers += UNCACHED
    return response


def _status(text: str, status: int = 200) -> Response:
    return _json({"status": text}, status)


def _number(request: Request, name: str, default: int) -> int:
    """Return a number of the query; what is none counts as the default, as it does there."""
    text = request.query_params.get(name, "")
    return int(text) if _NUMBER.fullmatch(text) else default


def _is_true(parameters: Mapping[str, object], *, default: bool) -> bool:
    return str(parameters.get("synchronous", default)).lower() == "true"


async def _parameters(request: Request) -> Mapping[str, object]:
    """Return the parameters of a call: those of a JSON body, or else of the query."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        return dict(request.query_params)
    return object_in(await body_of(request, most_bytes=MAX_BODY_BYTES))
