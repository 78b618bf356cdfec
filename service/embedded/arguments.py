"""Turns the arguments of Python code into settings: classes become sources."""

import os
from collections.abc import Mapping
from datetime import date, time
from pathlib import Path
from typing import TypeAlias

from inferpool.service.embedded.source import FoundSource, source_of
from inferpool.service.settings.loader import LoadedSettings, load_arguments
from inferpool.service.settings.names import SettingsError, dotted

ModelClass: TypeAlias = type[object]
"""A subclass of `Model` or of `torch.nn.Module`."""
Served: TypeAlias = ModelClass | str
"""A class, or a source as the settings name it, such as "torchvision:resnet18"."""
ServedModels: TypeAlias = Served | Mapping[str, Served | Mapping[str, object]]
"""One model; or several by name, each a class, a source, or its settings with a `source`."""


def read_arguments(
    models: ServedModels | None,
    config: str | os.PathLike[str] | None,
    settings: Mapping[str, object],
) -> tuple[LoadedSettings, list[FoundSource]]:
    """Read the settings that Python code gives.

    Args:
        models: The models; None: those of the file, or else the packaged classifier.
        config: A file of settings.
        settings: The settings by name. Those of a model apply to each model.

    Returns:
        The settings, and the places of the classes.

    Raises:
        SettingsError: A setting is unknown or invalid.
        SourceError: Worker processes cannot import a class.
        TypeError: `models` is not a class, a source or a mapping of them.
    """
    if "models" in settings:
        raise TypeError("models is the first argument, without its name")
    found: list[FoundSource] = []
    arguments = plain_settings(settings)
    model = None
    if isinstance(models, Mapping):
        if not models:
            raise TypeError("models is empty: name at least one model")
        arguments["models"] = {
            name: _table(str(name), each, found) for name, each in models.items()
        }
    elif models is not None:
        model = _source(models, found)
    loaded = load_arguments(arguments, os.environ, Path.cwd(), model=model, file=config)
    if loaded.settings.cluster_port is not None:
        text = "cluster_port: a program serves on its own host; use `inferpool serve` for a cluster"
        raise SettingsError([text])
    return loaded, found


def plain_settings(
    settings: Mapping[str, object], place: tuple[str, ...] = ()
) -> dict[str, object]:
    """Turn settings from Python code into values that a file of settings could have.

    Args:
        settings: The settings by name.
        place: The table that they are in.

    Raises:
        SettingsError: An option of a model is None, or of a type that no file can have.
    """
    return {
        str(name): _plain(value, (*place, str(name)), name == "options")
        for name, value in settings.items()
    }


def checked_class(model: object) -> ModelClass:
    """Return a class that may be served.

    Raises:
        TypeError: This is not a class.
    """
    if not isinstance(model, type):
        raise TypeError(
            f"a {type(model).__name__} cannot be served: give its class, since each worker process "
            "makes one of its own. Arguments of its constructor go into options={...}"
        )
    return model


def _table(name: str, model: object, found: list[FoundSource]) -> dict[str, object]:
    if not isinstance(model, Mapping):
        return {"source": _source(model, found)}
    table = dict(model)
    if isinstance(table.get("source"), type):
        table["source"] = _source(table["source"], found)
    return plain_settings(table, ("models", name))


def _source(model: object, found: list[FoundSource]) -> str:
    if isinstance(model, str):
        return model
    found.append(source_of(checked_class(model)))
    return found[-1].source


def _plain(value: object, place: tuple[str, ...], is_option: bool) -> object:
    """Return a value as a file of settings would have it."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        items = value.items()
        return {str(key): _plain(each, (*place, str(key)), is_option) for key, each in items}
    if isinstance(value, list | tuple):
        return [_plain(each, place, is_option) for each in value]
    if is_option and not isinstance(value, str | int | float | date | time):
        what = "None" if value is None else f"a {type(value).__name__}"
        raise SettingsError(
            [
                f"{dotted(place)}: {what} cannot be passed to a worker process: give text, a "
                "number, true or false, a list or a dict, or leave it out"
            ]
        )
    return value
