"""Reads what an archive of TorchServe says about itself. No torch; runs and unpickles nothing.

An archive is a zip (`.mar`), a `.tar.gz`, or a folder; each has `MAR-INF/MANIFEST.json`. The fields
are those of TorchServe 0.12: `org.pytorch.serve.archive.model.Manifest` and `ModelConfig`.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from inferpool.models.errors import SourceError
from inferpool.models.files.kinds import ARCHIVE_MANIFEST
from inferpool.models.files.reading import read_file
from inferpool.models.torchserve.handlers import HANDLERS
from inferpool.models.torchserve.members import MAX_FILES, fault_of_name, opened_archive, shown_name

MANIFEST = ARCHIVE_MANIFEST
ARCHIVE_SUFFIXES = (".mar", ".tar.gz")
MAX_MANIFEST_BYTES = 1 << 20
MAX_CONFIG_BYTES = 1 << 20
NUMBERS = (
    "minWorkers", "maxWorkers", "batchSize", "maxBatchDelay", "responseTimeout", "startupTimeout"
)  # fmt: skip
_NUMBER = re.compile(
    rf"""^["']?({"|".join(NUMBERS)})["']?[ \t]*:[ \t]+(\d{{1,9}})[ \t]*(?:\#.*)?$""",
    re.MULTILINE | re.ASCII,
)
"""Numbers of `model-config.yaml`, which the front end reads without a parser of YAML: `key: 4` at
the start of a line of a block mapping is a key of the whole."""
_ANY_KEY = re.compile(
    rf"""(?:^|^[ \t]*\{{[^\n]*?)["']?\b({"|".join((*NUMBERS, "deviceIds"))})["']?[ \t]*:""",
    re.MULTILINE,
)
"""Such a key in any form, also in braces."""
_ON_CPU = re.compile(r"""^deviceType[ \t]*:[ \t]+["']?cpu["']?[ \t]*(?:#.*)?$""", re.M | re.I)
_IN_PARTS = re.compile(
    r"^(?:(torchrun|parallelType)[ \t]*:"
    r"|(continuousBatching|sequenceBatching|asyncCommunication)[ \t]*:[ \t]*(?:true|yes|on)\b)",
    re.MULTILINE | re.IGNORECASE,
)
"""Keys of archives for workers of another kind."""
_CODE_SUFFIX = ".py"


