"""Loads the settings, and writes them: flags override the environment, which overrides the file.

Between both come the settings of others: of a platform's variables, or of TorchServe's file.

It runs once, in the front end, before anything else starts. Nothing else reads the environment.
"""

import dataclasses
import errno
import hashlib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from itertools import groupby
from pathlib import Path
from typing import TextIO

from inferpool.models.attached import attached
from inferpool.models.files.reading import read_file
from inferpool.service.client.urls import without_password
from inferpool.service.settings.draft import Draft
from inferpool.service.settings.keys import Keys
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.names import (
    CONFIG_VARIABLE,
    KEY_SETTINGS,
    PREFIX,
    Key,
    SettingsError,
    dotted,
)
from inferpool.service.settings.problems import PIPE_WAIT_S
from inferpool.service.settings.settings import Settings
from inferpool.service.settings.state import StateFile
from inferpool.service.settings.tracing import ENDPOINT_VARIABLES, HEADER_VARIABLES, TraceHeaders

FILE_NAME = "inferpool.toml"
_OTHERS = ("settings of platforms", "settings of TorchServe")
"""Functions that find settings elsewhere than in our file, variables and flags; a later one counts
more. See `service.settings.platforms`."""
_OF_PLATFORMS = re.compile(
    r"PORT|K_SERVICE|DYNO|CONTAINER_IMAGE|(AIP|SAGEMAKER)_\w+|INFERPOOL_SAGEMAKER"
)
"""Variables of a platform: without any, its code is not imported."""

Row = tuple[Key, object, str]
"""The key, the value and the origin of a setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSettings:
    """The settings in force, and the origin of each."""

    settings: Settings
    origins: Mapping[str, str]
    """Origins by dotted key: "default", "file PATH", "environment VAR", "flag --x" or "argument
    MODEL"."""
    warnings: Sequence[str] = ()
    """Texts for the log about what was ignored."""
    state: StateFile = dataclasses.field(default_factory=lambda: StateFile(None, {}))
    """The changes of models at run time, which are in the settings already."""

    def rows(self) -> list[Row]:
        """Return every setting as (key, value, origin), in the order of the file."""
        return [
            (key, value, self.origins.get(dotted(key), "default"))
            for key, value in _leaves(self.settings)
        ]

    def with_changes(self, path: Path | None) -> "LoadedSettings":
        """Return the settings with the changes of models at run time; None: there is no file.

        Raises:
            StateFileError: The file cannot be used.
        """
        state = StateFile(path, self.settings.models)
        state.read()
        return LoadedSettings(
            settings=self.settings.model_copy(update={"models": state.models.copy()}),
            origins={**self.origins, **state.origins},
            warnings=[*self.warnings, *state.warnings],
            state=state,
        )


