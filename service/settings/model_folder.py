"""Finds the model in a folder that a platform has filled. Imported if there is such a folder."""

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from inferpool.models.attached import MODEL_FILE_SUFFIXES
from inferpool.models.files.kinds import is_served
from inferpool.models.files.run_folder import is_run
from inferpool.service.settings.loader import FILE_NAME, read_table
from inferpool.service.settings.model_sources import slug
from inferpool.service.settings.names import SettingsError

_MANIFEST = Path("MAR-INF", "MANIFEST.json")
"""A file in each archive of TorchServe's."""
_MOST_SHOWN = 10
_HOW = (
    f"put there one of {', '.join(MODEL_FILE_SUFFIXES)}, the folder of a training run or of "
    f"transformers, or an {FILE_NAME} that names the models"
)


def table_of_uri(uri: str, place: str) -> Mapping[str, object]:
    """Return the settings for the model at a local path, or at a `file:` URL of one.

    Args:
        uri: The path or the URL.
        place: The variable that has it, for errors.

    Raises:
        SettingsError: It is elsewhere, or there is no model.
    """
    parts = urlsplit(uri)
    if parts.scheme == "file":
        uri = unquote(parts.path)
    elif parts.scheme:
        raise SettingsError(
            [
                f"{place}: {uri} is not on this machine, and this service downloads no models: "
                "build the model into the image (FROM inferpool, COPY, and its source as "
                f"INFERPOOL_MODELS__NAME__SOURCE), or mount the bucket and set {place} to its "
                "folder"
            ]
        )
    if not Path(uri).is_dir():
        raise SettingsError([f"{place}: there is no folder {uri}"])
    return table_of_folder(Path(uri), place)


def table_of_folder(folder: Path, place: str) -> Mapping[str, object]:
    """Return the settings for the only model in a folder, or those of a file of settings there.

    Args:
        folder: The folder.
        place: The variable that has it, for errors.

    Raises:
        SettingsError: There is no model, or more than one.
    """
    if (folder / FILE_NAME).is_file():
        return _with_whole_paths(read_table(folder / FILE_NAME, folder, place), folder)
    source = source_in(folder, place)
    return {"models": {slug(source): {"source": source}}}


def source_in(folder: Path, place: str) -> str:
    """Return the source of the only model in a folder.

    Raises:
        SettingsError: There is none, or more than one.
    """
    names = sorted(os.listdir(folder))
    found = [source for source in [_source_at(folder)] if source]
    found = found or [each for name in names if (each := _source_at(folder / name)) is not None]
    if len(found) == 1:
        return found[0]
    if found:
        raise SettingsError(
            [
                f"{place}: {folder} has several models: {_listed(map(os.path.basename, found))}; "
                f"leave one there, or put an {FILE_NAME} there that names them"
            ]
        )
    code = " (inference.py is for SageMaker's toolkits, and is not run here)"
    hint = code if (folder / "code").is_dir() or "inference.py" in names else ""
    what = f"has no model that is served: {_listed(names)}" if names else "is empty"
    raise SettingsError([f"{place}: {folder} {what}{hint}; {_HOW}"])


def _source_at(path: Path) -> str | None:
    """Return the source of the model that a path is; None if it is none."""
    if path.is_file():
        return str(path) if path.name.endswith(MODEL_FILE_SUFFIXES) else None
    if (path / _MANIFEST).is_file():
        return f"torchserve:{path}"
    return str(path) if is_run(path) or is_served(path) else None


def _listed(names: "map[str] | list[str]") -> str:
    every = list(names)
    more = f" and {len(every) - _MOST_SHOWN} more" if len(every) > _MOST_SHOWN else ""
    return ", ".join(every[:_MOST_SHOWN]) + more


def _with_whole_paths(table: Mapping[str, object], folder: Path) -> Mapping[str, object]:
    """Return the table of a file with the paths of models in its own folder, not the current."""
    models = table.get("models")
    if not isinstance(models, Mapping):
        return table
    whole = {}
    for name, model in models.items():
        whole[name] = model
        if isinstance(model, Mapping):
            paths = {
                field: str(folder / text)
                for field in ("source", "weights")
                if isinstance(text := model.get(field), str) and (folder / text).exists()
            }
            whole[name] = {**model, **paths}
    return {**table, "models": whole}
