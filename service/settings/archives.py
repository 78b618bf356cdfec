"""Says what an archive of TorchServe means in the settings of a model. No torch."""

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from inferpool.models.errors import SourceError
from inferpool.models.files.kinds import ARCHIVE_MANIFEST, archive_of
from inferpool.models.torchserve.archive import Archived, read_facts

_MAX_TAR_BYTES = 64 << 20
_ONE_BY_ONE = ("object_detector",)
"""Built-in handlers that keep the size of a picture, so that few pictures fit into one batch."""


def settings_of_archive(
    facts: Archived, given: Mapping[str, int] | None = None
) -> dict[str, object]:
    """Return the settings that an archive asks for.

    A handler of the archive's own gets one input at a time unless `batchSize` says more: that is
    what TorchServe does, and many handlers count on it.

    Args:
        facts: The archive.
        given: Numbers that hold where it has none, by their names in `model-config.yaml`.
    """
    own = {key: value for key, value in facts.numbers.items() if value > 0}
    least, most = own.get("minWorkers", 0), own.get("maxWorkers", 0)
    if not 0 < least <= most:  # TorchServe then uses neither
        own = {key: value for key, value in own.items() if not key.endswith("Workers")}
    numbers = {**(given or {}), **own}
    found: dict[str, object] = {}
    if size := numbers.get("batchSize"):
        found["max_batch_size"] = size
    elif facts.model.handler_file is not None or facts.model.handler in _ONE_BY_ONE:
        found["max_batch_size"] = 1
    if delay := numbers.get("maxBatchDelay"):
        found["batch_wait_ms"] = float(delay)
    if workers := numbers.get("minWorkers"):
        found["replicas"] = workers
    if timeout := numbers.get("responseTimeout"):
        found["batch_timeout_s"] = float(timeout)
    if timeout := numbers.get("startupTimeout"):
        found["load_timeout_s"] = float(timeout)
    if facts.is_for_cpu:
        found["devices"] = "cpu"
    return found


def settings_of_source(source: str) -> dict[str, object]:
    """Return the settings that a source asks for, if it is an archive that can be read.

    A large `.tar.gz` would have to be unpacked for that, and others wait meanwhile; so its inputs
    are computed one at a time unless somebody says more.
    """
    path = archive_of(source)
    if path and source.endswith(".tar.gz") and _size_of(path) > _MAX_TAR_BYTES:
        return {"max_batch_size": 1}
    facts = _facts_of(source)
    return {} if facts is None else settings_of_archive(facts)


def name_of_source(source: str) -> str | None:
    """Return the name that an archive gives its model; None if the source is none."""
    facts = _facts_of(source)
    return None if facts is None else facts.name


def _size_of(path: Path) -> int:
    return os.path.getsize(path) if os.path.isfile(path) else 0


def needs_yaml(path: Path) -> bool:
    """Return whether an archive has a `model-config.yaml`, which its worker parses."""
    facts = _facts_of(str(path))
    return facts is not None and facts.model.config_file is not None


def _facts_of(source: str) -> Archived | None:
    path = archive_of(source)
    if path is None:
        return None
    try:
        marked = path if os.path.isfile(path) else path / ARCHIVE_MANIFEST
        status = marked.stat()
        return _read(path.absolute(), status.st_mtime_ns, status.st_size, status.st_ino)
    except (SourceError, OSError, ValueError):
        return None  # what loads it will report it


@lru_cache(maxsize=8)
def _read(path: Path, *_: int) -> Archived:
    """Read an archive once while it stays as it is; a large `.tar.gz` is unpacked for it."""
    return read_facts(path)
