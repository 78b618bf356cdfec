"""Models of torchvision by their names: classifiers here, detectors and segmenters beside it.

Importing torchvision takes seconds, so this module is imported only for such a source, in workers.
"""

from collections.abc import Sequence
from typing import Any

from PIL import Image
from torch import Tensor, nn
from torchvision.transforms._presets import (  # type: ignore[import-untyped]  # it has no annotations
    ImageClassification,
)

from inferpool.models.base import Model
from inferpool.models.vision.classifier import Classifier
from inferpool.models.vision.published import (
    CLASSIFIERS,
    DETECTORS,
    SEGMENTERS,
    PublishedNetwork,
    labels_of,
    names_of,
    unknown,
)
from inferpool.models.vision.transforms import ImageTransform

# Their builders set these when they load published weights: the checkpoint has the second head,
# its inputs are scaled otherwise, and the slow random initialisation is not needed.
_INCEPTIONS = ("googlenet", "inception_v3")


def torchvision_model(name: str, *, weights: str | None = "DEFAULT", **options: Any) -> Model:
    """Build the model of the source `torchvision:NAME`, of the kind that its name says.

    Args:
        name: A classifier, detector or segmenter of torchvision.models.
        weights: "DEFAULT", a named weight, a checkpoint's path, or None for random weights.
        options: Those of the model's class, and keyword arguments of torchvision's builder.

    Raises:
        SourceError: There is none of this name, or it does not accept the options.
    """
    if name in names_of(CLASSIFIERS):
        return TorchvisionClassifier(name, weights=weights, **options)
    if name in names_of(DETECTORS):
        from inferpool.models.vision.detectors import TorchvisionDetector

        return TorchvisionDetector(name, weights=weights, **options)
    if name in names_of(SEGMENTERS):
        from inferpool.models.vision.segmenters import TorchvisionSegmenter

        return TorchvisionSegmenter(name, weights=weights, **options)
    every = [each for kind in _KINDS for each in names_of(kind)]
    raise unknown(name, every, "classifier, detector or segmenter")


_KINDS = (CLASSIFIERS, DETECTORS, SEGMENTERS)


class TorchvisionClassifier(Classifier):
    """Serves a classifier of torchvision.

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
        self._network = PublishedNetwork(CLASSIFIERS, name, weights, options)
        self.checkpoint = self._network.checkpoint
        self._preset = self._network.preset
        published = self._network.meta["categories"]
        categories = labels_of(labels, options.get("num_classes"), published)
        if labels is not None:
            self._network.options.setdefault("num_classes", len(categories))
        super().__init__(transform=_transform(self._preset), labels=categories)

    @property
    def download(self) -> str:
        """URL that `build_network` will download; empty if there is nothing to download."""
        return self._network.download

    def build_network(self) -> nn.Module:
        """Build the network, with published weights if asked for, which may be downloaded first.

        Raises:
            CheckpointError: The published weights cannot be downloaded, or are damaged.
            SourceError: The builder does not accept the options.
        """
        unpublished: dict[str, object] = {}
        if self._network.name in _INCEPTIONS:
            unpublished = {"init_weights": False}
            if self.checkpoint is not None:
                unpublished |= {"transform_input": True, "aux_logits": True}
        return self._network.build(unpublished)

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


def _transform(preset: Any) -> ImageTransform:
    (resize,), (crop,) = preset.resize_size, preset.crop_size
    return ImageTransform(
        resize=resize,
        crop=crop,
        interpolation=Image.Resampling[preset.interpolation.name],
        mean=tuple(preset.mean),
        std=tuple(preset.std),
    )
