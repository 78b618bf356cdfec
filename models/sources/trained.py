"""Classifiers that `inferpool train` has made, from the folder of a run. Worker processes only."""

from collections.abc import Sequence
from functools import cached_property
from io import BytesIO
from pathlib import Path

from PIL import Image
from torch import nn

from inferpool.models.errors import CheckpointError, DataError, SourceError
from inferpool.models.files.checkpoint import StoredWeights
from inferpool.models.files.image_table import rows_of
from inferpool.models.files.reading import read_file
from inferpool.models.files.run_folder import Card, RunFolder, TransformCard, read_card, read_labels
from inferpool.models.item import Item
from inferpool.models.sources.networks import build_classifier
from inferpool.models.vision.classifier import Classifier
from inferpool.models.vision.images import decode_image
from inferpool.models.vision.transforms import ImageTransform

_MOST_SAMPLES = 64
_MOST_SAMPLE_BYTES = 16 << 20
"""They are decoded at each start, which takes about half a second."""
_LEAST_SAMPLES = 16
"""With fewer held-out images, presets are tried on photographs."""
_MOST_EXAMPLE_BYTES = 8 << 10
_EXAMPLE_EDGES = (256, 128, 64)
_TYPES = {b"\xff\xd8\xff": "image/jpeg", b"\x89PNG": "image/png"}
"""Content types by the first bytes of a file."""


class TrainedClassifier(Classifier):
    """Serves the folder of a run.

    Args:
        folder: The folder; the run has ended.
        weights: "DEFAULT" for the run's, a checkpoint's path, or None for random weights.
        card: The card, if the folder has none yet.

    Raises:
        SourceError: The folder is no finished run, or its card or its labels cannot be read.
    """

    prepares_apart = True

    def __init__(
        self, folder: Path, *, weights: str | None = "DEFAULT", card: Card | None = None
    ) -> None:
        self._files = RunFolder(folder)
        self._card = card or read_card(folder)
        labels = read_labels(folder)
        if not labels:
            raise SourceError(f"{self._files.labels} has no labels")
        super().__init__(transform=transform_of(self._card.transform), labels=labels)
        self.checkpoint = self._files.weights if weights == "DEFAULT" else weights

    def build_network(self) -> nn.Module:
        """Build the network with random weights, and check that the run's are for as many classes.

        Raises:
            SourceError: There is no such network.
            CheckpointError: The weights cannot be read, or are for other classes.
        """
        card, num_classes = self._card, len(self.labels)
        network = build_classifier(card.model, None, num_classes=num_classes, options=card.options)
        if self.checkpoint is not None:
            self._check_classes(network, self.checkpoint)
        return network

    def example(self) -> tuple[bytes, str] | None:  # type: ignore[override]  # it may be a method
        """Return one of the held-out images, made small if it is large; None if they are gone."""
        if not self._held_out:
            return None
        data = self._held_out[0]
        kind = next((type for lead, type in _TYPES.items() if data.startswith(lead)), None)
        if kind is not None and len(data) <= _MOST_EXAMPLE_BYTES:
            return data, kind
        image = decode_image(data, max_pixels=self.max_image_pixels)
        for edge in _EXAMPLE_EDGES:
            image.thumbnail((edge, edge))
            encoded = BytesIO()
            image.save(encoded, "JPEG", quality=85)
            if encoded.tell() <= _MOST_EXAMPLE_BYTES:
                break
        return encoded.getvalue(), "image/jpeg"

    def samples(self) -> Sequence[Item]:
        """Return images that the run has held out, or photographs if those are gone."""
        return self._own_samples() or super().samples()

    def encoded_samples(self) -> Sequence[Item]:
        """Return the images of `samples`, or photographs in common sizes."""
        if not self.can_be_quick:
            return ()
        return self._own_samples() or super().encoded_samples()

    @cached_property
    def _held_out(self) -> Sequence[bytes]:
        """Files of held-out images that can be read, evenly spaced in their table."""
        try:
            paths = [path for _, (path, _) in rows_of(self._files.validation)]
        except DataError:  # the folder was moved without it
            return ()
        num = min(_MOST_SAMPLES, len(paths))
        found: list[bytes] = []
        left = _MOST_SAMPLE_BYTES
        for path in (paths[index * len(paths) // num] for index in range(num)):
            try:
                data = read_file(Path(path))
                decode_image(data, max_pixels=self.max_image_pixels, check=self.check_image_size)
            except (OSError, ValueError):  # InputError is one
                continue
            left -= len(data)
            if left < 0:
                break
            found.append(data)
        return found

    def _own_samples(self) -> Sequence[Item]:
        if len(self._held_out) < _LEAST_SAMPLES:
            return ()
        return [Item(kind="image", payload=memoryview(data)) for data in self._held_out]

    def _check_classes(self, network: nn.Module, path: Path | str) -> None:
        """Say which file is wrong if the labels are more or fewer than the classes of the weights.

        Raises:
            CheckpointError: They are, or the weights cannot be read.
        """
        shapes = StoredWeights(path, network).shapes
        num = len(self.labels)
        for name, tensor in network.state_dict().items():
            shape = shapes.get(name, tensor.shape)
            is_other = len(shape) == tensor.dim() > 0 and shape[0] != tensor.shape[0]
            if is_other and tensor.shape[0] == num and shape[1:] == tuple(tensor.shape[1:]):
                raise CheckpointError(
                    f"{self._files.labels} has {num} labels, but the weights in {path} are for "
                    f"{shape[0]} classes"
                )


def transform_of(card: TransformCard) -> ImageTransform:
    """Return the transform that a run's card describes."""
    return ImageTransform(
        resize=card.resize,
        crop=card.crop,
        interpolation=Image.Resampling[card.interpolation.upper()],
        mean=card.mean,
        std=card.std,
    )
