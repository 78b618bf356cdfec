"""Serves folders of transformers, for pictures and for texts. Runs in worker processes only.

Axes: B batch, C = 3 colours, H and W height and width of a picture, h and w those that the network
sees, K classes, Q boxes.
"""

# ruff: noqa: N806 - tensors carry their axes in their names

from collections.abc import Hashable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image

from inferpool.models.base import Model
from inferpool.models.content import Content
from inferpool.models.errors import InputError, ModelError, SourceError
from inferpool.models.files.hugging_face import is_scorer
from inferpool.models.files.networks import FolderOptions, folder_at
from inferpool.models.hugging_face.loading import PictureFolder
from inferpool.models.item import Features, Item
from inferpool.models.label_tolerance import LabelTolerance
from inferpool.models.ragged import outputs_of
from inferpool.models.spec import Placement, TensorSpec
from inferpool.models.text.classifier import TextClassifier
from inferpool.models.tolerance import Tolerance
from inferpool.models.vision.classifier import Classifier
from inferpool.models.vision.masks import labels_at, palette_png, runs_by_label
from inferpool.models.vision.photos import sample_jpegs
from inferpool.models.vision.pictures import MIN_SCORE, picture_of, share_of
from inferpool.models.vision.transforms import ImageTransform

_MOST_CLASSES = 256
"""Values of uint8, and colours of a palette."""


def model_of_folder(
    folder: str,
    *,
    weights: str | None = "DEFAULT",
    min_score: float = MIN_SCORE,
    max_tokens: int | None = None,
    download: bool = False,
    trust_remote_code: bool = False,
    pickled_weights: bool = False,
) -> Model:
    """Return the model of a folder in Hugging Face's form.

    Args:
        folder: The folder, or with `download` a name on the Hub.
        weights: "DEFAULT" for the folder's, a checkpoint's path, or None for random weights.
        min_score: Least score of a box that is answered; for detectors.
        max_tokens: Most tokens of a text; for classifiers of texts.
        download: Whether to fetch the folder from the Hub if there is none of this name.
        trust_remote_code: Whether code that lies in the folder may run.
        pickled_weights: Whether weights may be read from `pytorch_model.bin`.

    Raises:
        ModelError: There is no such folder, or no network in it that can be served.
    """
    options = FolderOptions(
        weights=weights, trust_remote_code=trust_remote_code, pickled_weights=pickled_weights
    )
    path = folder_at(folder, options, download=download)
    if is_scorer(path):
        return TextClassifier(path, options, max_tokens=max_tokens)
    if max_tokens is not None:
        raise SourceError(f"{folder} has no network for texts, which `max_tokens` is for")
    found = PictureFolder(path, options)
    match found.task:
        case "classification":
            return FolderClassifier(found)
        case "detection":
            return FolderDetector(found, min_score)
        case "segmentation":
            return FolderSegmenter(found)


class FolderClassifier(Classifier):
    """Serves a folder with a classifier of pictures; it answers as `Classifier` does.

    Args:
        folder: The folder.
    """

    tolerance: Tolerance = LabelTolerance()
    can_run_ahead = True
    can_be_quick = False

    def __init__(self, folder: PictureFolder) -> None:
        unused = ImageTransform(resize=256, crop=224, mean=(0, 0, 0), std=(1, 1, 1))
        super().__init__(transform=unused, labels=())
        self._folder = folder

    def load(self, placement: Placement) -> None:
        """Load the processor and the network.

        Raises:
            ModelError: They cannot be loaded.
        """
        self.labels, shapes = _opened(self._folder)
        self.has_fixed_shapes = len(shapes) == 1
        self.network = _network(self, self._folder, placement)
        self.device = torch.device(placement.devices[0])
        num = len(self.labels)
        self.outputs = [TensorSpec(name="probabilities", dtype="float32", shape=(-1, num))]

    def preprocess(self, item: Item) -> Features:
        """Turn a picture into float32 [C, h, w], as the folder's processor does."""
        self._top_k(item.parameters)
        picture = _picture_of(self, self._folder, item)
        return {"pixels": self._folder.prepared(picture)["pixels"]}

    def bucket(self, features: Features) -> Hashable:
        """Group pictures that the network sees in one size."""
        return tuple(features["pixels"].shape)

    def collate(self, instances: Sequence[Features]) -> Features:
        """Stack pictures of one size."""
        return {"pixels": self.stack_instances([each["pixels"] for each in instances])}

    def forward(self, batch: Features) -> Features:
        """Compute logits [B, K]."""
        return {"logits": self.network(batch["pixels"].to(self.device, non_blocking=True))}

    def postprocess(self, outputs: Features) -> Features:
        """Turn logits [B, K] into probabilities."""
        logits_BK = outputs["logits"].float()
        found = logits_BK.sigmoid() if self._folder.is_multi_label else logits_BK.softmax(-1)
        return {"probabilities": found}


