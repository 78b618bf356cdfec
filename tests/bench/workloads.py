"""Work that servers do side by side: request bodies, models, and the same weights for all."""

import io
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torchvision  # type: ignore[import-untyped]  # it ships no annotations
from PIL import Image
from skimage import data
from torchvision.transforms._presets import (  # type: ignore[import-untyped]  # as above
    ImageClassification,
)

from tests.bench.server import OUT, Bodies

_NUM_TENSORS = 4
_PHOTO_BYTES = 100_000
_QUALITIES = range(98, 60, -1)
_SEED = 0
_NUM_PASSES = 3
_LOGIT_SPREAD = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Work for every server. A new one needs its class in servers/work.py as well."""

    work: str
    """Name of the peers' class in servers/work.py."""
    bodies: Callable[[], Bodies]
    source: str
    """Model that `inferpool serve` serves for the same work."""
    network: str = ""
    """Network of torchvision that all load, with the same weights; "" without a model."""

    def weights(self) -> Path | None:
        """Return the file of the weights, written if it is not there yet; None without a model."""
        return _random_weights(self.network) if self.network else None

    def serve(self) -> Sequence[str]:
        """Return the arguments of `inferpool serve`."""
        weights = self.weights()
        return [self.source, *(["--weights", str(weights)] if weights else [])]


def body_files(suffix: str, contents: Sequence[bytes]) -> Sequence[Path]:
    """Write request bodies, and return their paths."""
    folder = OUT / "bodies"
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{number}{suffix}" for number in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    return files


def tensors(*shape: int) -> Bodies:
    """Return raw float32 tensors of random numbers. The peers ignore the query of the path."""
    generator = np.random.default_rng(_SEED)
    text = ",".join(map(str, shape))
    contents = [generator.standard_normal(shape, np.float32).tobytes() for _ in range(_NUM_TENSORS)]
    files = body_files(f"-{text}.f32", contents)
    return Bodies(files=files, path=f"/predict?dtype=float32&shape={text}")


def photos() -> Bodies:
    """Return six of scikit-image's photographs as JPEG files of about 100 KB."""
    arrays: Mapping[str, Callable[[], np.ndarray]] = {
        "astronaut": data.astronaut,
        "chelsea": data.chelsea,
        "coffee": data.coffee,
        "rocket": data.rocket,
        "immunohistochemistry": data.immunohistochemistry,
        "motorcycle": lambda: data.stereo_motorcycle()[0],
    }
    folder = OUT / "photos"
    files = [folder / f"{name}.jpg" for name in arrays]
    if not all(file.exists() for file in files):
        folder.mkdir(parents=True, exist_ok=True)
        for file, read in zip(files, arrays.values(), strict=True):
            file.write_bytes(_jpeg(read()))
    return Bodies(files=files, content_type="image/jpeg")


def _jpeg(pixels: np.ndarray) -> bytes:
    """Encode an image in the quality whose size is nearest to what is wanted."""
    image = Image.fromarray(pixels)

    def encoded(quality: int) -> bytes:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        return file.getvalue()

    return min(map(encoded, _QUALITIES), key=lambda jpeg: abs(len(jpeg) - _PHOTO_BYTES))


def _random_weights(network: str) -> Path:
    """Make random weights: published ones would need a network, and cost the same to compute.

    With fresh weights nearly every image gets the same answer, and no error of a faster server
    would show. So batch norms learn from the photographs, and the last layer is scaled to tell the
    photographs apart.
    """
    file = OUT / "weights" / f"{network}.pth"
    if file.exists():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(_SEED)
    made = torchvision.models.get_model(network, weights=None)
    images = _images()
    norms = [each for each in made.modules() if isinstance(each, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # the mean of all passes, however few
        norm.reset_running_stats()
    with torch.no_grad():
        for _ in range(_NUM_PASSES):
            made.train()(images + 0.1 * torch.randn_like(images))
        last = [each for each in made.modules() if isinstance(each, torch.nn.Linear)][-1]
        logits = made.eval()(images)
        factor = _LOGIT_SPREAD / (logits - logits.mean(0)).std()
        last.bias.copy_((last.bias - logits.mean(0)) * factor)
        last.weight *= factor
    partial = file.with_suffix(".partial")
    torch.save(made.state_dict(), partial)
    partial.rename(file)
    return file


def _images() -> torch.Tensor:
    """Return the photographs as a classifier gets them."""
    transform = ImageClassification(crop_size=224)
    return torch.stack([transform(Image.open(file).convert("RGB")) for file in photos().files])


def _echo(num_bytes: int) -> Workload:
    content = random.Random(_SEED).randbytes(num_bytes)
    return Workload(
        work="echo",
        bodies=lambda: Bodies(files=body_files(f"-{num_bytes}.bin", [content])),
        source="echo",
    )


WORKLOADS: Mapping[str, Workload] = {
    "echo-1k": _echo(1024),
    "echo-150k": _echo(150_528),
    "jpeg-mobilenet": Workload(
        work="jpeg",
        bodies=photos,
        source="torchvision:mobilenet_v3_small",
        network="mobilenet_v3_small",
    ),
    "tensor-resnet18": Workload(
        work="tensor",
        bodies=lambda: tensors(3, 224, 224),
        source="torchvision:resnet18",
        network="resnet18",
    ),
}
