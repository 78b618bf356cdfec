"""What servers are asked to do side by side: bodies, models, and the same weights for all."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tests.bench.load import Bodies
from tests.bench.photos import photos
from tests.bench.processes import OUT

if TYPE_CHECKING:
    import torch

_NUM_TENSORS = 4
_SEED = 0
_NUM_PASSES = 3
_LOGIT_SPREAD = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What every server is asked to do. To add one, add its work to servers/work.py as well."""

    work: str
    """The name of what a peer does, in servers/work.py."""
    bodies: Callable[[], Bodies]
    source: str
    """What `inferpool serve` is told to serve for the same work."""
    network: str = ""
    """The network of torchvision that all load, with the same weights; "" without a model."""

    def weights(self) -> Path | None:
        """The file of the weights, written if it is not there yet; None without a model."""
        return _random_weights(self.network) if self.network else None

    def serve(self) -> Sequence[str]:
        """The arguments of `inferpool serve`."""
        weights = self.weights()
        return [self.source, *(["--weights", str(weights)] if weights else [])]


def _random_bytes(num_bytes: int) -> Bodies:
    file = OUT / "bodies" / f"{num_bytes}.bin"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(random.Random(_SEED).randbytes(num_bytes))
    return Bodies(files=[file], content_type="application/octet-stream")


def _tensors(*shape: int) -> Bodies:
    """Normalised images as raw float32. The peers need no words for it: they ignore the query."""
    generator = np.random.default_rng(_SEED)
    files = [OUT / "bodies" / f"tensor-{number}.f32" for number in range(_NUM_TENSORS)]
    files[0].parent.mkdir(parents=True, exist_ok=True)
    for file in files:
        file.write_bytes(generator.standard_normal(shape, np.float32).tobytes())
    return Bodies(
        files=files,
        content_type="application/octet-stream",
        path=f"/predict?dtype=float32&shape={','.join(map(str, shape))}",
    )


def _random_weights(network: str) -> Path:
    """Weights of chance: published ones would have to be fetched, and cost no less to compute.

    Fresh ones give nearly the same answer to every image, in which no error of a faster way would
    show. So batch norms learn from the photographs, and the last layer is made to tell them apart.
    """
    file = OUT / "weights" / f"{network}.pth"
    if not file.exists():
        import torch
        import torchvision  # type: ignore[import-untyped]  # it ships no annotations

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


def _images() -> "torch.Tensor":
    """The photographs as a classifier gets them."""
    import torch
    from PIL import Image
    from torchvision.transforms._presets import (  # type: ignore[import-untyped]  # as above
        ImageClassification,
    )

    transform = ImageClassification(crop_size=224)
    return torch.stack([transform(Image.open(file).convert("RGB")) for file in photos()])


def _echo(num_bytes: int) -> Workload:
    return Workload(work="echo", bodies=lambda: _random_bytes(num_bytes), source="echo")


WORKLOADS: Mapping[str, Workload] = {
    "echo-1k": _echo(1024),
    "echo-150k": _echo(150_528),
    "jpeg-mobilenet": Workload(
        work="jpeg",
        bodies=lambda: Bodies(files=photos(), content_type="image/jpeg"),
        source="torchvision:mobilenet_v3_small",
        network="mobilenet_v3_small",
    ),
    "tensor-resnet18": Workload(
        work="tensor",
        bodies=lambda: _tensors(3, 224, 224),
        source="torchvision:resnet18",
        network="resnet18",
    ),
}