class _PictureModel(Model):
    """Base of detectors and segmenters.

    Args:
        folder: The folder.
    """

    accepts = "image"
    inputs = (TensorSpec(name="image", dtype="uint8", shape=(-1, -1, -1, 3)),)
    preprocessed = ()
    alone_as_in_batch = False  # a rounding may decide for a box, or for the class of a pixel

    def __init__(self, folder: PictureFolder) -> None:
        self._folder = folder
        self.labels: Sequence[str] = ()

    def load(self, placement: Placement) -> None:
        """Load the processor and the network.

        Raises:
            ModelError: They cannot be loaded.
        """
        self.labels, _ = _opened(self._folder)
        self.network = _network(self, self._folder, placement)
        self.device = torch.device(placement.devices[0])

    def preprocess(self, item: Item) -> Features:
        """Turn a picture into float32 [C, h, w] as the folder's processor does; keep its size."""
        self.wanted(item.parameters)
        picture = _picture_of(self, self._folder, item)
        return self._folder.prepared(picture)

    def wanted(self, parameters: Mapping[str, object]) -> float:
        """Return the least score that is wanted.

        Raises:
            InputError: A parameter is unknown, or out of range.
        """
        for name in parameters:
            raise InputError(f"parameter {name!r} is unknown: this model knows none")
        return 0.0

    def bucket(self, features: Features) -> Hashable:
        """Group pictures that the network sees in one size, so that none needs to be filled up."""
        return tuple(features["pixels"].shape)

    def warmup(self) -> Sequence[Item]:
        """Return a photograph."""
        return [Item(kind="image", payload=memoryview(sample_jpegs()[0]))]

    def samples(self) -> Sequence[Item]:
        """Return none: presets are not tried, since a rounding may change an answer."""
        return ()

    def computed(self, batch: Features) -> Any:
        """Call the network on a batch."""
        assert self.network is not None
        names = [name for name in ("pixels", "mask") if name in batch]
        return self.network(*(batch[name].to(self.device, non_blocking=True) for name in names))


