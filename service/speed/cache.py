"""Makes sure at start of the folder where workers keep what they find out about speed.

Runs in the front end.
"""

import logging
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from inferpool.service.settings.settings import Settings

logger = logging.getLogger(__name__)


class SpeedCache:
    """The folder of the settings, or a temporary one, so that in each run only one worker measures.

    That is: where the settings want none, or theirs cannot be written, which is logged.
    """

    def __init__(self, settings: Settings) -> None:
        self.folder = settings.cache_folder()
        """None where there is nothing to keep, or no folder to be had."""
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
        """Remove the folder, if it was for this run alone."""
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
