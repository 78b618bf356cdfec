"""Provides the folder where workers keep what they measure about speed. Runs in the front end."""

import logging
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from inferpool.service.settings.settings import Settings

logger = logging.getLogger(__name__)


class SpeedCache:
    """The cache folder of the settings, or a temporary one if that cannot be used.

    A temporary folder lets the workers of one run share what one of them measures.
    """

    def __init__(self, settings: Settings) -> None:
        self.folder = settings.cache_folder()
        """The folder; None if there is nothing to keep, or no folder can be made."""
        self._temporary: TemporaryDirectory[str] | None = None
        if all(model.speed == "exact" for model in settings.models.values()):
            return
        if self.folder is not None:
            error = _try_to_write(Path(self.folder))
            if error is None:
                return
            text = (
                "the cache folder %s cannot be written (%s): each start will measure speed presets "
                "anew; set cache_dir to another folder, or to none"
            )
            logger.warning(text, self.folder, error.strerror)
        try:
            self._temporary = TemporaryDirectory(prefix="inferpool-", ignore_cleanup_errors=True)
            self.folder = self._temporary.name
        except OSError:
            self.folder = None

    def close(self) -> None:
        """Remove a temporary folder."""
        if self._temporary is not None:
            self._temporary.cleanup()


def _try_to_write(folder: Path) -> OSError | None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        return error
    return None
