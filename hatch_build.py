"""Refuses to build a wheel without code, from a checkout whose links are text files."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDERS = ("service", "workers", "models")


class LinksHook(BuildHookInterface[Any]):
    """Checks the folders of the package before anything is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Check that each folder is there.

        Raises:
            FileNotFoundError: One is missing.
        """
        for folder in _FOLDERS:
            if not Path(self.root, "inferpool", folder, "__init__.py").is_file():
                raise FileNotFoundError(
                    f"inferpool/{folder} must be a symbolic link to {folder}/, and is none in this "
                    "checkout: clone it again with `git clone -c core.symlinks=true`, or install "
                    "from the source distribution"
                )
