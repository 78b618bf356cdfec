"""Finds archives in TorchServe's `model_store` for calls that register them.

A call names an archive there, and nothing else: with TorchServe, its URL was a way in. It reads
files, so it runs in a thread.
"""

import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferpool.models.errors import SourceError
from inferpool.models.torchserve.archive import read_facts
from inferpool.service.parts.torchserve.description import ManagementRefusedError, bad_request
from inferpool.service.settings.names import SettingsError
from inferpool.service.settings.properties import Properties, model_of_store, store_of

_ARCHIVE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+ -]{0,254}")
"""The name of an archive: no path, no URL, nothing hidden."""
_NUMBER = re.compile(r"[0-9]{1,9}")
_NOT_TAKEN = ("handler", "s3_sse_kms")
"""Parameters that would change what an archive is, or where it comes from."""
_SETTINGS = {
    "initial_workers": "replicas",
    "batch_size": "max_batch_size",
    "max_batch_delay": "batch_wait_ms",
    "response_timeout": "batch_timeout_s",
    "startup_timeout": "load_timeout_s",
}
"""Our settings of a model, by the parameters of `POST /models`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundArchive:
    """An archive that can be registered."""

    file: str
    """Its name in the model store."""
    name: str
    """The name of the model, as clients of TorchServe know it."""
    label: str
    """The version of the archive."""
    settings: Mapping[str, Any]
    """The settings of the model."""


class ModelStore:
    """The archives of a `model_store`."""

    def __init__(self, properties: Properties) -> None:
        """Read nothing yet.

        Raises:
            SettingsError: The folder is not there.
        """
        self._properties = properties
        self._folder = store_of(properties, Path()) if "model_store" in properties else None

    def find(self, asked: Mapping[str, object]) -> FoundArchive:
        """Return the archive that the parameters of a call name, with the settings they ask for.

        Raises:
            ManagementRefusedError: There is none, or a parameter cannot be used.
        """
        path = self._path_of(asked.get("url"))
        wanted = _settings_in(asked)
        name = asked.get("model_name") or None
        if name is not None and not (
            isinstance(name, str) and name.isprintable() and "/" not in name
        ):
            raise bad_request(f"model_name: {str(name)[:80]!r} cannot be the name of a model")
        try:
            facts = read_facts(path)
            settings = model_of_store(path, self._properties, name=name, facts=facts)
        except (SourceError, SettingsError) as error:
            raise bad_request(f"{path.name}: {error}") from error
        return FoundArchive(
            file=path.name,
            name=name or facts.name,
            label=facts.version,
            settings={**settings, **wanted},
        )

    def _path_of(self, url: object) -> Path:
        if not url:
            raise bad_request("Parameter url is required.")
        if not isinstance(url, str) or not _ARCHIVE.fullmatch(url):
            raise bad_request(
                f"url: {str(url)[:80]!r} is no name of an archive; it must lie in model_store, and "
                "is named without a folder or an address"
            )
        if self._folder is None:
            raise bad_request("url: there is no model_store in the file of properties")
        path = self._folder / url
        try:
            mode = path.lstat().st_mode
        except OSError:
            mode = 0
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # links may lead out of the folder
            raise ManagementRefusedError(
                404, "ModelNotFoundException", f"Model not found at: {url}"
            )
        return path


def _settings_in(asked: Mapping[str, object]) -> Mapping[str, int]:
    """Return the settings that a call asks for; numbers below 1 count as not given."""
    for name in _NOT_TAKEN:
        if asked.get(name) not in (None, False, "", "false"):
            raise bad_request(f"{name}: cannot be given here; an archive is served as it is")
    if asked.get("runtime") not in (None, "", "python", "python3"):
        raise bad_request("runtime: only python is served")
    settings = {}
    for name, setting in _SETTINGS.items():
        text = str(asked.get(name, ""))
        if _NUMBER.fullmatch(text) and int(text):
            settings[setting] = int(text)
    return settings
