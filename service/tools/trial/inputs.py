"""Inputs for any model: made up from its declaration and a seed, or the user's files."""

import io
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferpool.models.bodies import body_of
from inferpool.models.spec import Interface, TensorSpec
from inferpool.models.text.prose import PROSE
from inferpool.service.client.health import ModelState
from inferpool.service.client.safetensors import RawTensor, safetensors_parts
from inferpool.service.tools.trial.connection import TrialError

_ANY_LENGTH = 16
"""Length of a dimension of any length, in a tensor of one or two dimensions."""
_ANY_EDGE = 64
"""Length of such a dimension in a tensor of three or more, which looks like an image."""
_MAX_INTEGER = 10
"""Made-up whole numbers are smaller than this: they may be indices into a table."""
_IMAGE_EDGE = 256
_LOG_WORDS = 2.2
"""Logarithm of the median number of words, nine."""
_MAX_WORDS = 100
_MAX_BYTES = 512 * 2**20
_CONTENT_TYPES = {
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".png": "image/png",
    ".webp": "image/webp",
    ".gif": "image/gif",
    ".bmp": "image/bmp",
    ".tif": "image/tiff",
    ".tiff": "image/tiff",
    ".npy": "application/x-npy",
    ".safetensors": "application/safetensors",
    ".json": "application/json",
    ".bin": "application/octet-stream",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialInput:
    """The body of a request that can be repeated."""

    name: str
    body: bytes
    content_type: str


def made_up(model: ModelState, seed: int, count: int) -> list[TrialInput]:
    """Return made-up inputs for a model that declares its inputs or has an example.

    An example that is no text is used once, for any count.

    Raises:
        TrialError: Its inputs are unknown.
    """
    specs, example = specs_of(model), model.example
    if not specs and isinstance(example, str):
        interface = interface_of(model)
        rng = [random.Random(f"{seed} {i}") for i in range(count)]
        return [_text(f"input {i}", each, interface) for i, each in enumerate(rng)]
    if example is not None and (model.reads_own_form or not specs):
        body = json.dumps(body_of(interface_of(model), example)).encode()
        return [TrialInput(name="its example", body=body, content_type="application/json")]
    if model.reads_own_form or not specs:
        raise TrialError(
            "nobody can know what the model takes, so nothing can be made up for it: give its "
            "class an `example`, or give some inputs of yours (--inputs PATH)"
        )
    return [_made_up(specs, f"input {i}", np.random.default_rng((seed, i))) for i in range(count)]


def read_inputs(
    path: Path, *, content_type: str | None = None, flag: str = "--inputs"
) -> list[TrialInput]:
    """Read a file as a request body, or all files of a folder that have known suffixes.

    A file of an unknown suffix needs a `content_type`; messages name the path as `flag`.

    Raises:
        TrialError: There is no such file, or one cannot be read.
    """
    known = ", ".join(_CONTENT_TYPES)
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        if path.is_dir():
            files = [each for each in files if each.suffix.lower() in _CONTENT_TYPES]
        if (num_bytes := sum(file.stat().st_size for file in files)) > _MAX_BYTES:
            raise TrialError(
                f"{flag}: {path}: {num_bytes / 2**20:,.0f} MiB; all of it is kept in memory, so "
                f"{_MAX_BYTES // 2**20} MiB is the most"
            )
        inputs = [
            TrialInput(
                name=file.name,
                body=file.read_bytes(),
                content_type=content_type or _CONTENT_TYPES[file.suffix.lower()],
            )
            for file in files
        ]
    except OSError as error:
        raise TrialError(f"{flag}: {error.filename}: {error.strerror}") from error
    except KeyError as error:
        raise TrialError(
            f"{flag}: {path}: its suffix does not tell what it is; use one of {known}"
            + (", or say --content-type" if flag == "--body" else "")
        ) from error
    if not inputs:
        raise TrialError(f"{flag}: there is no file of a known kind in {path} ({known})")
    return inputs


def specs_of(model: ModelState) -> list[TensorSpec]:
    """Return the inputs that a model declares."""
    return msgspec.convert(model.inputs, list[TensorSpec])


def interface_of(model: ModelState) -> Interface:
    """Return how clients speak to a model."""
    return msgspec.convert(model.interface, Interface)


def is_image(specs: Sequence[TensorSpec]) -> bool:
    """Return whether a model's input is an encoded image."""
    return len(specs) == 1 and specs[0].name == "image" and specs[0].dtype == "uint8"


def _made_up(specs: Sequence[TensorSpec], name: str, rng: np.random.Generator) -> TrialInput:
    if is_image(specs):
        return TrialInput(name=name, body=_photo(rng), content_type="image/jpeg")
    arrays = {spec.name: (spec, _array(spec, rng)) for spec in specs}
    tensors = {
        name: RawTensor(spec.dtype, array.shape, memoryview(array.tobytes()))
        for name, (spec, array) in arrays.items()
    }
    body = b"".join(safetensors_parts(tensors))
    return TrialInput(name=name, body=body, content_type="application/safetensors")


def _text(name: str, rng: random.Random, interface: Interface) -> TrialInput:
    words = PROSE.split()
    num_words = min(int(rng.lognormvariate(_LOG_WORDS, 1)) + 2, _MAX_WORDS)
    start = rng.randrange(len(words) - num_words)
    text = " ".join(words[start : start + num_words])
    body = json.dumps(body_of(interface, text)).encode()
    return TrialInput(name=name, body=body, content_type="application/json")


def _array(spec: TensorSpec, rng: np.random.Generator) -> NDArray[np.generic]:
    pattern = spec.instance_shape
    length = _ANY_EDGE if len(pattern) >= 3 else _ANY_LENGTH
    shape = [length if size < 0 else size for size in pattern]
    if spec.dtype == "bool":
        return rng.integers(0, 2, shape).astype(np.bool_)
    if spec.dtype == "bfloat16":  # the upper half of a float32
        floats = rng.standard_normal(shape).astype("<f4")
        return (floats.view("<u4") >> 16).astype("<u2").reshape(shape)
    if spec.dtype.startswith("float"):
        return rng.standard_normal(shape).astype(spec.dtype)
    high = 256 if spec.dtype == "uint8" and prod(shape) >= _ANY_EDGE**2 else _MAX_INTEGER
    return rng.integers(0, high, shape).astype(spec.dtype)


def _photo(rng: np.random.Generator) -> bytes:
    """Return a JPEG of soft colours with sharp shapes before them."""
    from PIL import Image, ImageDraw

    size = (_IMAGE_EDGE, _IMAGE_EDGE)
    coarse = rng.integers(0, 256, (*rng.integers(2, 9, 2), 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(image)
    for _ in range(rng.integers(2, 12)):
        left, top = (int(each) for each in rng.integers(-20, _IMAGE_EDGE - 20, 2))
        width, height = (int(each) for each in rng.integers(10, 160, 2))
        red, green, blue = (int(each) for each in rng.integers(0, 256, 3))
        draw = pen.ellipse if rng.random() < 0.5 else pen.rectangle
        draw((left, top, left + width, top + height), fill=(red, green, blue))
    encoded = io.BytesIO()
    image.save(encoded, "JPEG", quality=90)
    return encoded.getvalue()