def load(
    flags: Mapping[str, str],
    environ: Mapping[str, str],
    cwd: Path,
    *,
    pipe_wait_s: float = PIPE_WAIT_S,
) -> LoadedSettings:
    """Load the settings: the file, then the environment over it, then the flags over both.

    Args:
        flags: The flags as typed, by setting (the keys of `FLAGS`); also "config", the path of the
            file, and "model", a source or the name of a model in the file.
        environ: The environment. An empty variable counts as unset, except one for keys, which is
            an error: if a secret was lost on its way, the service must not be open to all.
        cwd: The folder to look for `inferpool.toml` in.
        pipe_wait_s: How long to wait for data if a file of settings or keys is a pipe.

    Raises:
        SettingsError: A setting is unknown or invalid; each problem names the file and the key.
        StateFileError: The file of changes made at run time cannot be used.
    """
    file, origin = _find_file(flags, environ, cwd)
    table = read_table(file, cwd, origin, pipe_wait_s=pipe_wait_s) if file else {}
    draft = Draft()
    if file:
        draft.add_table(table, f"file {file}")
    has_platform = "sagemaker" in {*flags, *table} or any(map(_OF_PLATFORMS.fullmatch, environ))
    known = table
    for find in map(attached, _OTHERS if has_platform else _OTHERS[1:]):
        tables = [*find(flags, environ, known, cwd)]
        for found in tables:
            draft.add_table(*found)
            known = {**known, **found[0]}
    draft.add_environment(environ)
    if model := flags.get("model"):
        draft.choose(model)
    draft.add_flags(flags)
    settings, origins, warnings = draft.finish(cwd, pipe_wait_s=pipe_wait_s)
    if has_platform:
        warnings = [*warnings, *attached("warnings of platforms")(origins)]
    own_file = None if model else file
    settings = _with_job_store(settings, own_file, settings.port, environ, cwd)
    loaded = LoadedSettings(settings=settings, origins=origins, warnings=warnings)
    return loaded.with_changes(_state_path(settings.state_file, own_file, cwd))


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

    Returns:
        The settings. `state_file` is a path or "none"; its changes are not in them yet. `job_store`
        is decided too; without a file, it is "none" unless these settings have a port.

    Raises:
        SettingsError: A setting is unknown or invalid; each problem names its place.
    """
    draft = Draft()
    table: Mapping[str, object] = {}
    if file is not None:
        path = Path(file)
        table = read_table(path, cwd, "config")
        draft.add_table(table, f"file {path}")
    named = {name: value for name, value in arguments.items() if name == "torchserve"}
    others = {k: v for k, v in environ.items() if not k.startswith(PREFIX)}
    for found in attached("settings of TorchServe")({}, others, {**table, **named}, cwd):
        draft.add_table(*found)
    draft.add_environment(others)
    if model is not None:
        draft.choose(model)
    draft.add_arguments(arguments)
    settings, origins, warnings = draft.finish(cwd)
    beside = None if file is None or model or "models" in arguments else Path(file)
    kept = str(_state_path(settings.state_file, beside, cwd) or "none")
    # A process that serves these settings may know neither the file nor the folder.
    settings = settings.model_copy(update={"state_file": kept})
    port = settings.port if "port" in origins else 0  # a program's own server has another
    settings = _with_job_store(settings, beside, port, environ, cwd)
    decided = "argument" if beside is None else f"file {beside}"
    origins = {"state_file": decided, "job_store": decided, **origins}
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


def write_table(rows: Sequence[Row], stream: TextIO) -> None:
    """Write aligned columns, with colours and line breaks on a terminal."""
    cells = [(dotted(key), cell(value), origin) for key, value, origin in rows]
    if stream.isatty():
        _write_rich(cells, stream)
        return
    widths = [max(len(row[column]) for row in cells) for column in (0, 1)]
    for key, value, origin in cells:
        stream.write(f"{key:{widths[0]}}  {value:{widths[1]}}  {origin}\n")


def write_toml(rows: Sequence[Row], stream: TextIO) -> None:
    """Write a file that works as `inferpool.toml`, with the origins as comments."""
    for table, members in groupby(rows, key=lambda row: row[0][:-1]):
        if table:
            stream.write(f"\n[{dotted(table)}]\n")
        for key, value, origin in members:
            if value is None:  # TOML has no null; leaving it out means the same
                continue
            if isinstance(value, Keys | TraceHeaders):  # secrets, which a file may not hold
                continue
            note = "" if origin == "default" else f"  # {origin}"
            stream.write(f"{dotted(key[-1:])} = {_toml(value)}{note}\n")


def write_json(rows: Sequence[Row], stream: TextIO) -> None:
    """Write one JSON object: dotted key to value and origin."""
    stream.write(f"{json_of(rows)}\n")


def json_of(rows: Sequence[Row]) -> str:
    """Return one JSON object: dotted key to value and origin."""
    body = {dotted(key): {"value": value, "origin": origin} for key, value, origin in rows}
    return json.dumps(body, indent=2, default=str)


def cell(value: object) -> str:
    """Return a value on one line."""
    if isinstance(value, Keys | TraceHeaders):
        return str(value)
    return "-" if value is None else _toml(value)


def _find_file(
    flags: Mapping[str, str], environ: Mapping[str, str], cwd: Path
) -> tuple[Path | None, str]:
    """Return the file of settings and where it is named; empty if it is just `inferpool.toml`."""
    for origin, named in (
        ("--config", flags.get("config")),
        (CONFIG_VARIABLE, environ.get(CONFIG_VARIABLE)),
    ):
        if named:
            return Path(named), origin
    # Anything with that name counts. If it cannot be read, its keys must not be ignored silently.
    return (Path(FILE_NAME) if os.path.lexists(cwd / FILE_NAME) else None), ""


def _state_path(state_file: str, settings_file: Path | None, cwd: Path) -> Path | None:
    if state_file.lower() == "none":
        return None
    if state_file != "auto":
        return cwd / state_file
    return None if settings_file is None else (cwd / settings_file).with_suffix(".state.json")


def _with_job_store(
    settings: Settings, file: Path | None, port: int, environ: Mapping[str, str], cwd: Path
) -> Settings:
    """Return the settings with the place of jobs as an absolute path, a URL or "none"."""
    place = settings.job_store
    if place == "auto":
        place = _own_job_store(settings, file, port, environ, cwd)
    elif place.lower() == "none":
        place = "none"
    elif "://" not in place:
        place = str(cwd / Path(place).expanduser())
    return settings.model_copy(update={"job_store": place})


def _own_job_store(
    settings: Settings, file: Path | None, port: int, environ: Mapping[str, str], cwd: Path
) -> str:
    """Return a folder that is this service's at each start, wherever it is started from.

    A service that has neither a file of settings nor a port of its own has no such folder.
    """
    if file is not None:
        path = (cwd / file).resolve()
        name, key = path.stem, str(path)
    elif port == 0:
        return "none"
    else:
        sources = sorted(model.source for model in settings.models.values())
        name, key = f"port-{port}", "\n".join([*sources, str(port)])
    try:
        home = Path(environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser())
    except RuntimeError:  # a user without a home
        return "none"
    digest = hashlib.sha256(key.encode()).hexdigest()[:8]
    return str(cwd / home / "inferpool" / "jobs" / f"{name}-{digest}")


def read_table(
    file: Path, cwd: Path, origin: str, *, pipe_wait_s: float = PIPE_WAIT_S
) -> dict[str, object]:
    """Read a TOML file.

    Args:
        file: Path of the file.
        cwd: The folder that the path is relative to.
        origin: The flag or variable that names the file; empty if nobody does.
        pipe_wait_s: How long to wait for data if a file that somebody names is a pipe.

    Raises:
        SettingsError: It cannot be read.
    """
    try:
        content = read_file(cwd / file, wait_s=pipe_wait_s if origin else 0.0)
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


def _write_rich(cells: Sequence[tuple[str, str, str]], stream: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("setting", "value", "set by", box=None, pad_edge=False, header_style="bold")
    for key, value, origin in cells:
        style = "dim" if origin == "default" else "cyan"
        table.add_row(Text(key), Text(value, overflow="fold"), Text(origin, style=style))
    Console(file=stream).print(table)


def _toml(value: object) -> str:
    """Return a value as TOML on one line (https://toml.io/en/v1.0.0)."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # TOML has the escapes of JSON, and also wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        pairs = (f"{dotted((str(key),))} = {_toml(each)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, date | time):
        return value.isoformat()
    return repr(value)
