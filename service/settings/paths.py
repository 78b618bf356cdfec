"""The paths of the service, and those that a model may have of its own.

Each part adds the beginning of its paths to the table, also if it is off by default: else a model's
path would be gone once somebody turns the part on. A test compares the table with the routes.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from inferpool.service.settings.names import Key

OWN_PATHS_BY_PART: Mapping[str, Sequence[str]] = {
    "predictions": ("predict",),
    "documentation": ("docs", "openapi.json"),
    "health": ("health", "metrics"),
    "live feed": ("events", "page"),
    "jobs": ("jobs",),
    "operations": ("admin",),
    "KServe's version 1": ("v1",),
    "Open Inference Protocol": ("v2",),
    "Text Embeddings Inference": (
        "tei",
        "info",
        "embed",
        "embed_all",
        "embed_sparse",
        "similarity",
        "rerank",
        "tokenize",
        "decode",
    ),
}
"""The first segments of the paths that there are, by the part that has them."""
OWN_PATHS = frozenset(path for paths in OWN_PATHS_BY_PART.values() for path in paths)
OF_PROTOCOLS = frozenset(
    [
        *("ping", "models", "invocations", "predictions", "explanations", "wfpredict"),
        "api-description",
    ]
)
"""The first segments of the paths that other services of models have, such as TorchServe and
SageMaker: clients of these expect their protocol there."""

_MAX_LENGTH = 256
_SEGMENTS = re.compile(r"(/[A-Za-z0-9._~!$&'()*+,;=:@-]+)+")
"""Segments of a path that are not empty, without a percent sign (RFC 3986, 3.3): calls are compared
with it after their paths are decoded."""


def check_path(path: str, root_path: str = "") -> str:
    """Return a path that a model may have of its own.

    Args:
        path: The path; empty if the model is to have none.
        root_path: The setting of that name, which the service removes from paths.

    Raises:
        ValueError: It may not; the message says why, as the end of a sentence.
    """
    if not path:
        return path
    if len(path) > _MAX_LENGTH or not _SEGMENTS.fullmatch(path):
        raise ValueError(
            "is no path for a model: write such as /classify or /teams/vision, with letters, "
            f"digits and -._~!$&'()*+,;=:@, {_MAX_LENGTH} characters at most, and no '/' at the end"
        )
    segments = path[1:].split("/")
    if {".", ".."} & set(segments):
        raise ValueError("is no path for a model: clients and proxies resolve '.' and '..' in it")
    first = segments[0]
    if first in OWN_PATHS:
        raise ValueError(f"begins with /{first}, which is a path of the service itself")
    if first in OF_PROTOCOLS:
        raise ValueError(f"begins with /{first}, where clients expect a protocol of that name")
    if fault := root_fault(path, root_path):
        raise ValueError(fault)
    return path


def root_fault(path: str, root_path: str) -> str:
    """Return what is wrong with a model's path that the service would not see; or nothing."""
    if root_path and (path == root_path or path.startswith(f"{root_path}/")):
        return f"begins with {root_path}, the root_path, which is removed from paths"
    return ""


def path_faults(values: Mapping[Key, object]) -> Iterator[tuple[Key, str]]:
    """Yield each path of a model in given settings that two have, or that begins like the root.

    With each comes what is wrong with it, as the end of a sentence.
    """
    root_path = str(values.get(("root_path",), "")).removesuffix("/")
    paths: list[tuple[str, str]] = []
    for key, path in values.items():
        if key[0] == "models" and key[2:] == ("path",) and isinstance(path, str):
            fault = shared_path(key[1], path, paths) or root_fault(path, root_path)
            paths.append((key[1], path))
            if fault:
                yield key, fault


def shared_path(name: str, path: str, others: Iterable[tuple[str, str]]) -> str:
    """Return what is wrong with a model's path if another model has it; empty if none does.

    `others` has the names of models with their paths.
    """
    for other, theirs in others:
        if path and theirs == path and other != name:
            return f"is the path of the model {other} too; each needs one of its own"
    return ""
