"""Finds settings in TorchServe's `config.properties`. Every start imports this."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from inferpool.service.settings.names import PREFIX
from inferpool.service.settings.platforms import Found


def settings_of_torchserve(
    flags: Mapping[str, str], environ: Mapping[str, str], file: Mapping[str, object], cwd: Path
) -> Iterator[Found]:
    """Yield the settings of the file that the setting `torchserve` names."""
    path = flags.get("torchserve") or environ.get(f"{PREFIX}TORCHSERVE") or file.get("torchserve")
    if not isinstance(path, str) or not path:
        return
    from inferpool.service.settings.properties import settings_of

    meaning = settings_of(Path(path), environ, file, cwd)
    yield meaning.table, f"file {path}", meaning.warnings
