"""`inferpool serve --debug`: one model in this process, for its author at a terminal."""

import asyncio
import os
import site
import sys
import sysconfig
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from inferpool.models.sources.classes import distrust_bytecode
from inferpool.service.app import run as run_app
from inferpool.service.settings.loader import LoadedSettings
from inferpool.service.settings.names import FlagError
from inferpool.service.settings.settings import Settings
from inferpool.workers.beside.reloading import CHANGED
from inferpool.workers.host.in_process import InProcessEngine
from inferpool.workers.shared.guard import give_children_defaults

INSTALLED = tuple({*site.getsitepackages(), *sysconfig.get_paths().values(), sys.prefix})
"""Beginnings of the paths of installed files, which are not watched."""
_PATIENCE_S = 3600.0
"""How long a call may take: as long as somebody looks at it in a debugger."""
_DRAIN_S = 1.0
"""How long a stop waits for calls, which a debugger may be holding."""
_LOOK_S = 0.3
_MAX_FILES = 5000
_NOT_OURS = {"__pycache__", "node_modules", "site-packages"}


def run(loaded: LoadedSettings, files: "WatchedFiles | None" = None) -> int:
    """Serve until a signal, in the main thread; the model has a thread of its own.

    Args:
        loaded: The settings. Those for several processes are overridden.
        files: Files to serve until one of them changes, if there are any.

    Returns:
        The exit status: `CHANGED` if a file has changed. The caller leaves by `os._exit`: an
        ordinary exit would wait for the model's thread, which may be at a prompt.

    Raises:
        FlagError: There are several models to serve.
    """
    names = list(loaded.settings.models)
    if len(names) > 1:
        choice = " | ".join(names)
        raise FlagError(f"--debug serves one model: name it ({choice})")
    terminal = _terminal()
    distrust_bytecode()
    give_children_defaults()  # the model may fork; its thread sets no handlers itself
    if terminal is None:
        sys.stderr.write(
            "inferpool serve: stdin is not a terminal, so breakpoint() has no prompt\n"
        )
    code = run_app(
        settings_for(loaded.settings),
        loaded.origins,
        warnings=loaded.warnings,
        make_engine=InProcessEngine,
        until_changed=files.until_changed if files else None,
    )
    if terminal is not None:  # a debugger left at its prompt has changed the terminal
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, terminal)
    sys.stdout.flush()
    sys.stderr.flush()
    if files is None or not (files.changed or code):
        return code
    return CHANGED if files.changed else wait_for_change(files)


def wait_for_change(files: "WatchedFiles") -> int:
    """Return `CHANGED` when a file has changed: as it is, nothing can be served."""
    sys.stderr.write("inferpool serve: waiting for a file to change (Ctrl-C stops it)\n")
    while not files.has_changed():
        time.sleep(_LOOK_S)
    return CHANGED


def settings_for(settings: Settings) -> Settings:
    """Return settings for one worker in this process, with time to look at a call."""
    models = {
        name: model.model_copy(
            update={
                "replicas": 1,
                "placement": "replicate",
                "devices_per_replica": "auto",
                "speed": "exact",
                "decode": "exact",
                "credit": 1,
                "prepare_threads": 1,
                "decoders": 0,
                "objective_p99_ms": None,
            }
        )
        for name, model in settings.models.items()
    }
    return settings.model_copy(
        update={
            "models": models,
            "front_ends": 1,
            "speed_search": False,
            "show_errors": True,
            "log_format": "human" if settings.log_format == "auto" else settings.log_format,
            "default_timeout_s": _PATIENCE_S,
            "max_timeout_s": max(_PATIENCE_S, settings.max_timeout_s),
            "drain_timeout_s": min(_DRAIN_S, settings.drain_timeout_s),
            "shutdown_delay_s": 0.0,
        }
    )


class WatchedFiles:
    """The files of a project, and those that it has imported, except installed packages."""

    def __init__(self, folder: Path) -> None:
        self.changed = ""
        """The first file that changed; empty while none has."""
        self._folder = folder
        self._times = self._look()

    def has_changed(self) -> bool:
        """Return whether a file was changed, added or removed since the last check."""
        now = self._look()
        for path, modified in now.items():
            before = self._times.get(path)
            # A module that was only imported meanwhile has not changed.
            is_new = before is None and path.is_relative_to(self._folder)
            if is_new or before not in (None, modified):
                self.changed = str(path)
        gone = [path for path in self._times if path not in now and not path.exists()]
        self.changed = self.changed or (str(gone[0]) if gone else "")
        self._times = now
        return bool(self.changed)

    async def until_changed(self) -> str:
        """Wait for a change, and return it as the reason to stop."""
        while not self.has_changed():  # noqa: ASYNC110  # nothing reports a change
            await asyncio.sleep(_LOOK_S)
        return f"{self.changed.removeprefix(f'{self._folder}/')} changed"

    def _look(self) -> dict[Path, int]:
        times = {}
        for path in self._paths():
            try:
                times[path] = path.stat().st_mtime_ns
            except OSError:
                continue
            if len(times) == _MAX_FILES:
                break
        return times

    def _paths(self) -> Iterator[Path]:
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if file and not file.startswith(INSTALLED):
                yield Path(file)
        for root, folders, names in os.walk(self._folder):
            folders[:] = [
                each
                for each in folders
                if each not in _NOT_OURS
                and not each.startswith(".")
                and not Path(root, each, "pyvenv.cfg").exists()
            ]
            yield from (Path(root, name) for name in names if name.endswith((".py", ".toml")))


def _terminal() -> list[Any] | None:
    """Return the state of the terminal at stdin; None if there is none."""
    try:
        return list(termios.tcgetattr(sys.stdin))
    except (termios.error, ValueError, AttributeError):
        return None
