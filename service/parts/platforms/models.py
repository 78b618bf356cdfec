"""`/models` of a multi-model endpoint of SageMaker. Runs in the main process's event loop.

Source: AWS, "Custom Containers Contract for Multi-Model Endpoints". The platform has put a model
into a folder before it asks; nothing outside of that folder is read, and no link is followed.
"""

import asyncio
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response

from inferpool.models.attached import attached
from inferpool.service.catalog.catalog import Catalog
from inferpool.service.errors import (
    BadRequestError,
    ConflictError,
    InvalidInputError,
    UnknownModelError,
)
from inferpool.service.parts.admin.bodies import body_of, object_in
from inferpool.service.parts.platforms.sagemaker import served_name
from inferpool.service.parts.swap.changes import Changes
from inferpool.service.settings.names import SettingsError

_MAX_BODY_BYTES = 64 * 1024
_MAX_NAME_CHARS = 1024
_MOST_FILES = 10_000
"""Files of a folder that are looked at for links."""
_PAGE = 100
"""Models in one answer, unless the call asks for another number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """A model that SageMaker has had loaded, in its words."""

    name: str
    url: str

    def shown(self) -> dict[str, str]:
        """Return it as answers have it."""
        return {"modelName": self.name, "modelUrl": self.url}


def models_router(folder: str, catalog: Catalog, changes: Changes) -> APIRouter:
    """Return the routes.

    Args:
        folder: The folder that all models lie below.
        catalog: The models that are served.
        changes: Loads and unloads them.
    """
    router = APIRouter(prefix="/models", tags=["sagemaker"])
    loaded: dict[str, _Loaded] = {}

    def find(model: str) -> _Loaded:
        key = served_name(model)
        if key not in catalog.serving:
            raise UnknownModelError(f"no model is called {model[:80]!r}; POST /models loads one")
        return loaded.get(key) or _Loaded(name=model, url=folder)

    @router.post("", summary="Load a model that SageMaker has put into its folder")
    async def load(request: Request) -> Response:
        """The body is {"model_name": ..., "url": the folder}; answers once the model is ready."""
        asked = _read(object_in(await body_of(request, most_bytes=_MAX_BODY_BYTES)))
        key = served_name(asked.name)
        if key in catalog.serving:
            raise ConflictError(f"there is a model {asked.name!r} already")
        source = await asyncio.to_thread(_source_of, asked.url, folder)
        changes.begin_add({"name": key, "source": source, "ephemeral": True})
        await changes.until_decided(key)
        for gone in loaded.keys() - catalog.serving.keys():
            del loaded[gone]
        loaded[key] = asked
        return _json({"status": "Workers scaled"})

    @router.get("", summary="The models that are loaded")
    async def list_loaded(
        limit: Annotated[int, Query(ge=1, le=1000)] = _PAGE,
        next_page_token: Annotated[int, Query(ge=0, le=10**6)] = 0,
    ) -> Response:
        """In pages, as SageMaker reads them."""
        names = list(catalog.serving)
        page = names[next_page_token : next_page_token + limit]
        shown = [(loaded.get(name) or _Loaded(name=name, url=folder)).shown() for name in page]
        rest = {"nextPageToken": str(end)} if (end := next_page_token + limit) < len(names) else {}
        return _json({**rest, "models": shown})

    @router.get("/{model}", summary="One model that is loaded")
    async def show_loaded(model: str) -> Response:
        """404 if it is not loaded."""
        return _json(find(model).shown())

    @router.delete("/{model}", summary="Unload a model")
    async def unload(model: str) -> Response:
        """Answers once the model serves no longer."""
        key = served_name(model)
        find(model)
        changes.begin_remove(key, ephemeral=True)
        await changes.until_decided(key)
        loaded.pop(key, None)
        return _json({"status": f'Model "{model}" unregistered'})

    return router


def _json(document: Mapping[str, object]) -> Response:
    return Response(msgspec.json.encode(document), media_type="application/json")


def _read(body: Mapping[str, object]) -> _Loaded:
    name, url = body.get("model_name"), body.get("url")
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_CHARS:
        raise BadRequestError("model_name: must be a text")
    if not isinstance(url, str) or not 0 < len(url) <= _MAX_NAME_CHARS:
        raise BadRequestError("url: must be the path of a folder")
    return _Loaded(name=name, url=url)


def _source_of(url: str, folder: str) -> str:
    """Return the source of the model in a folder below the folder of all models.

    Raises:
        InvalidInputError: It is elsewhere, has a link in it, or has no model.
        UnknownModelError: There is no such folder.
    """
    path, base = Path(url), Path(folder)
    if ".." in path.parts or "\0" in url or not path.is_relative_to(base) or path == base:
        raise InvalidInputError(f"url: {url[:200]!r} is not a folder below {folder}")
    place = base
    for name in path.relative_to(base).parts:
        place /= name
        _check_folder(place, url)
    _check_links(path)
    try:
        return str(attached("source in a folder")(path, "url"))
    except SettingsError as error:
        raise InvalidInputError(str(error)) from error
    except OSError as error:
        raise InvalidInputError(f"url: {url[:200]!r} cannot be read: {error.strerror}") from error


def _check_folder(place: Path, url: str) -> None:
    try:
        mode = place.lstat().st_mode
    except (OSError, ValueError):
        raise UnknownModelError(f"url: there is no folder {url[:200]!r}") from None
    if not stat.S_ISDIR(mode):
        raise InvalidInputError(f"url: {place} is not a folder; links are not followed")


def _check_links(folder: Path) -> None:
    num = 0
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            num += 1
            mode = os.lstat(os.path.join(root, name)).st_mode
            if num > _MOST_FILES or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                what = (
                    f"more than {_MOST_FILES} files" if num > _MOST_FILES else f"a link, {name!r}"
                )
                raise InvalidInputError(f"url: {folder} has {what} in it, and is not loaded")
