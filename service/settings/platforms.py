"""Finds settings in the variables that platforms give a container. Every start imports this."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

Found = tuple[Mapping[str, object], str] | tuple[Mapping[str, object], str, Sequence[str]]
"""A table of settings as in a file, its origin ("file PATH" or "environment VAR"), and warnings."""


def settings_of_platform(
    flags: Mapping[str, str], environ: Mapping[str, str], file: Mapping[str, object], cwd: Path
) -> Iterator[Found]:
    """Yield the settings that variables of a platform give."""
    yield from ()
