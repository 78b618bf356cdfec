"""A folder of models that are served as they come and go: `inferpool serve --watch FOLDER`.

Each subfolder is a model, and its numbered subfolders are versions, as Triton and TensorFlow
Serving have them. The highest number serves. Runs in the main process's event loop, and looks at
the files in a thread.
"""

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from inferpool.service.errors import (
    ConflictError,
    ServiceError,
    UnavailableError,
    UnknownModelError,
)
from inferpool.service.parts.swap.changes import Changes
from inferpool.service.parts.swap.requests import read_model
from inferpool.service.parts.watched.versions import (
    FoundVersion,
    find_versions,
    read_version,
    validation_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0


class ModelFolder:
    """Serves what is in a folder. One task looks at it, until it is cancelled."""

    def __init__(self, folder: Path, target: Changes, policy: str) -> None:
        """Read nothing yet; `policy` says how a later version is judged."""
        self._folder = folder
        self._target = target
        self._policy = policy
        self._before: Mapping[str, FoundVersion | OSError] = {}
        self._tried: dict[str, FoundVersion] = {}
        """The version of each model that was begun last, or found to be of no use."""
        self._ours: set[str] = set()
        self._told: dict[str, str] = {}
        """Errors that are in the log, by model; empty for the folder."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look at it."""
        self._task = asyncio.create_task(self.run(), name="watch the folder of models")

    async def stop(self) -> None:
        """Stop reading the folder."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def run(self) -> None:
        """Read the folder again and again."""
        while True:
            try:
                await self.look()
            except Exception:
                logger.exception("%s: this look at it has failed", self._folder)
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Read the folder once, and begin changes for what is as it was in the last reading."""
        try:
            found = await asyncio.to_thread(find_versions, self._folder)
        except OSError as error:  # it may come back, as a network's folder does
            self._tell("", f"{self._folder} cannot be read, so its models stay: {error.strerror}")
            return
        self._told.pop("", None)
        before, self._before = self._before, found
        for name, version in found.items():
            if isinstance(version, OSError):
                if isinstance(before.get(name), OSError):  # not only for a moment
                    self._tell(name, f"{name} stays as it is: {version.strerror}")
            elif before.get(name) == version != self._tried.get(name):
                await self._take(name, version)
        for name in self._ours - found.keys() - before.keys():
            self._remove(name)

    async def _take(self, name: str, version: FoundVersion) -> None:
        is_served = name in self._target.served
        if is_served and name not in self._ours:
            self._tried[name] = version
            self._tell(name, f"{name} is not taken from {self._folder}: it is served already")
            return
        try:
            settings = await asyncio.to_thread(read_version, version.folder)
            model = read_model(settings)
            if is_served:
                how = {"policy": self._policy, "ephemeral": True}
                if validation := await asyncio.to_thread(validation_of, model.source):
                    how["validation"] = validation
                # All of them: what is no longer in the file is as by default.
                self._target.begin_swap(name, model.model_dump() | how)
            else:
                self._target.begin_add({"name": name, "ephemeral": True, **settings})
                self._ours.add(name)
        except (ConflictError, UnavailableError):
            return  # it is being changed, or no host has joined yet; the next look tries again
        except (ServiceError, ValueError, OSError) as error:
            reason = getattr(error, "message", "") or str(error)
            self._tell(name, f"{version.folder} cannot be served: {reason}")
        else:
            self._told.pop(name, None)
            number = self._target.number_next(name, version.number)
            other = "" if number == version.number else f", as version {number}"
            text = "%s: version %d of the folder begins to load%s"
            logger.info(text, name, version.number, other)
        self._tried[name] = version

    def _remove(self, name: str) -> None:
        try:
            self._target.begin_remove(name, ephemeral=True)
        except UnknownModelError:
            pass  # it has never come, or somebody else has removed it
        except ServiceError:
            return  # it is being added or changed; the next look tries again
        self._ours.discard(name)
        self._tried.pop(name, None)
        self._told.pop(name, None)

    def _tell(self, name: str, text: str) -> None:
        """Log an error once."""
        if self._told.get(name) != text:
            self._told[name] = text
            logger.error("%s", text)