class ManifestModel(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The part `model` of a manifest."""

    model_name: str
    model_version: str | int | float = "1.0"
    handler: str = ""
    """A built-in handler, a file, or `file:function`."""
    model_file: str | None = None
    """The file with the class of an eager network."""
    serialized_file: str | None = None
    requirements_file: str | None = None
    config_file: str | None = None

    @property
    def version(self) -> str:
        """The version as a text."""
        return str(self.model_version)

    @property
    def handler_file(self) -> str | None:
        """The handler's file; None if the handler is built in."""
        if self.handler in HANDLERS:
            return None
        file = self.handler.partition(":")[0]
        return file if file.endswith(_CODE_SUFFIX) else f"{file}{_CODE_SUFFIX}"


class _Manifest(msgspec.Struct, frozen=True, kw_only=True):
    model: ManifestModel
    runtime: str = "python"


@dataclass(frozen=True, slots=True, kw_only=True)
class Archived:
    """Facts about an archive, read without unpacking it."""

    path: Path
    model: ManifestModel
    manifest: Mapping[str, Any]
    """The whole manifest, as its JSON says."""
    files: Mapping[str, int]
    """The bytes of each file."""
    numbers: Mapping[str, int] = field(default_factory=dict)
    """Values of `model-config.yaml` that TorchServe's front end uses: `batchSize` and others."""
    unread: tuple[str, ...] = ()
    """Such values that the file has in another form than `key: number` at the start of a line."""

    config_text: str = ""
    """The text of `model-config.yaml`; empty without one."""

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model.model_name

    @property
    def version(self) -> str:
        """The model's version."""
        return self.model.version

    def config(self) -> dict[str, Any]:
        """Parse the whole of `model-config.yaml`, for handlers; needs the package pyyaml.

        Raises:
            SourceError: It is no mapping, or pyyaml is not installed.
        """
        if not self.config_text:
            return {}
        return read_config(self.config_text, f"{self.path}: {self.model.config_file}")

    @property
    def is_for_cpu(self) -> bool:
        """It asks for the CPU, whatever the host has."""
        return _ON_CPU.search(self.config_text) is not None

    @property
    def num_bytes(self) -> int:
        """The bytes of all its files."""
        return sum(self.files.values())

    @property
    def code(self) -> list[str]:
        """The files of Python in it, which will run when it is served."""
        return [name for name in self.files if name.endswith(_CODE_SUFFIX)]


def is_archive(path: Path) -> bool:
    """Return whether a path is an archive: a file by its name, or a folder with a manifest."""
    if str(path).endswith(ARCHIVE_SUFFIXES):
        return os.path.isfile(path)  # never raises, for any text
    return os.path.isfile(path / MANIFEST)


def read_facts(path: Path) -> Archived:
    """Read what an archive says about itself.

    Raises:
        SourceError: It is no such archive, or is not safe to unpack; says why and what to do.
    """
    if os.path.isdir(path):
        files = _files_of(path)
        return _facts_of(path, files, lambda name, most: _read(path / name, most))
    with opened_archive(path) as archive:
        files = archive.files()
        return _facts_of(path, files, archive.read)


def fault_of(path: Path) -> str:
    """Return why an archive certainly cannot be served; empty if it may be."""
    try:
        read_facts(path)
    except SourceError as error:
        return str(error)
    return ""


def read_config(text: str, name: str) -> dict[str, Any]:
    """Parse a `model-config.yaml`, for handlers. Needs the package pyyaml.

    Raises:
        SourceError: It is no mapping, or pyyaml is not installed.
    """
    try:
        import yaml
    except ImportError:
        raise SourceError(
            f"{name} needs the package pyyaml: pip install 'inferpool[torchserve]'"
        ) from None
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        line = " ".join(str(error).split())
        raise SourceError(f"{name} is not YAML: {line}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise SourceError(f"{name} must be a mapping of names to values")
    return found


def _facts_of(path: Path, files: Mapping[str, int], read: Any) -> Archived:
    if MANIFEST not in files:
        raise SourceError(
            f"{path} has no {MANIFEST}, so it is no archive of TorchServe; make one with "
            "torch-model-archiver"
        )
    raw = read(MANIFEST, MAX_MANIFEST_BYTES)
    try:
        manifest = msgspec.json.decode(raw, type=dict[str, Any])
        parsed = msgspec.convert(manifest, _Manifest)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise SourceError(f"{path}: {MANIFEST} is not a manifest of TorchServe: {error}") from None
    model = parsed.model
    if parsed.runtime not in ("python", "python3"):
        raise SourceError(
            f"{path}: its runtime is {shown_name(parsed.runtime)}; only handlers in Python are "
            "served"
        )
    if not model.handler:
        raise SourceError(f"{path}: {MANIFEST} names no handler")
    named = {
        "handler": model.handler_file,
        "modelFile": model.model_file,
        "serializedFile": model.serialized_file,
        "requirementsFile": model.requirements_file,
        "configFile": model.config_file,
    }
    for key, name in named.items():
        if name and (fault := fault_of_name(name)):
            raise SourceError(f"{path}: {key} {shown_name(name)} in {MANIFEST} {fault}")
        if name and name not in files:
            raise SourceError(
                f"{path}: {MANIFEST} names {shown_name(name)} as {key}, and no such file is in it"
            )
    numbers: dict[str, int] = {}
    unread: tuple[str, ...] = ()
    text = ""
    if model.config_file:
        text = read(model.config_file, MAX_CONFIG_BYTES).decode("utf-8-sig", "replace")
        text = text.replace("\r\n", "\n")
        numbers = {key: int(value) for key, value in _NUMBER.findall(text)}
        if found := _IN_PARTS.search(text):
            raise SourceError(
                f"{path}: {model.config_file} sets {found[1] or found[2]}, which is not served: a "
                "worker here has the whole model, and takes one batch after another"
            )
        unread = tuple(
            each for each in dict.fromkeys(_ANY_KEY.findall(text)) if each not in numbers
        )
    return Archived(
        path=path,
        model=model,
        manifest=manifest,
        files=files,
        numbers=numbers,
        unread=unread,
        config_text=text,
    )


def _files_of(folder: Path) -> dict[str, int]:
    """Return the files of a folder that was unpacked, with their sizes."""
    found: dict[str, int] = {}
    try:
        for place, _, names in os.walk(folder):
            for name in names:
                path = os.path.join(place, name)
                if os.path.isfile(path):
                    found[os.path.relpath(path, folder)] = os.stat(path).st_size
                if len(found) > MAX_FILES:
                    raise SourceError(f"{folder} has more than {MAX_FILES:,} files")
    except OSError as error:
        raise SourceError(f"{folder} cannot be read: {error.strerror}") from None
    return found


def _read(path: Path, most: int) -> bytes:
    try:
        content = read_file(path)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > most:
        raise SourceError(f"{path} has more than {most >> 20} MiB")
    return content
