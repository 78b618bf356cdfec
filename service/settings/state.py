"""The state file: what was changed of models at run time, for the next start of the service.

The main process reads it at the start, over all other settings. It writes it before a change takes
effect: a new file takes the place of the old one in one step. So a service that is killed at any
moment comes back with one whole version of each model.
"""

import errno
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, ValidationError, field_validator

from inferpool.models.files.reading import read_file
from inferpool.models.files.writing import lock, sync_folder
from inferpool.service.settings.model import MODEL_NAME, ModelSettings, SettingsTable
from inferpool.service.settings.names import GONE, StateFileError, dotted

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger(__name__)

_MAX_BYTES = 16 << 20
"""The most that `read_file` reads."""
_WHAT_IT_IS = frozenset({"source", "weights", "options"})
"""Settings that make a removed model another one, which is served again."""

ModelName = Annotated[str, Field(pattern=f"^{MODEL_NAME.pattern}$")]
VersionNumber = Annotated[int, Field(ge=1, le=2**53)]
Plain = Mapping[str, object]
"""The settings of a model as JSON."""


class SavedModel(SettingsTable):
    """A model that was added, changed or removed at run time."""

    version: VersionNumber
    """The version that serves."""
    newest: VersionNumber
    """The largest number that a version of the model has had."""
    settings: ModelSettings | None
    """The settings of that version; None if the model was removed."""
    before: Plain | None
    """Its other settings at the time of the change; None if they did not name it."""

    @field_validator("settings", mode="before")
    @classmethod
    def _leave_out_gone(cls, settings: object) -> object:
        """Leave out what earlier programs wrote of settings that are gone, if it was not used."""
        if not isinstance(settings, dict):
            return settings
        for name in settings.keys() & GONE.keys():
            if settings[name]:
                raise ValueError(f"{name} {GONE[name]}")
        return {name: value for name, value in settings.items() if name not in GONE}


class StateTable(SettingsTable):
    """The whole file."""

    format: Literal[1] = 1
    models: Mapping[ModelName, SavedModel] = {}


