"""TorchServe's handlers for pictures: the same pixels and answers. Worker processes only.

A picture keeps its own mode and orientation, since TorchServe changes neither: a gray one, or one
with alpha, does not fit a network of three colours there either.
"""

import base64
from typing import Any

import torch
from torchvision import transforms  # type: ignore[import-untyped]  # it ships no annotations

from inferpool.models.errors import InputError
from inferpool.models.spec import MAX_IMAGE_PIXELS
from inferpool.models.torchserve.handlers.base import BaseHandler, timed
from inferpool.models.torchserve.handlers.util import map_class_to_label
from inferpool.models.vision.images import check_size, decode_as_stored

_SHORT_EDGE = 256
_NUM_COLORS = 3
_RESIZED = transforms.Compose(
    [
        transforms.Resize(_SHORT_EDGE),
        transforms.CenterCrop(224),
        transforms.ToTensor(),
        transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
    ]
)
"""Steps of TorchServe 0.12's image_classifier and image_segmenter: the short edge becomes 256."""


class VisionHandler(BaseHandler):
    """Makes a batch of tensors of encoded pictures, or of lists of numbers."""

    image_processing: Any
    """Called with a PIL picture, makes its tensor. Classes give it, users override it."""
    max_image_pixels = MAX_IMAGE_PIXELS

    def initialize(self, context: Any) -> None:
        """Load the network; see `BaseHandler`."""
        super().initialize(context)
        limit = context.system_properties.get("max_image_pixels")
        self.max_image_pixels = MAX_IMAGE_PIXELS if limit is None else limit

    @timed
    def preprocess(self, data: Any) -> Any:
        """Return a tensor of the whole batch on the device.

        Raises:
            InputError: A picture is damaged or too large, or is none.
        """
        rows = [row.get("data") or row.get("body") for row in data]
        return torch.stack([self._tensor_of(row) for row in rows]).to(self.device)

    def _tensor_of(self, image: Any) -> Any:
        try:
            if isinstance(image, str):
                image = base64.b64decode(image)
            elif not isinstance(image, bytes | bytearray):
                return torch.tensor(image, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"a picture is a file's bytes, its base64, or lists of numbers: {error}"
            ) from error
        picture = decode_as_stored(
            image, max_pixels=self.max_image_pixels, check=self._check_stretch
        )
        if self.image_processing is _RESIZED and len(picture.getbands()) != _NUM_COLORS:
            raise InputError(
                f"the picture has the mode {picture.mode}, and this model needs RGB: convert it"
            )
        return self.image_processing(picture)

    def _check_stretch(self, size: tuple[int, int]) -> None:
        """Refuse a picture that becomes too large when its short edge is enlarged."""
        short, long = sorted(size)
        if short < _SHORT_EDGE:
            check_size(_SHORT_EDGE, _SHORT_EDGE * long // short, max_pixels=self.max_image_pixels)


class ImageClassifier(VisionHandler):
    """Answers with the most likely classes of a picture: `{name: probability}` in their order."""

    topk = 5
    image_processing = _RESIZED

    def set_max_result_classes(self, topk: int) -> None:
        """Set the number of classes in an answer."""
        self.topk = topk

    def get_max_result_classes(self) -> int:
        """Return the number of classes in an answer."""
        return self.topk

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        """Return the names and probabilities of the most likely classes."""
        found = torch.softmax(data, dim=1).topk(self.topk, dim=1)
        return map_class_to_label(found.values.tolist(), self.mapping, found.indices.tolist())


class ObjectDetector(VisionHandler):
    """Answers with the objects in a picture: `[{name: [left, top, right, bottom], "score": s}]`."""

    threshold = 0.5
    image_processing = transforms.Compose([transforms.ToTensor()])

    def postprocess(self, data: Any) -> list[Any]:
        """Return the boxes of each picture with at least the threshold's score."""
        return [self._objects_of(each) for each in data]

    def _objects_of(self, found: dict[str, Any]) -> list[dict[str, Any]]:
        is_shown = found["scores"] >= self.threshold
        labels, boxes, scores = (
            found[name][is_shown].tolist() for name in ("labels", "boxes", "scores")
        )
        names = map_class_to_label([[box] for box in boxes], self.mapping, [[n] for n in labels])
        return [{**each, "score": score} for each, score in zip(names, scores, strict=True)]


class ImageSegmenter(VisionHandler):
    """Answers with the class of each pixel and its probability: [height, width, 2]."""

    image_processing = _RESIZED

    def postprocess(self, data: Any) -> list[Any]:
        """Return the likeliest class of each pixel, as a float, and its probability."""
        best = torch.softmax(data["out"], dim=1).max(dim=1)
        answers: list[Any] = torch.stack(
            [best.indices.to(best.values.dtype), best.values], dim=3
        ).tolist()
        return answers
