"""Work that servers do side by side: request bodies, models, and the same weights for all."""

import io
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torchvision  # type: ignore[import-untyped]  # it ships no annotations
from PIL import Image
from skimage import data
from torchvision.transforms._presets import (  # type: ignore[import-untyped]  # as above
    ImageClassification,
)

from inferpool.models.text.prose import PROSE
from tests.bench.server import OUT, Bodies

_NUM_TENSORS = 4
_PHOTOS = ("astronaut", "chelsea", "coffee", "rocket", "immunohistochemistry", "stereo_motorcycle")
_PHOTO_BYTES = 100_000
_SEED = 0
_NUM_PASSES = 3
_LOGIT_SPREAD = 3.0
_JSON = "application/json"


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

    def weights(self) -> str:
        """Return the file of the weights, written if it is not there yet; "" without a model."""
        return str(_random_weights(self.network)) if self.network else ""

    def serve(self) -> Sequence[str]:
        """Return the arguments of `inferpool serve`."""
        return [self.source, *(["--weights", self.weights()] if self.network else [])]


def photograph(name: str) -> Image.Image:
    """Return one of scikit-image's photographs, of a pair the left one."""
    pixels = getattr(data, name)()
    return Image.fromarray(pixels[0] if isinstance(pixels, tuple) else pixels).convert("RGB")


def photos() -> Bodies:
    """Return six of scikit-image's photographs as JPEG files of about 100 KB."""
    files = [OUT / "bodies" / f"{name}.jpg" for name in _PHOTOS]
    if not all(file.exists() for file in files):
        files = [*_write(".jpg", {name: _jpeg(photograph(name)) for name in _PHOTOS})]
    return Bodies(files=files, content_type="image/jpeg")


def tensors(*shape: int) -> Bodies:
    """Return raw float32 tensors of random numbers. The peers ignore the query of the path."""
    generator = np.random.default_rng(_SEED)
    text = ",".join(map(str, shape))
    contents = {f"{number}-{text}": generator.standard_normal(shape, np.float32).tobytes()
                for number in range(_NUM_TENSORS)}  # fmt: skip
    return Bodies(files=_write(".f32", contents), path=f"/predict?dtype=float32&shape={text}")


def texts() -> Bodies:
    """Return JSON calls with a text of 24 words each."""
    words = PROSE.split()
    calls = {f"{start}": {"instances": [" ".join(words[start : start + 24])]}
             for start in range(0, 192, 24)}  # fmt: skip
    contents = {name: json.dumps(call).encode() for name, call in calls.items()}
    return Bodies(files=_write("-text.json", contents), content_type=_JSON)


def asked_of(source: str, path: str = "/predict") -> Bodies:
    """Return photographs, or numbers if the source is the stand-in `sleep`."""
    if source == "sleep":
        files = _write(".json", {"number": b'{"instances":[{"n":1}]}'})
        return Bodies(files=files, content_type=_JSON, path=path)
    return Bodies(files=photos().files, content_type="image/jpeg", path=path)


def echo_bodies(num_bytes: int) -> Bodies:
    """Return a body of random bytes, as the source `echo` counts them."""
    content = random.Random(_SEED).randbytes(num_bytes)
    return Bodies(files=_write(".bin", {f"{num_bytes}": content}))


def _write(suffix: str, contents: Mapping[str, bytes]) -> Sequence[Path]:
    folder = OUT / "bodies"
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / f"{name}{suffix}").write_bytes(content)
    return [folder / f"{name}{suffix}" for name in contents]


def _jpeg(image: Image.Image) -> bytes:
    """Encode an image in the quality whose size is nearest to what is wanted."""

    def encoded(quality: int) -> bytes:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        return file.getvalue()

    return min(map(encoded, range(98, 60, -1)), key=lambda jpeg: abs(len(jpeg) - _PHOTO_BYTES))


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
    transform = ImageClassification(crop_size=224)
    images = torch.stack([transform(Image.open(each).convert("RGB")) for each in photos().files])
    for norm in made.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
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
    partly = file.with_suffix(".partial")
    torch.save(made.state_dict(), partly)
    partly.rename(file)
    return file


WORKLOADS: Mapping[str, Workload] = {
    "echo-1k": Workload(work="echo", bodies=partial(echo_bodies, 1024), source="echo"),
    "echo-150k": Workload(work="echo", bodies=partial(echo_bodies, 150_528), source="echo"),
    "jpeg-mobilenet": Workload(
        work="jpeg",
        bodies=photos,
        source="torchvision:mobilenet_v3_small",
        network="mobilenet_v3_small",
    ),
    "tensor-resnet18": Workload(
        work="tensor",
        bodies=partial(tensors, 3, 224, 224),
        source="torchvision:resnet18",
        network="resnet18",
    ),
}
