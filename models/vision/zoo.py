"""Classifiers of torchvision, with its weights, transforms and labels. Worker processes only.

Importing torchvision takes seconds, so this module is imported only for such a source.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
import torchvision  # type: ignore[import-untyped]  # it ships no annotations
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms._presets import (  # type: ignore[import-untyped]  # as above
    ImageClassification,
)

from inferpool.models.errors import CheckpointError, SourceError
from inferpool.models.files.kinds import CHECKPOINT_SUFFIXES, is_checkpoint_path
from inferpool.models.vision.classifier import Classifier
from inferpool.models.vision.transforms import ImageTransform

# Their builders set these when they load published weights: the checkpoint has the second head,
# its inputs are scaled otherwise, and the slow random initialisation is not needed.
_INCEPTIONS = ("googlenet", "inception_v3")


class TorchvisionClassifier(Classifier):
    """Serves the source `torchvision:NAME`.

    Args:
        name: A name in torchvision.models.
        weights: "DEFAULT", a named weight, a checkpoint's path, or None for random weights.
        labels: Names of the classes, or a file with one a line; by default the published weights'.
        options: Keyword arguments of torchvision's builder, such as `num_classes`.
    """

    prepares_apart = True

    def __init__(
        self,
        name: str,
        *,
        weights: str | None = "DEFAULT",
        labels: Sequence[str] | str | None = None,
        **options: Any,
    ) -> None:
        _check_name(name)
        published = torchvision.models.get_model_weights(name)
        self._name = name
        self._options = options
        self.checkpoint = weights if _is_path(weights) else None
        self._published = None
        if weights is not None and self.checkpoint is None:
            self._published = _member(published, name, weights)
        described = self._published or published.DEFAULT
        self._preset = described.transforms()
        categories = _labels(labels, options.get("num_classes"), described.meta["categories"])
        if labels is not None:
            self._options.setdefault("num_classes", len(categories))
        super().__init__(transform=_transform(self._preset), labels=categories)

    @property
    def download(self) -> str:
        """URL that `build_network` will download; empty if there is nothing to download."""
        url: str = self._published.url if self._published else ""
        return "" if not url or _cache_path(url).is_file() else url

    def build_network(self) -> nn.Module:
        """Build the network, with published weights if asked for, which may be downloaded first.

        Raises:
            CheckpointError: The published weights cannot be downloaded, or are damaged.
            SourceError: The builder does not accept the options.
        """
        if self._published is not None:
            _check_cached(self._published.url)
            return self._build_published()
        options = self._options
        if self._name in _INCEPTIONS:
            options = {"init_weights": False} | options
            if self.checkpoint is not None:
                options = {"transform_input": True, "aux_logits": True} | options
        return self._call(lambda: torchvision.models.get_model(self._name, **options))

    def transform_image(self, image: Image.Image) -> Tensor:
        """Use our own transform if it equals torchvision's, else torchvision's."""
        if self._equals_ours:
            return super().transform_image(image)
        normalized: Tensor = self._preset(image)
        return normalized

    def check_image_size(self, size: tuple[int, int]) -> None:
        """Apply the rule of `Classifier`: torchvision's transforms resize as ours do."""
        self.transform.check(size)

    @property
    def can_be_quick(self) -> bool:
        """True if the transform is our own, and has a fast way."""
        return self._equals_ours and self.transform.can_be_quick

    @property
    def _equals_ours(self) -> bool:
        return type(self._preset) is ImageClassification

    def _build_published(self) -> nn.Module:
        try:
            return self._call(
                lambda: torchvision.models.get_model(
                    self._name, weights=self._published, progress=False, **self._options
                )
            )
        except (OSError, RuntimeError) as error:
            assert self._published is not None
            raise CheckpointError(
                f"weights {self._published} cannot be loaded from {self._published.url}: {error}"
            ) from error

    def _call(self, build: Callable[[], nn.Module]) -> nn.Module:
        try:
            return build()
        except (TypeError, ValueError) as error:
            options = ", ".join(f"{k}={v!r}" for k, v in self._options.items()) or "no options"
            raise SourceError(
                f"torchvision's builder of {self._name} does not take {options}: {error}"
            ) from error


def _check_name(name: str) -> None:
    names = torchvision.models.list_models(module=torchvision.models)
    if name in names:
        return
    near = get_close_matches(name, names)
    hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(names)}"
    raise SourceError(f"torchvision has no classifier {name!r}: {hint}")


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


def _labels(
    labels: Sequence[str] | str | None, num_classes: object, published: Sequence[str]
) -> list[str]:
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


def _transform(preset: Any) -> ImageTransform:
    (resize,), (crop,) = preset.resize_size, preset.crop_size
    return ImageTransform(
        resize=resize,
        crop=crop,
        interpolation=Image.Resampling[preset.interpolation.name],
        mean=tuple(preset.mean),
        std=tuple(preset.std),
    )


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
