"""Networks of torchvision, with the weights that it publishes. Worker processes only.

Importing torchvision takes seconds, so this module is imported only for such a source.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlparse

import torch
import torchvision  # type: ignore[import-untyped]  # it ships no annotations
from torch import nn

from inferpool.models.errors import CheckpointError, SourceError
from inferpool.models.files.kinds import CHECKPOINT_SUFFIXES, is_checkpoint_path

CLASSIFIERS = torchvision.models
DETECTORS = torchvision.models.detection
SEGMENTERS = torchvision.models.segmentation
_NOUNS = {"models": "classifier", "detection": "detector", "segmentation": "segmenter"}


class PublishedNetwork:
    """A network of torchvision, with published weights, a checkpoint, or random weights.

    Args:
        kind: `CLASSIFIERS`, `DETECTORS` or `SEGMENTERS`.
        name: A name of this kind.
        weights: "DEFAULT", a named weight, a checkpoint's path, or None for random weights.
        options: Keyword arguments of torchvision's builder.

    Raises:
        SourceError: torchvision has no such network or weights.
    """

    def __init__(
        self, kind: ModuleType, name: str, weights: str | None, options: Mapping[str, object]
    ) -> None:
        if name not in names_of(kind):
            raise unknown(name, names_of(kind), _NOUNS[kind.__name__.rpartition(".")[2]])
        published = torchvision.models.get_model_weights(name)
        self.name = name
        self.options = dict(options)
        self.checkpoint = weights if _is_path(weights) else None
        self._published: Any = None
        if weights is not None and self.checkpoint is None:
            self._published = _member(published, name, weights)
        described = self._published or published.DEFAULT
        self.preset: Any = described.transforms()
        """Transform of the published weights."""
        self.meta: Mapping[str, Any] = described.meta

    @property
    def download(self) -> str:
        """URL that `build` will download; empty if there is nothing to download."""
        url: str = self._published.url if self._published else ""
        return "" if not url or _cache_path(url).is_file() else url

    @property
    def weights_text(self) -> str:
        """The weights, in words."""
        if self._published is not None:
            return f"torchvision's weights {self._published.name}"
        return f"the weights of {self.checkpoint}" if self.checkpoint else "random weights"

    def build(self, unpublished: Mapping[str, object]) -> nn.Module:
        """Build the network, with published weights if asked for, which may be downloaded first.

        Args:
            unpublished: Options to add where the weights are not published ones.

        Raises:
            CheckpointError: The published weights cannot be downloaded, or are damaged.
            SourceError: The builder does not accept the options.
        """
        if self._published is not None:
            _check_cached(self._published.url)
            return self._with_published_weights()
        return self._call(
            lambda: torchvision.models.get_model(self.name, **{**unpublished, **self.options})
        )

    def _with_published_weights(self) -> nn.Module:
        try:
            return self._call(
                lambda: torchvision.models.get_model(
                    self.name, weights=self._published, progress=False, **self.options
                )
            )
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"weights {self._published} cannot be loaded from {self._published.url}: {error}"
            ) from error

    def _call(self, build: Callable[[], nn.Module]) -> nn.Module:
        try:
            return build()
        except (TypeError, ValueError) as error:
            options = ", ".join(f"{k}={v!r}" for k, v in self.options.items()) or "no options"
            raise SourceError(
                f"torchvision's builder of {self.name} does not take {options}: {error}"
            ) from error


def names_of(kind: ModuleType) -> list[str]:
    """Return the names of all networks of a kind."""
    names: list[str] = torchvision.models.list_models(module=kind)
    return names


def unknown(name: str, names: Sequence[str], noun: str) -> SourceError:
    """Return the error for a name that torchvision does not have, with those that are near."""
    near = get_close_matches(name, names)
    hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(names)}"
    return SourceError(f"torchvision has no {noun} {name!r}: {hint}")


def labels_of(
    labels: Sequence[str] | str | None, num_classes: object, published: Sequence[str]
) -> list[str]:
    """Return the names of the classes.

    Args:
        labels: The names, or a file with one a line; None for those of the published weights.
        num_classes: Their number, if the options say it.
        published: Names of the published weights.

    Raises:
        SourceError: The file cannot be read.
    """
    if isinstance(labels, str):
        try:
            return Path(labels).read_text("utf-8").splitlines()
        except OSError as error:
            raise SourceError(f"the labels in {labels} cannot be read: {error}") from error
    if labels is not None:
        return [str(label) for label in labels]
    if isinstance(num_classes, int) and num_classes != len(published):
        return [f"class {i}" for i in range(num_classes)]
    return list(published)


def check_number(labels: Sequence[str], num_classes: object) -> None:
    """Check that there is a name for each class that the options say.

    Raises:
        SourceError: There is not.
    """
    if isinstance(num_classes, int) and num_classes != len(labels):
        raise SourceError(
            f"options.labels has {len(labels)} names, but options.num_classes is {num_classes}: "
            "both count the background"
        )


def _is_path(weights: str | None) -> bool:
    return weights is not None and (is_checkpoint_path(weights) or Path(weights).is_file())


def _member(published: Any, name: str, weights: str) -> Any:
    member = weights.rpartition(".")[2]
    if member not in published.__members__:
        names = ", ".join(published.__members__)
        raise SourceError(
            f"torchvision publishes no weights {weights!r} for {name}: it has {names}; "
            f"a checkpoint's name ends in {', '.join(CHECKPOINT_SUFFIXES)}"
        )
    return published[member]


def _cache_path(url: str) -> Path:
    return Path(torch.hub.get_dir(), "checkpoints", Path(urlparse(url).path).name)


def _check_cached(url: str) -> None:
    """Compare a weight file in the cache with the hash in its name.

    torch.hub checks only what it downloads, and unpickles any file it finds, even a damaged one.
    """
    path = _cache_path(url)
    wanted = re.search(r"-([0-9a-f]{8,})\.", path.name)
    if wanted is None or not path.is_file():
        return
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if not digest.startswith(wanted[1]):
        raise CheckpointError(
            f"{path} is damaged: its SHA-256 begins with {digest[: len(wanted[1])]}, not with "
            f"{wanted[1]}; delete it, and it is downloaded again"
        )
