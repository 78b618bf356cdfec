"""The work that every peer does, so that only the servers differ.

It imports torch only where there is a model. Its setting comes by an environment variable.
"""

import io
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

HOST = "127.0.0.1"
_VARIABLE = "BENCH_PEER_SETTING"
Answer = dict[str, object]


class CountBytes:
    """No model, so that the server alone is measured: the answer is the length of the body."""

    def __init__(self, setting: "PeerSetting") -> None:
        """Need nothing of the setting."""

    def prepare(self, body: bytes) -> Any:
        """Turn one body into an input."""
        return len(body)

    def compute(self, inputs: Sequence[Any]) -> Sequence[Answer]:
        """Serve a batch."""
        return [{"bytes": each} for each in inputs]


class Classify(CountBytes):
    """A classifier of torchvision in float32, as released: normalised tensors [3, 224, 224] in."""

    def __init__(self, setting: "PeerSetting") -> None:
        """Load it."""
        import torch
        import torchvision  # type: ignore[import-untyped]  # it ships no annotations

        self._torch = torch
        torch.set_num_threads(1)
        self._network = torchvision.models.get_model(setting.network, weights=None)
        self._network.load_state_dict(torch.load(setting.weights, weights_only=True))
        self._network.eval()
        with torch.inference_mode():
            for num in range(1, setting.max_batch_size + 1):
                self._network(torch.zeros(num, 3, 224, 224))

    def prepare(self, body: bytes) -> Any:
        return self._torch.frombuffer(bytearray(body), dtype=self._torch.float32).view(3, 224, 224)

    def compute(self, inputs: Sequence[Any]) -> Sequence[Answer]:
        torch = self._torch
        with torch.inference_mode():
            # Some servers hand the inputs on as tuples or as arrays.
            images = self._collate([torch.as_tensor(each) for each in inputs])
            scores, indices = self._network(images).softmax(-1).topk(5)
        return [
            {"top5": [[index, score] for index, score in zip(*pair, strict=True)]}
            for pair in zip(indices.tolist(), scores.tolist(), strict=True)
        ]

    def _collate(self, images: Sequence[Any]) -> Any:
        return self._torch.stack(list(images))


class ClassifyJpeg(Classify):
    """The same from JPEGs: decoded, resized to 256, cropped to 224, as its weights are used."""

    def __init__(self, setting: "PeerSetting") -> None:
        """Load it."""
        super().__init__(setting)
        from PIL import Image
        from torchvision.transforms import functional  # type: ignore[import-untyped]  # as above

        self._open = Image.open
        self._functional = functional
        self._mean = self._torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1)
        self._std = self._torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1)

    def prepare(self, body: bytes) -> Any:
        image = self._open(io.BytesIO(body)).convert("RGB")
        image = self._functional.resize(image, 256)
        return self._functional.pil_to_tensor(self._functional.center_crop(image, 224))

    def _collate(self, images: Sequence[Any]) -> Any:
        # For the whole batch at once, which is faster than image by image.
        return super()._collate(images).float().div_(255).sub_(self._mean).div_(self._std)


WORK: dict[str, Callable[["PeerSetting"], CountBytes]] = {
    "echo": CountBytes,
    "tensor": Classify,
    "jpeg": ClassifyJpeg,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSetting:
    """Setting that a peer is run in."""

    work: str
    num_workers: int
    max_batch_size: int
    wait_ms: float
    """Milliseconds that a batch may wait to fill."""
    network: str = ""
    """A name of torchvision.models; "" where there is no model."""
    weights: str = ""
    """The file of its weights."""

    def make(self) -> CountBytes:
        """Make the work, in the process that does it."""
        return WORK[self.work](self)

    def environment(self) -> dict[str, str]:
        """Return the variable from which `peer_setting` reads this in the peer's process."""
        return {_VARIABLE: json.dumps(asdict(self))}


def peer_setting() -> PeerSetting:
    """Return the setting that this process was started with."""
    return PeerSetting(**json.loads(os.environ[_VARIABLE]))


def serve_batch(work: CountBytes, bodies: Sequence[bytes]) -> Sequence[Answer]:
    """Prepare and compute, for the peers that make their batches of bodies."""
    return work.compute([work.prepare(body) for body in bodies])
