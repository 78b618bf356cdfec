"""Instances and pictures, as the service would hand them to a model."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, TypeVar

import msgspec
import numpy as np
import skimage.data
import torch
from PIL import ExifTags, Image
from torch import Tensor

from inferpool.models.base import Model
from inferpool.models.item import Item
from inferpool.models.spec import Placement, TensorHeader

CPU = Placement(devices=("cpu",))
AnyModel = TypeVar("AnyModel", bound=Model)


def json_item(value: object, **parameters: object) -> Item:
    text = value if isinstance(value, bytes) else msgspec.json.encode(value)
    return Item(kind="json", payload=memoryview(text), parameters=parameters)


def image_item(data: bytes, **parameters: object) -> Item:
    return Item(kind="image", payload=memoryview(bytearray(data)), parameters=parameters)


def bytes_item(data: bytes) -> Item:
    return Item(kind="bytes", payload=memoryview(data))


def tensor_item(tensors: Mapping[str, Tensor], **parameters: object) -> Item:
    payload = bytearray()
    headers = []
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        headers.append(TensorHeader(name, dtype, tuple(tensor.shape), len(payload)))
        payload += tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return Item(kind="tensors", payload=memoryview(payload), headers=headers, parameters=parameters)


def photo(name: str) -> Image.Image:
    """Return a photograph of scikit-image: "chelsea" (a cat), "coffee", "astronaut" ...."""
    return Image.fromarray(getattr(skimage.data, name)())


def jpeg(name: str) -> bytes:
    """Return a photograph as a JPEG file."""
    return encoded(photo(name), quality=92)


def encoded(image: Image.Image, format: str = "JPEG", **options: Any) -> bytes:
    buffer = BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def orientation_exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


def pixels_of(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(int)


def loaded(model: AnyModel) -> AnyModel:
    """Load a model onto the CPU."""
    model.load(CPU)
    return model


def run(model: Model, items: Sequence[Item]) -> dict[str, Tensor]:
    """Compute one batch as a worker does, from its items to its outputs."""
    with torch.inference_mode():
        batch = model.collate([model.preprocess(item) for item in items])
        return dict(model.postprocess(model.forward(batch)))


def answers(model: Model, items: Sequence[Item]) -> list[Any]:
    """Compute one batch as a worker does, from its items to its rendered answers."""
    return list(model.render_batch(run(model, items), [item.parameters for item in items]))
