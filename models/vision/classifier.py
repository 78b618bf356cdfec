"""Image classifiers: from an encoded image to labels. Worker processes only.

Axes: B batch, H height, W width, C = 3 colours, K classes.
"""

# ruff: noqa: N803 - tensors carry their axes in their names

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from inferpool.models.base import Model
from inferpool.models.errors import InputError, ModelError
from inferpool.models.inputs import (
    json_array,
    json_bytes,
    json_place,
    json_texts,
    place_of_non_finite,
)
from inferpool.models.item import Features, Item
from inferpool.models.label_tolerance import LabelTolerance
from inferpool.models.spec import Decoding, Placement, TensorHeader, TensorSpec
from inferpool.models.tolerance import Tolerance
from inferpool.models.vision.device_pictures import DevicePictures, pictures_on
from inferpool.models.vision.gpu_jpegs import MAX_PIXELS, GpuJpegs, decoder_on
from inferpool.models.vision.images import check_size, decode_image, decode_scaled, only_tensor
from inferpool.models.vision.photos import sample_jpegs, sample_views
from inferpool.models.vision.transforms import ImageTransform, Normalize

_DEFAULT_TOP_K = 5


class Classifier(Model):
    """An image classifier. Subclass it and write `build_network`.

    An instance is an encoded image; its pixels (uint8 [H, W, 3], [3, H, W] or gray [H, W] as a
    tensor, or [H, W, 3] as JSON), which are transformed alike; or the network's own input,
    transformed and normalised (float [3, crop, crop]).

    The parameter `top_k` is the number of labels to answer with, best first.
    """

    accepts = "image"
    network: Callable[..., Tensor]
    checkpoint: Path | str | None = None
    """File with the weights of the built network; None leaves it as built."""
    has_fixed_shapes = True
    can_run_ahead = True
    preprocessed = ()
    """Empty, since it is pixels or a normalised input, depending on the request."""
    tolerance: Tolerance = LabelTolerance()

    def __init__(self, *, transform: ImageTransform, labels: Sequence[str]) -> None:
        self.transform = transform
        self.labels = list(labels)
        self.inputs = [TensorSpec(name="image", dtype="uint8", shape=(-1, -1, -1, 3))]
        self.outputs = [
            TensorSpec(name="probabilities", dtype="float32", shape=(-1, len(self.labels)))
        ]
        self.device = torch.device("cpu")
        """Device of the network. Before `load`, and in decoders, it is the CPU."""
        self._normalize_on_cpu = Normalize(transform)

    def build_network(self) -> nn.Module:
        """Build the network on the CPU: float32 [B, C, H, W] to [B, K] logits.

        Raises:
            ModelError: It cannot be built.
        """
        raise NotImplementedError(f"{type(self).__name__} must define build_network()")

    def load(self, placement: Placement) -> None:
        """Load the network, and check that it has as many classes as there are labels.

        Raises:
            ModelError: It has not, or it cannot be loaded.
        """
        blank = torch.zeros(1, 3, self.transform.crop, self.transform.crop)
        network = self.load_network(self.build_network, self.checkpoint, placement, example=[blank])
        self.network = cast("Callable[..., Tensor]", network)
        self.device = torch.device(placement.devices[0])
        self.normalize = Normalize(self.transform).to(self.device)
        with torch.inference_mode():
            shape = tuple(self.network(blank.to(self.device)).shape)
        if shape != (1, len(self.labels)):
            raise ModelError(
                f"for one image the network yields {list(shape)}, "
                f"but there are {len(self.labels)} labels"
            )

    def preprocess(self, item: Item) -> Features:
        """Turn an image into uint8 [crop, crop, C]; keep a network's own input, float32 [C, H, W].

        Decoding on the device leaves plain JPEGs, uint8 [bytes], for `collate` to decode together,
        and pixels, uint8 [1, C, H, W], to transform there.
        """
        self._top_k(item.parameters)
        if item.kind == "tensors":
            return {"image": self._from_tensor(item)}
        if item.kind == "json":
            return {"image": self._from_json(item.payload)}
        return {"image": self._from_encoded(item.payload)}

    def transform_image(self, image: Image.Image) -> Tensor:
        """Turn an RGB image into uint8 [crop, crop, C], or into normalised float32 [C, H, W]."""
        return self.transform.pixels(image)

    def check_image_size(self, size: tuple[int, int]) -> None:
        """Refuse a picture by its width and height, before it is decoded.

        Raises:
            InputError: It is so elongated that `transform_image` would refuse it.
        """
        if type(self).transform_image is Classifier.transform_image:
            self.transform.check(size)

    def collate(self, instances: Sequence[Features]) -> Features:
        """Stack pixels as uint8 [B, H, W, C]; normalise all if one is a normalised input."""
        images = [each["image"] for each in instances]
        if any(image.dim() != 3 for image in images):
            if self._pictures_on_gpu:
                return {"image": self._input_on_gpu(images)}
            images = self._decode_on_gpu(images)
        if all(image.dtype == torch.uint8 for image in images):
            return {"image": stacked(images, self.stack_instances)}
        return {
            "image": self.stack_instances(
                [
                    self._normalize_on_cpu(image[None])[0] if image.dtype == torch.uint8 else image
                    for image in images
                ]
            )
        }

    def forward(self, batch: Features) -> Features:
        """Compute logits [B, K]."""
        x = batch["image"].to(self.device, non_blocking=True)
        if x.dtype == torch.uint8:
            wanted = getattr(self.network, "memory_format", torch.contiguous_format)
            x = self.normalize(x, wanted)
        elif x.dtype not in (torch.float32, getattr(self.network, "input_dtype", None)):
            x = x.float()  # collated for a network that has been replaced since
        return {"logits": self.network(x)}

    def postprocess(self, outputs: Features) -> Features:
        """Turn logits [B, K] into probabilities."""
        return {"probabilities": outputs["logits"].float().softmax(-1)}

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        """Render the `top_k` best labels, best first, with their index and score."""
        top_k = self._top_k(parameters)
        return self._answers(outputs["probabilities"][None], [top_k])[0]

    def render_batch(
        self, outputs: Features, parameters: Sequence[Mapping[str, object]]
    ) -> Sequence[object]:
        """Render a whole batch with one search for the best."""
        top_ks: list[int] = []
        errors: dict[int, InputError] = {}
        for row, each in enumerate(parameters):
            try:
                top_ks.append(self._top_k(each))
            except InputError as error:
                top_ks.append(1)
                errors[row] = error
        answers: list[object] = [*self._answers(outputs["probabilities"], top_ks)]
        for row, refusal in errors.items():
            answers[row] = refusal
        return answers

    def warmup(self) -> Sequence[Item]:
        """Return a plain JPEG of the size that the transform resizes to."""
        encoded = BytesIO()
        edge = self.transform.resize
        Image.new("RGB", (edge + edge // 2, edge + edge // 4), "gray").save(encoded, "JPEG")
        return [Item(kind="image", payload=encoded.getbuffer())]

    def samples(self) -> Sequence[Item]:
        """Return photographs, whole and in parts."""
        return [_pixels_item(np.asarray(view)) for view in sample_views()]

    def encoded_samples(self) -> Sequence[Item]:
        """Return photographs as JPEGs, in sizes common on the web and from cameras."""
        if not self.can_be_quick:
            return ()
        return [Item(kind="image", payload=memoryview(bytearray(data))) for data in sample_jpegs()]

    @property
    def can_be_quick(self) -> bool:
        """True if encoded images have a fast way through the transform."""
        is_ours = type(self).transform_image is Classifier.transform_image
        return is_ours and self.transform.can_be_quick

    @property
    def fast_decodings(self) -> Sequence[Decoding]:
        """The CPU's way, and the device's if it has a decoder."""
        return ("fast", "device") if self._gpu_jpegs else ("fast",)

    def _answers(
        self, probabilities_BK: Tensor, top_ks: Sequence[int]
    ) -> list[list[dict[str, object]]]:
        scores, indices = probabilities_BK.topk(max(top_ks, default=1))
        labels = self.labels
        return [
            [
                {"label": labels[index], "index": index, "score": score}
                for index, score in zip(row_indices[:top_k], row_scores, strict=False)
            ]
            for row_scores, row_indices, top_k in zip(
                scores.tolist(), indices.tolist(), top_ks, strict=True
            )
        ]

    def _top_k(self, parameters: Mapping[str, object]) -> int:
        if not parameters:
            return min(_DEFAULT_TOP_K, len(self.labels))
        for name in parameters:
            if name != "top_k":
                raise InputError(f"parameter {name!r} is unknown: this model knows 'top_k'")
        top_k = parameters["top_k"]
        if type(top_k) is not int or not 1 <= top_k <= len(self.labels):
            raise InputError(
                f"parameter 'top_k' must be a whole number from 1 to {len(self.labels)}, "
                f"not {top_k!r}"
            )
        return top_k

    def _from_tensor(self, item: Item) -> Tensor:
        tensor, header = only_tensor(item), item.headers[0]
        if tensor.dtype == torch.float32:
            return self._checked_input(tensor)
        if tensor.dtype == torch.uint8:
            if tensor.dim() == 3 and tensor.shape[2] != 3 and tensor.shape[0] == 3:
                tensor = tensor.permute(1, 2, 0)
            if tensor.dim() == 2 or (tensor.dim() == 3 and tensor.shape[2] == 3):
                return self._whole_pixels(tensor)
        raise InputError(f"{self._takes()}, not {header.dtype} {list(header.shape)}")

    def _whole_pixels(self, pixels: Tensor) -> Tensor:
        """Transform pixels [H, W, C] or [H, W]; or leave them, as [1, C, H, W], to the device."""
        height, width = pixels.shape[:2]
        if self.decode == "device" and self._pictures_on_gpu and height * width <= MAX_PIXELS:
            check_size(width, height, max_pixels=self.max_image_pixels)
            self.transform.check((width, height))
            colours = pixels if pixels.dim() == 3 else pixels[..., None].expand(-1, -1, 3)
            return colours.permute(2, 0, 1)[None]
        return self._from_pixels(pixels.numpy())

    def _from_encoded(self, payload: memoryview) -> Tensor:
        if self.decode == "fast":
            return self._quick_pixels(payload)
        if self.decode == "device" and self._gpu_jpegs:
            jpeg = self._gpu_jpegs.accept(payload, self.max_image_pixels)
            if jpeg is not None:
                return jpeg
        return self._exact_pixels(payload)

    def _exact_pixels(self, payload: memoryview) -> Tensor:
        image = decode_image(payload, max_pixels=self.max_image_pixels, check=self.check_image_size)
        return self.transform_image(image)

    def _quick_pixels(self, payload: memoryview) -> Tensor:
        image, full_size = decode_scaled(
            payload,
            least_edge=self.transform.least_edge,
            max_pixels=self.max_image_pixels,
            check=self.transform.check,
        )
        return self.transform.quick_pixels(image, full_size)

    @cached_property
    def _gpu_jpegs(self) -> GpuJpegs | None:
        """Decoder of JPEGs on the GPU, if there is one: `preprocess` leaves them to `collate`."""
        decode = decoder_on(self.device)
        if not decode:
            return None
        return GpuJpegs(decode, self.transform, pictures_on(self.device, self.transform))

    @property
    def _pictures_on_gpu(self) -> DevicePictures | None:
        return self._gpu_jpegs.pictures if self._gpu_jpegs else None

    def _input_on_gpu(self, images: list[Tensor]) -> Tensor:
        """Make the network's input of JPEGs, pixels and inputs, on its device."""
        assert self._gpu_jpegs is not None
        found = self._gpu_jpegs.inputs(
            [each for each in images if each.dtype == torch.uint8],
            self._exact_pixels,
            getattr(self.network, "input_dtype", None) or torch.float32,
            getattr(self.network, "memory_format", torch.contiguous_format),
        )
        if len(found) == len(images):
            return found
        others = self.stack_instances([each for each in images if each.dtype != torch.uint8])
        both = torch.cat([found, others.to(found, non_blocking=True)])
        is_other = torch.tensor([each.dtype != torch.uint8 for each in images])
        places = is_other.long().argsort(stable=True).argsort()
        return both[places.to(self.device)]

    def _decode_on_gpu(self, images: list[Tensor]) -> list[Tensor]:
        """Decode the images that are still uint8 [bytes], and put all of them on one device."""
        assert self._gpu_jpegs is not None
        jpegs = [image for image in images if image.dim() == 1]
        decoded = iter(self._gpu_jpegs.pixels(jpegs, self._exact_pixels))
        images = [next(decoded) if image.dim() == 1 else image for image in images]
        are_pixels = all(image.dtype == torch.uint8 for image in images)
        return [image.to(self.device if are_pixels else "cpu") for image in images]

    def _from_json(self, payload: memoryview) -> Tensor:
        text = json_texts(payload, ["image"])["image"]
        where = json_place(payload, "image")
        if (encoded := json_bytes(text, where)) is not None:
            return self._from_encoded(memoryview(encoded))
        if bytes(text[:1]) == b'"':  # in an object; else it would be a picture
            raise InputError(f"{where}: {self._takes()}, not a text")
        numbers = json_array(text, "float32", where=where)
        if numbers.shape == (3, self.transform.crop, self.transform.crop):
            return self._checked_input(torch.from_numpy(numbers))
        if numbers.ndim != 3 or numbers.shape[2] != 3:
            raise InputError(f"{self._takes()}, not numbers of shape {list(numbers.shape)}")
        if not ((numbers >= 0) & (numbers <= 255) & (numbers == numbers.round())).all():
            numbers = json_array(text, "uint8", where=where)  # says which of them is no pixel
        return self._from_pixels(numbers.astype(np.uint8))

    def _from_pixels(self, pixels: NDArray[np.uint8]) -> Tensor:
        height, width = pixels.shape[:2]
        check_size(width, height, max_pixels=self.max_image_pixels)
        image = Image.fromarray(np.ascontiguousarray(pixels))
        return self.transform_image(image.convert("RGB") if image.mode == "L" else image)

    def _checked_input(self, x_CHW: Tensor) -> Tensor:
        edge = self.transform.crop
        if tuple(x_CHW.shape) != (3, edge, edge):
            raise InputError(f"{self._takes()}, not float32 {list(x_CHW.shape)}")
        if place := place_of_non_finite("image", x_CHW):
            raise InputError(f"{place}: the input must be finite")
        return x_CHW

    def _takes(self) -> str:
        edge = self.transform.crop
        return (
            "this model takes an encoded image, its pixels (uint8 [height, width, 3]), "
            f"or a normalised input (float32 [3, {edge}, {edge}])"
        )


@lru_cache
def imagenet_labels() -> Sequence[str]:
    """Return the names of the 1000 classes of ImageNet-1k (ILSVRC 2012), by index."""
    return tuple(
        (files("inferpool.models.vision") / "imagenet.txt").read_text("utf-8").splitlines()
    )


def _pixels_item(pixels: NDArray[np.uint8]) -> Item:
    header = TensorHeader("image", "uint8", pixels.shape, 0)
    return Item(kind="tensors", payload=memoryview(bytearray(pixels.tobytes())), headers=[header])


def stacked(images: list[Tensor], stack: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """Stack pictures of one shape, with `stack` if they do not lie side by side.

    Decoders write those of a batch side by side into shared memory, which may be pinned: these are
    not copied. So the result must not be written to.
    """
    first = images[0]
    step = first.numel()
    memory, begin = first.untyped_storage().data_ptr(), first.storage_offset()
    is_side_by_side = len(images) > 1 and all(
        image.is_contiguous()
        and image.shape == first.shape
        and image.dtype == first.dtype
        and image.untyped_storage().data_ptr() == memory
        and image.storage_offset() == begin + number * step
        for number, image in enumerate(images)
    )
    if not is_side_by_side:
        return stack(images)
    shape = (len(images), *first.shape)
    return first.as_strided(shape, (step, *first.stride()), begin)