class FolderDetector(_PictureModel):
    """Serves a folder with a detector.

    An instance is an encoded picture, or its pixels. The parameter `min_score` leaves out what the
    network is less sure of; tensors have all that it found.

    Args:
        folder: The folder.
        min_score: Least score of what is answered, from 0 to 1.
    """

    outputs = (
        TensorSpec(name="boxes", dtype="float32", shape=(-1, -1, 4)),
        TensorSpec(name="labels", dtype="int64", shape=(-1, -1)),
        TensorSpec(name="scores", dtype="float32", shape=(-1, -1)),
    )

    def __init__(self, folder: PictureFolder, min_score: float) -> None:
        super().__init__(folder)
        try:
            self._min_score = share_of({}, "min_score", min_score)
        except InputError as error:
            raise SourceError(str(error).replace("parameter", "option", 1)) from None

    def forward(self, batch: Features) -> Features:
        """Find boxes in pixels of the pictures, with the best label of each."""
        logits_BQK, boxes_BQ4 = self.computed(batch)
        found = self._folder.processor.post_process_object_detection(
            SimpleNamespace(logits=logits_BQK, pred_boxes=boxes_BQ4),
            threshold=-1.0,  # all, so that each picture has as many
            target_sizes=batch["size"].to(self.device),
        )
        return {
            name: torch.stack([each[name] for each in found])
            for name in ("boxes", "labels", "scores")
        }

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        """Render what has at least `min_score`, the best first, in pixels of the picture."""
        scores_Q = outputs["scores"]
        (rows,) = (scores_Q >= self.wanted(parameters)).nonzero(as_tuple=True)
        rows = rows[scores_Q[rows].argsort(descending=True, stable=True)]
        return {
            "boxes": outputs["boxes"][rows].tolist(),
            "labels": [self.labels[label] for label in outputs["labels"][rows].tolist()],
            "scores": scores_Q[rows].tolist(),
        }

    def wanted(self, parameters: Mapping[str, object]) -> float:
        """Return the least score that is wanted."""
        for name in parameters:
            if name != "min_score":
                raise InputError(f"parameter {name!r} is unknown: this model knows 'min_score'")
        return share_of(parameters, "min_score", self._min_score)


class FolderSegmenter(_PictureModel):
    """Serves a folder with a segmenter.

    An instance is an encoded picture, or its pixels. Each pixel has one class.

    Args:
        folder: The folder.
    """

    media_types = ("image/png",)
    outputs = (TensorSpec(name="labels", dtype="uint8", shape=(-1, -1, -1)),)

    def load(self, placement: Placement) -> None:
        """Load the processor and the network, and check the number of classes.

        Raises:
            ModelError: They cannot be loaded, or there are too many classes.
        """
        super().load(placement)
        if len(self.labels) > _MOST_CLASSES:
            raise ModelError(
                f"{self._folder.path} has {len(self.labels)} classes; a picture of classes has at "
                f"most {_MOST_CLASSES}"
            )

    def forward(self, batch: Features) -> Features:
        """Find the class of each pixel: a list with uint8 [H, W] for each picture."""
        scores_BKhw = self.computed(batch)
        sizes = [(height, width) for height, width in batch["size"].tolist()]
        labels = [labels_at(*each) for each in zip(scores_BKhw, sizes, strict=True)]
        return outputs_of({"labels": labels})

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        """Render the pixels of each class as runs, by its name."""
        self.wanted(parameters)
        found = runs_by_label(outputs["labels"].numpy())
        return {self.labels[label]: runs for label, runs in found.items()}

    def render_content(self, outputs: Features, parameters: Mapping[str, object]) -> Content:
        """Render the classes as a PNG with a palette, in which they are the numbers of colours."""
        self.wanted(parameters)
        return Content(palette_png(outputs["labels"].numpy()), "image/png")


def _opened(folder: PictureFolder) -> tuple[list[str], set[tuple[int, ...]]]:
    """Open a folder; return its classes, and the sizes that pictures of two shapes get.

    Raises:
        ModelError: It cannot be opened, or its processor does not give pixels.
    """
    found = folder.open()
    pictures = [Image.new("RGB", size) for size in ((64, 48), (48, 80))]
    try:
        shapes = {tuple(folder.features_of(each)["pixels"].shape) for each in pictures}
    except (KeyError, TypeError, ValueError) as error:
        raise SourceError(
            f"the processor of {folder.path} prepares no pictures: {type(error).__name__}: {error}"
        ) from error
    return [str(found[number]) for number in sorted(found)], shapes


def _picture_of(model: Model, folder: PictureFolder, item: Item) -> Image.Image:
    return picture_of(item, max_pixels=model.max_image_pixels, check=folder.check_size)


def _network(model: Model, folder: PictureFolder, placement: Placement) -> Any:
    network = model.load_network(folder.build_network, None, placement)
    folder.report()
    return network
