"""Makes instances that nobody has sent, to try a model with. Worker processes only."""

from collections.abc import Callable, Sequence
from io import BytesIO
from math import prod

import msgspec
import torch
from PIL import Image
from torch import Tensor

from inferpool.models.item import Features, Item
from inferpool.models.spec import DTYPE_BYTES, TensorHeader, TensorSpec

_FREE_SIZE = 32
"""Size of each dimension that may have any: networks of pictures halve it up to five times."""
_MOST_BYTES = 64 << 20
"""Most bytes of a tensor with such dimensions."""

_WORD_CHARS = 16


def made_up(
    inputs: Sequence[TensorSpec],
    generator: torch.Generator,
    numbers: Callable[..., Tensor] = torch.rand,
) -> Item | None:
    """Return an instance as specs describe it: floats by chance, and zeros of all other dtypes.

    Args:
        inputs: The specs.
        generator: Source of the chance.
        numbers: Makes floats; by default from 0 to 1.

    Returns:
        The instance; None if the specs leave a whole shape open, or if it would be large.
    """
    if not inputs or not all(spec.shape for spec in inputs):
        return None
    shapes = [
        tuple(_FREE_SIZE if size == -1 else size for size in spec.instance_shape) for spec in inputs
    ]
    for spec, shape in zip(inputs, shapes, strict=True):
        if -1 in spec.instance_shape and prod(shape) * DTYPE_BYTES[spec.dtype] > _MOST_BYTES:
            return None
    headers, data = [], bytearray()
    for spec, shape in zip(inputs, shapes, strict=True):
        headers.append(TensorHeader(spec.name, spec.dtype, shape, len(data)))
        dtype = getattr(torch, spec.dtype)
        found = torch.zeros(shape, dtype=dtype)
        if dtype.is_floating_point:
            found = numbers(shape, generator=generator).to(dtype)
        data += found.reshape(-1).view(torch.uint8).numpy().tobytes()
    return Item(kind="tensors", payload=memoryview(data), headers=headers)


def varied(item: Item) -> Item | None:
    """Return another instance of an item's kind: a smaller, darker picture, or a text and a word.

    None for other kinds: only their model knows what they may look like.
    """
    if item.kind == "image":
        with Image.open(BytesIO(item.payload)) as image:
            width, height = image.size
            smaller = (max(1, width // 2), max(1, height * 3 // 4))
            other = image.convert("RGB").resize(smaller).point(lambda level: level // 2)
            encoded = BytesIO()
            other.save(encoded, "JPEG" if image.format == "JPEG" else "PNG")
        return Item(kind="image", payload=memoryview(encoded.getvalue()))
    if item.kind == "json" and isinstance(text := item.plain_json(), str):
        word = text.partition(" ")[0][:_WORD_CHARS]  # a model may read few words
        return Item(kind="json", payload=memoryview(msgspec.json.encode(f"{text} {word}")))
    return None


def shrunk(features: Features, generator: torch.Generator) -> Features:
    """Return other features of the same form: each number by chance up to a half nearer to zero.

    A model may look numbers up in tables, and an accelerator fails for good behind their end.
    """
    return {name: _nearer(tensor, generator) for name, tensor in features.items()}


def _nearer(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if tensor.dtype is torch.bool or tensor.is_complex():
        return tensor
    nearer = tensor.double() * (1 - torch.rand(tensor.shape, generator=generator) / 2)
    return (nearer if tensor.is_floating_point() else nearer.ceil()).to(tensor.dtype)
