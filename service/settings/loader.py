"""Loads the settings: flags override the environment, which overrides the file.

It runs once, in the front end, before anything else starts. Nothing else reads the environment.
"""

import errno
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from inferpool.models.files.reading import read_file
from inferpool.service.settings.draft import Draft
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.names import CONFIG_VARIABLE, KEY_SETTINGS, PREFIX, Key, dotted
from inferpool.service.settings.problems import PIPE_WAIT_S
from inferpool.service.settings.settings import Settings
from inferpool.service.settings.tracing import ENDPOINT_VARIABLES, HEADER_VARIABLES
from inferpool.service.settings.urls import without_password
from inferpool.service.settings.usage import SettingsError

FILE_NAME = "inferpool.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSettings:
    """The settings in force, and who set each."""

    settings: Settings
    origins: Mapping[str, str]
    """Origins by dotted key: "default", "file PATH", "environment VAR", "flag --x" or "argument
    MODEL"."""
    warnings: Sequence[str] = ()
    """Texts for the log about what was ignored."""

    def rows(self) -> list[tuple[Key, object, str]]:
        """Return every setting as (key, value, origin), in the order of the file."""
        return [
            (key, value, self.origins.get(dotted(key), "default"))
            for key, value in _leaves(self.settings)
        ]


def load(flags: Mapping[str, str], environ: Mapping[str, str], cwd: Path) -> LoadedSettings:
    """Load the settings: the file, then the environment over it, then the flags over both.

    Args:
        flags: The flags as typed, by setting (the keys of `FLAGS`); also "config", the path of the
            file, and "model", a source or the name of a model in the file.
        environ: The environment. An empty variable counts as unset, except one for keys, which is
            an error: if a secret was lost on its way, the service must not be open to all.
        cwd: The folder to look for `inferpool.toml` in.

    Raises:
        SettingsError: A setting is unknown or invalid; each problem names the file and the key.
    """
    file, origin = _find_file(flags, environ, cwd)
    table = _read_file(file, cwd, origin) if file else {}
    draft = Draft()
    if file:
        draft.add_table(table, f"file {file}")
    draft.add_environment(environ)
    if model := flags.get("model"):
        draft.choose(model)
    draft.add_flags(flags)
    settings, origins, warnings = draft.finish(cwd)
    return LoadedSettings(settings=settings, origins=origins, warnings=warnings)


def load_arguments(
    arguments: Mapping[str, object],
    environ: Mapping[str, str],
    cwd: Path,
    *,
    model: str | None = None,
    file: str | os.PathLike[str] | None = None,
) -> LoadedSettings:
    """Load settings that Python code gives as keyword arguments, over a file if it names one.

    Neither `inferpool.toml` nor variables such as INFERPOOL_PORT count, so that a program means the
    same wherever it runs.

    Args:
        arguments: The arguments by setting. `models` is a table for each model, by name, as in a
            file.
        environ: The environment, for variables of others such as CUDA_VISIBLE_DEVICES.
        cwd: The current folder.
        model: The source to serve, or the name of a model in the file; None: all models.
        file: A file of settings, relative to `cwd`.

    Raises:
        SettingsError: A setting is unknown or invalid; each problem names its place.
    """
    draft = Draft()
    if file is not None:
        path = Path(file)
        draft.add_table(_read_file(path, cwd, "config"), f"file {path}")
    draft.add_environment({k: v for k, v in environ.items() if not k.startswith(PREFIX)})
    if model is not None:
        draft.choose(model)
    draft.add_arguments(arguments)
    settings, origins, warnings = draft.finish(cwd)
    return LoadedSettings(settings=settings, origins=origins, warnings=warnings)


def secret_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the variables of an environment that hold secrets, which no worker needs."""
    return [
        name
        for name, text in environ.items()
        if name.removeprefix(PREFIX).lower() in KEY_SETTINGS
        or name in HEADER_VARIABLES
        or (name in ENDPOINT_VARIABLES and without_password(text) != text)
    ]


def _find_file(
    flags: Mapping[str, str], environ: Mapping[str, str], cwd: Path
) -> tuple[Path | None, str]:
    """Return the file of settings and who named it; nobody has if it is just `inferpool.toml`."""
    for origin, named in (
        ("--config", flags.get("config")),
        (CONFIG_VARIABLE, environ.get(CONFIG_VARIABLE)),
    ):
        if named:
            return Path(named), origin
    # Anything with that name counts. If it cannot be read, its keys must not be ignored silently.
    return (Path(FILE_NAME) if os.path.lexists(cwd / FILE_NAME) else None), ""


def _read_file(file: Path, cwd: Path, origin: str) -> dict[str, object]:
    try:
        content = read_file(cwd / file, wait_s=PIPE_WAIT_S if origin else 0.0)
        return tomllib.loads(content.decode())
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        where = re.search(r" \(at (line \d+, column \d+|end of document)\)$", message)
        place = f"{file}, {where[1]}" if where else str(file)
        raise SettingsError(
            [f"{place}: {message[: where.start()] if where else message}"]
        ) from None
    except UnicodeDecodeError as error:
        raise SettingsError([f"{file}: byte {error.start} is not UTF-8, as TOML must be"]) from None
    except OSError as error:
        raise SettingsError([_unread(file, origin, error)]) from None
    except (ValueError, RecursionError) as error:  # a NUL in the name, or too many nested tables
        raise SettingsError([f"{file}: it cannot be read: {error}"]) from None


def _unread(file: Path, origin: str, error: OSError) -> str:
    if origin:
        reason = error.strerror
        if isinstance(error, FileNotFoundError) and reason == os.strerror(errno.ENOENT):
            return f"{origin}: there is no file {file}"
        return f"{origin}: {file} cannot be read: {reason}"
    return (
        f"{file}: it cannot be read: {error.strerror}; put a file of settings there, or move this "
        "away to do without"
    )


def _leaves(settings: Settings) -> Iterator[tuple[Key, object]]:
    for name in Settings.model_fields:
        if name != "models":
            yield (name,), getattr(settings, name)
    for name, model in settings.models.items():
        for field in ModelSettings.model_fields:
            if field != "options":
                yield ("models", name, field), getattr(model, field)
        for option, value in model.options.items():
            yield ("models", name, "options", option), value
