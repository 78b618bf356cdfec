"""The paths of TorchServe's inference API, and the models that they ask for. Event loop.

Sources: `InferenceRequestHandler.java` of pytorch/serve (0.12), and docs/inference_api.md there.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from inferpool.service.api.exchange import DEFAULT_MODEL, VERSIONS, Call, ModelEntry, path_of
from inferpool.service.settings.paths import OF_PROTOCOLS, OWN_PATHS
from inferpool.service.settings.properties import key_of_model

MAX_FIELDS = 256
"""The most fields of a query or a form."""
_MODEL_NAME = b"model_name"
_MAX_NAME_BYTES = 256
"""The most of a model's name that is read; in a form it may be as long as the body."""


class AskedPath(NamedTuple):
    """A model that a path asks for."""

    name: str | None
    """The model's name; None if the path has none."""
    version: str = ""
    """The version in TorchServe's words, such as "1.0"; empty for the default one."""
    rest: str = ""
    """The segments behind the version."""
    has_fields: bool = True
    """The query has fields for the handler."""


def asked_in(path: str) -> AskedPath | None:
    """Return what a path asks for; None if TorchServe has nothing there."""
    first, *others = path.strip("/").split("/")
    if first == "predictions":
        if not others:
            return None
        name, version, *rest = *others, *([""] if len(others) == 1 else [])
        return AskedPath(name, version, "/".join(rest), has_fields=False)
    if first == "invocations":
        return AskedPath(None) if not others else None
    if first == "models":
        return AskedPath(others[0]) if len(others) == 2 and others[1] == "invoke" else None
    if first in OWN_PATHS or first in OF_PROTOCOLS or others[-1:] != ["predict"]:
        return None
    return AskedPath(first, "".join(others[:-1])) if len(others) <= 2 else None


def key_in(call: Call, models: Mapping[str, ModelEntry]) -> str | None:
    """Return the key of the version that a call asks for.

    It is None if its body may name the model, and a key that nothing has if there is no such model.
    """
    asked, name = asked_in(call.path), named_in(call)
    assert asked is not None
    return key_of(models, name, asked.version) if name is not None else _only_key(models)


def named_in(call: Call) -> str | None:
    """Return the name of a model that a call's path or query has; None if they have none."""
    asked = asked_in(call.path)
    if asked is not None and asked.name is not None:
        return asked.name
    return name_among(fields_of(call.query))


def name_among(fields: Sequence[tuple[bytes, bytes]]) -> str | None:
    """Return the name of a model that the fields of a query or form have; the first one counts."""
    name = dict(reversed(fields)).get(_MODEL_NAME)
    return None if name is None else name[:_MAX_NAME_BYTES].decode(errors="replace")


def key_of(models: Mapping[str, ModelEntry], name: str, version: str = "") -> str:
    """Return the key of a version of a model; of none, if there is no such version.

    Args:
        models: All versions, as in `Predict.models`.
        name: Our name of the model, or that of an archive.
        version: That of an archive, or else our number; empty for the default one.
    """
    is_known = name in models or not name
    others = () if is_known else (key for key, _ in _entries_of(models, name))
    default = next((key for key in others if VERSIONS not in key), name)
    if not version:
        return default if default != DEFAULT_MODEL else ""
    unread = ""
    for key, entry in _entries_of(models, name):
        if not _has_loaded(entry):
            unread = unread or key  # it has not loaded, and says so if it is asked
        elif version in _versions_of(entry):
            own = path_of(entry.name, entry.version)  # canaries get no calls for it
            return own if own in models else key
    return unread or f"{default}{VERSIONS}{version!r}"  # none of our numbers, which have no quotes


def fields_of(text: bytes) -> list[tuple[bytes, bytes]]:
    """Return the fields of a query, or of a form that is encoded as one (WHATWG URL, 5.1)."""
    pairs = [each.partition(b"=") for each in text.split(b"&", MAX_FIELDS + 1) if each]
    return [(_decoded(name), _decoded(value)) for name, _, value in pairs]


def _decoded(text: bytes) -> bytes:
    return unquote_to_bytes(text.replace(b"+", b" "))


def _entries_of(models: Mapping[str, ModelEntry], name: str) -> list[tuple[str, ModelEntry]]:
    """Return the versions of a model; those of our name go first.

    One that has not loaded has no name but the key that TorchServe's settings made of it.
    """
    named = [
        (key, entry)
        for key, entry in models.items()
        if key[:1] != "/" and key.partition(VERSIONS)[0] == name
    ]
    archives = [
        (key, entry)
        for key, entry in models.items()
        if key[:1] != "/" and (facts := entry.interface.archive) is not None and facts.name == name
    ]
    if not named and not archives:
        key = key_of_model(name)
        return [(key, models[key])] if key in models and not _has_loaded(models[key]) else []
    return named + archives


def _has_loaded(entry: ModelEntry) -> bool:
    return entry.interface.archive is not None or entry.interface.media_types is not None


def _versions_of(entry: ModelEntry) -> tuple[str, ...]:
    archive = entry.interface.archive
    return (str(entry.version), f"{entry.version}.0") if archive is None else (archive.version,)


def _only_key(models: Mapping[str, ModelEntry]) -> str | None:
    """Return the key of the only model there is; None if there are several."""
    keys: dict[str, str] = {}
    for key, entry in models.items():
        if "/" not in key:
            archive = entry.interface.archive
            name = key if archive is None else archive.name
            keys[name] = key if key == name else keys.get(name, key)
    return next(iter(keys.values())) if len(keys) == 1 else None