class StateFile:
    """Stores changes of models for the next start. Lives in the event loop."""

    def __init__(self, path: Path | None, models: Mapping[str, ModelSettings]) -> None:
        """Read nothing yet.

        Args:
            path: The file, which need not exist; None keeps nothing.
            models: The models of the other settings.
        """
        self.path = None if path is None else path.resolve()  # a link stays one
        self.models = dict(models)
        """The models that a start would serve now."""
        self.warnings: list[str] = []
        """Changes that were not brought back, and why."""
        self.origins: dict[str, str] = {}
        """The origins of the settings that were brought back, by dotted key."""
        self.configured = dict(models)
        """The models of the other settings."""
        self._numbers: dict[str, tuple[int, int]] = {}
        self._before = {name: _plain(model) for name, model in models.items()}
        self._saved: Mapping[str, SavedModel] = {}
        self._content: bytes | None = None
        """The file as it was read or written last; None if there was none."""
        self._lock: asyncio.Lock | None = None

    def read(self) -> None:
        """Bring the models back that the file has.

        Raises:
            StateFileError: It cannot be used; says why, and what to do.
        """
        if self.path is None:
            return
        try:
            self._content = read_file(self.path)
            table = StateTable.model_validate(json.loads(self._content.decode()))
        except FileNotFoundError:
            return
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = dotted(tuple(str(part) for part in first["loc"]))
            raise self._unusable(
                f"{place}: {first['msg'].removeprefix('Value error, ')}"
            ) from error
        except (OSError, ValueError, RecursionError) as error:
            raise self._unusable(getattr(error, "strerror", None) or str(error)) from error
        self._saved = table.models
        for name, saved in table.models.items():
            self._bring_back(name, saved)

    def number_of(self, name: str) -> int:
        """Return the number of the version of a model that a start serves."""
        return self._numbers.get(name, (1, 1))[0]

    def newest_of(self, name: str) -> int:
        """Return the largest number of a version of a model before the start."""
        return self._numbers.get(name, (0, 0))[1]

    async def save(
        self, name: str, model: ModelSettings | None, *, version: int, newest: int
    ) -> None:
        """Store the version of a model that the next start serves; None removes it.

        Raises:
            OSError: It could not be written; the file is as it was.
        """
        await self._save(
            name,
            SavedModel.model_construct(
                version=version, newest=newest, settings=model, before=self._before.get(name)
            ),
        )

    async def save_number(self, name: str, newest: int) -> None:
        """Store the newest number of a model, so that the next start gives out only later ones.

        Raises:
            OSError: It could not be written; the file is as it was.
        """
        saved = self._saved.get(name)
        if saved is not None:
            await self._save(name, saved.model_copy(update={"newest": newest}))
        elif name in self.models:
            model, version = self.models[name], self.number_of(name)
            await self.save(name, model, version=version, newest=newest)

    async def _save(self, name: str, saved: SavedModel) -> None:
        import asyncio  # commands that only read settings need none

        if self._lock is None:
            self._lock = asyncio.Lock()
        # What a thread has begun to write is recorded, even if nobody waits for it any more.
        await asyncio.shield(asyncio.create_task(self._write(name, saved, self._lock)))

    async def _write(self, name: str, saved: SavedModel, lock: "asyncio.Lock") -> None:
        if self.path is None:
            return
        from asyncio import to_thread

        async with lock:
            every = {**self._saved, name: saved}
            if saved.settings is None and saved.before is None:
                del every[name]  # nothing would bring it back
            content = _content_of(every)
            await to_thread(_replace, self.path, self._content, content)
            self._saved, self._content = every, content
            self.models.pop(name, None)
            if saved.settings is not None:
                self.models[name] = saved.settings

    def _bring_back(self, name: str, saved: SavedModel) -> None:
        self._numbers[name] = saved.version, saved.newest
        if saved.settings is not None and saved.before == _plain(saved.settings):
            return  # only numbers were given
        try:
            model = self._merged(saved, self.models.get(name), self._before.get(name))
        except ValueError as why:
            what = "removed" if saved.settings is None else f"changed to version {saved.version}"
            self.warnings.append(f"{name} was {what} at run time ({self.path}), but {why}")
            self._numbers[name] = saved.newest + 1, saved.newest + 1
            return
        self.models.pop(name, None)
        if model is None:
            return
        self.models[name] = model
        plain = _plain(model)
        for field in _differing(self._before.get(name, dict.fromkeys(plain)), plain):
            for option in model.options if field == "options" else ():
                self.origins[dotted(("models", name, field, option))] = f"state {self.path}"
            self.origins[dotted(("models", name, field))] = f"state {self.path}"

    def _merged(
        self, saved: SavedModel, now: ModelSettings | None, said: Plain | None
    ) -> ModelSettings | None:
        """Return what a start serves: what was changed at run time, and the rest as it is now.

        Raises:
            ValueError: The other settings have changed in the same place; says how.
        """
        if saved.before is None or now is None or said is None:
            if saved.before is not None or now is not None:
                raise ValueError(
                    f"the settings {'no longer name' if now is None else 'name'} it now: they count"
                )
            return saved.settings
        changed = _WHAT_IT_IS
        if saved.settings is not None:
            changed = frozenset(_differing(saved.before, _plain(saved.settings)))
        if both := sorted(changed.intersection(_differing(saved.before, said))):
            raise ValueError(f"the settings have another {' and '.join(both)} since: they count")
        if saved.settings is None:
            return None
        update = {field: getattr(saved.settings, field) for field in changed}
        try:
            return ModelSettings.model_validate(now.model_dump() | update)
        except ValidationError as error:
            raise ValueError("that does not go with the settings of now: they count") from error

    def _unusable(self, why: str) -> StateFileError:
        return StateFileError(
            f"{self.path}: it cannot be used: {why}. It has what was changed of models at run "
            "time. Mend it, or move it away to start with the other settings alone"
        )


def _plain(model: ModelSettings) -> Plain:
    plain: Plain = json.loads(json.dumps(model.model_dump(), default=str))  # keeps NaN
    return plain


def _differing(one: Plain, other: Plain) -> Iterator[str]:
    """Yield the settings that differ. One that an earlier program did not have does not."""
    for field in one.keys() & other.keys():
        texts = (json.dumps(each[field], sort_keys=True) for each in (one, other))
        if next(texts) != next(texts):  # NaN is not NaN, but its text is
            yield field


def _content_of(models: Mapping[str, SavedModel]) -> bytes:
    body = StateTable.model_construct(models=models).model_dump()
    return f"{json.dumps(body, indent=1, sort_keys=True, default=str)}\n".encode()


def _replace(path: Path, former: bytes | None, content: bytes) -> None:
    """Write a file in one step, if it is as it was.

    Raises:
        OSError: It is not, or could not be written. The file is as it was.
    """
    if len(content) > _MAX_BYTES:
        raise OSError(errno.EFBIG, f"it would have more than {_MAX_BYTES >> 20} MiB")
    draft = path.with_name(f"{path.name}.draft")  # the next one overwrites what a kill leaves
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        lock(fd)
        if not os.path.samestat(os.fstat(fd), os.stat(draft)) or _present(path) != former:
            raise OSError(errno.EBUSY, "another service has written it; restart one of them")
        os.ftruncate(fd, 0)
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        os.fsync(fd)
        os.rename(draft, path)
    except BaseException:
        os.ftruncate(fd, 0)  # gives the space back
        raise
    finally:
        os.close(fd)
    try:
        sync_folder(path.parent)
    except OSError as error:  # it is written, and only a loss of power could undo it
        logger.warning("%s: the folder could not be synced: %s", path, error)


def _present(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
