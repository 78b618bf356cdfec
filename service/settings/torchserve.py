"""Finds settings in TorchServe's `config.properties`. Every start imports this."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from inferpool.service.settings.names import PREFIX

if TYPE_CHECKING:
    from inferpool.service.settings.platforms import Found


def settings_of_torchserve(
    flags: Mapping[str, str], environ: Mapping[str, str], file: Mapping[str, object], cwd: Path
) -> "Iterator[Found]":
    """Yield the settings of the file that the setting `torchserve` names.

    What `file` has holds against TorchServe's defaults; it also has what a platform says.
    """
    variable = f"{PREFIX}TORCHSERVE"
    places = {"--torchserve": flags, variable: environ, "torchserve": file}
    asked = ((place, table.get(place.removeprefix("--"))) for place, table in places.items())
    place, path = next(((place, path) for place, path in asked if path), ("", None))
    if not isinstance(path, str):
        return
    from inferpool.service.settings.properties import settings_of

    meaning = settings_of(Path(path), environ, file, cwd, place=place)
    yield meaning.table, f"file {path}", meaning.warnings
