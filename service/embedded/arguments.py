"""What Python code says is to be served, as settings: classes become sources."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from inferpool.service.embedded.source import FoundSource, source_of
from inferpool.service.settings.loader import Loaded, load_arguments

ModelClass: TypeAlias = type[object]
"""A subclass of `Model`, or of `torch.nn.Module`."""
Served: TypeAlias = ModelClass | str
"""A class, or a source as the settings name it, such as "torchvision:resnet18"."""
ServedModels: TypeAlias = Served | Mapping[str, Served | Mapping[str, object]]
"""One model; or several by name, each a class, a source, or its settings with its `source`."""


def read_arguments(
    models: ServedModels | None,
    config: str | os.PathLike[str] | None,
    settings: Mapping[str, object],
) -> tuple[Loaded, list[FoundSource]]:
    """Read the settings that Python code gives.

    Args:
        models: What to serve; None: what the file says, or else the packaged classifier.
        config: A file of settings.
        settings: By name; those of a model count for each model.

    Returns:
        The settings, and where the classes are found.

    Raises:
        SettingsError: Something is misspelt, or has a value that cannot be.
        SourceError: Worker processes cannot import a class.
        TypeError: That is nothing that can be served.
    """
    if "models" in settings:
        raise TypeError("models is the first argument, without its name")
    found: list[FoundSource] = []
    arguments: dict[str, object] = {name: _plain(value) for name, value in settings.items()}
    model = None
    if isinstance(models, Mapping):
        arguments["models"] = {name: _table(each, found) for name, each in models.items()}
    elif models is not None:
        model = _source(models, found)
    loaded = load_arguments(arguments, os.environ, Path.cwd(), model=model, file=config)
    return loaded, found


def _table(model: object, found: list[FoundSource]) -> dict[str, object]:
    if not isinstance(model, Mapping):
        return {"source": _source(model, found)}
    table = {str(name): _plain(value) for name, value in model.items()}
    if isinstance(table.get("source"), type):
        table["source"] = _source(table["source"], found)
    return table


def _source(model: object, found: list[FoundSource]) -> str:
    if isinstance(model, str):
        return model
    if not isinstance(model, type):
        raise TypeError(
            f"a {type(model).__name__} cannot be served: give its class, since each worker process "
            "makes one of its own. Arguments of its constructor go into options={...}"
        )
    found.append(source_of(model))
    return found[-1].source


def _plain(value: object) -> object:
    """A value as a file of settings would have it."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value
