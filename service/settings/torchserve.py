"""Finds settings in TorchServe's `config.properties`. Every start imports this."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from inferpool.service.settings.platforms import Found


def settings_of_torchserve(
    flags: Mapping[str, str], environ: Mapping[str, str], file: Mapping[str, object], cwd: Path
) -> Iterator[Found]:
    """Yield the settings of the file that the setting `torchserve` names."""
    yield from ()
