"""Small unpacked archives for each of TorchServe's own handlers, and calls to them.

It imports nothing of the product, so that the handlers of a real TorchServe answer the same calls:
`PYTHON_WITH_TORCHSERVE tests/models/torchserve/handlers/archives.py` prints their answers as JSON,
which `answers.json` beside it has from TorchServe 0.12.0 with torch 2.15.0 and torchvision 0.29.2.
"""

import base64
import importlib
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image

PHOTOS = Path(__file__).parents[4] / "models" / "vision" / "photos"
TEXTS = (
    "The <b>Café</b> didn't open &amp; I'd've gone, y'all'd say!",
    "We're at Joe's: it's 5 o'clock; he'll've left... 'cause they can't wait",
)
CLASSIFIER = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, stride=2)
        self.head = torch.nn.Linear(8 * 16, 7)

    def forward(self, x):
        x = torch.relu(self.conv(x))
        return self.head(torch.nn.functional.adaptive_avg_pool2d(x, 4).flatten(1))
"""
SEGMENTER = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        return {"out": self.conv(x)}
"""
DETECTOR = """
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        found = []
        for image in x:
            means = image.mean((1, 2))
            height, width = image.shape[1:]
            boxes = torch.stack([means, means * 2, means + height, means + width], 1)
            scores = torch.stack([means[0] - means[0] + 0.9, image.amax() / 2, means[2] / 9])
            found.append({"boxes": boxes, "labels": torch.tensor([1, 2, 1]), "scores": scores})
        return found
"""
TEXT_CLASSIFIER = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.EmbeddingBag(64, 8)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, numbers, offsets):
        return self.head(self.embedding(numbers, offsets))
"""
BAD: dict[str, Any] = {
    "no picture": {"body": bytearray(b"no picture")},
    "cut": {"body": bytearray((PHOTOS / "coffee.jpg").read_bytes()[:20_000])},
    "empty": {"body": bytearray()},
    "nothing": {},
    "other name": {"image": bytearray((PHOTOS / "coffee.jpg").read_bytes())},
    "object": {"body": {"instances": [1]}},
    "number": {"body": 3},
    "ragged": {"body": [[[1, 2], [3]]]},
    "no base64": {"body": "a"},
}
"""Requests that TorchServe's image_classifier refuses, as it answers 503 to them."""
WORDS = (
    "the cafe did not open i would ve gone you all d say we are at joes it is 5 of clock he will "
    "left ecause they cannot wait wouldve willve alld"
)


class Ignored:
    """Metrics that are measured for nobody."""

    def add_time(self, *_: object) -> None:
        """Do nothing."""


class StillContext:
    """A context as a handler gets it, without a server."""

    def __init__(self, folder: Path, config: dict[str, Any] | None = None) -> None:
        self.manifest = json.loads((folder / "MAR-INF" / "MANIFEST.json").read_text())
        self.system_properties: dict[str, Any] = {"model_dir": str(folder), "gpu_id": None}
        self.model_yaml_config = config or {}
        self.metrics = Ignored()
        self.headers: dict[str, str] = {}

    def get_request_header(self, _: int, name: str) -> str | None:
        """Return a header of the only request."""
        return self.headers.get(name)


def picture_of(mode: str) -> bytearray:
    """Return a PNG of a photograph in a mode of Pillow."""
    file = BytesIO()
    Image.open(PHOTOS / "clock.jpg").resize((90, 60)).convert(mode).save(file, "PNG")
    return bytearray(file.getvalue())


def network_of(source: str) -> torch.nn.Module:
    """Return the network of a source, with weights that no generator of random numbers makes."""
    namespace: dict[str, Any] = {"__name__": "net"}
    exec(source, namespace)
    network: torch.nn.Module = namespace["Net"]().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            numbers = torch.arange(parameter.numel(), dtype=torch.float64)
            parameter.copy_(torch.sin(numbers * 12.9898 + 1).view_as(parameter))
    return network


def write_archive(folder: Path, handler: str, source: str, *, scripted: bool = False) -> Path:
    """Write what an archive holds into a folder, with its network's class or as TorchScript."""
    (folder / "MAR-INF").mkdir(parents=True)
    model = {"modelName": folder.name, "handler": handler, "modelVersion": "1.0"}
    model["serializedFile"] = "weights.pt"
    network = network_of(source)
    if scripted:
        example = torch.zeros(1, 3, 224, 224)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated; archives have it
            torch.jit.save(torch.jit.trace(network, example), folder / "weights.pt")
    else:
        model["modelFile"] = f"net_of_{folder.name}.py"
        (folder / model["modelFile"]).write_text(source)
        torch.save(network.state_dict(), folder / "weights.pt")
    (folder / "MAR-INF" / "MANIFEST.json").write_text(json.dumps({"model": model}))
    return folder


def name_classes(folder: Path, names: object) -> None:
    """Give an archive names for its classes."""
    (folder / "index_to_name.json").write_text(json.dumps(names))


def photos() -> list[bytes]:
    """Return three encoded photographs."""
    return [(PHOTOS / f"{name}.jpg").read_bytes() for name in ("astronaut", "chelsea", "coffee")]


def fails(ask: Callable[[list[dict[str, Any]]], object], row: dict[str, Any]) -> bool:
    """Return whether a handler raises."""
    try:
        ask([row])
    except Exception:
        return True
    return False


def answers_of(handler_named: Callable[[str], type[Any]], folder: Path) -> dict[str, Any]:
    """Call a handler of each kind with the same requests.

    Args:
        handler_named: Returns the class that a manifest names by a word.
        folder: Where archives are written.
    """

    def started(archive: Path) -> Callable[[list[dict[str, Any]]], Any]:
        context = StillContext(archive)
        sys.path.insert(0, str(archive))
        handler = handler_named(context.manifest["model"]["handler"])()
        handler.initialize(context)
        sys.path.remove(str(archive))
        return lambda rows: handler.handle(rows, context)

    images = photos()
    found: dict[str, Any] = {}
    eager = write_archive(folder / "eager", "image_classifier", CLASSIFIER)
    name_classes(eager, {str(number): [f"n{number}", f"name {number}"] for number in range(7)})
    ask = started(eager)
    found["eager"] = ask([{"data": bytearray(each)} for each in images])
    found["base64"] = ask([{"body": base64.b64encode(images[0]).decode()}])
    pixels = (torch.arange(3 * 40 * 40).view(3, 40, 40) % 7 / 7).tolist()
    found["numbers"] = ask([{"body": pixels}])
    found["png"] = ask([{"body": picture_of("RGB")}])
    found["bad"] = [name for name, row in BAD.items() if fails(ask, row)]
    found["bad modes"] = [
        mode for mode in ("1", "L", "LA", "P", "RGBA") if fails(ask, {"body": picture_of(mode)})
    ]
    ask = started(write_archive(folder / "scripted", "image_classifier", CLASSIFIER, scripted=True))
    found["scripted"] = ask([{"data": bytearray(images[1])}])
    ask = started(write_archive(folder / "segments", "image_segmenter", SEGMENTER))
    masks = torch.tensor(ask([{"body": bytearray(each)} for each in images]))
    found["segments"] = [
        [*masks.shape],
        masks.mean((1, 2)).tolist(),
        masks[:, 30, [7, 100, 211]].tolist(),
    ]
    boxes = write_archive(folder / "boxes", "object_detector", DETECTOR)
    name_classes(boxes, {"object_type_names": ["background", "cat", "dog"]})
    ask = started(boxes)
    found["boxes"] = [ask([{"body": bytearray(each)}]) for each in images]
    texts = write_archive(folder / "texts", "text_classifier", TEXT_CLASSIFIER)
    words = WORDS.split()
    pairs = [f"{a} {b}" for a in words for b in words]
    torch.save({each: n % 64 for n, each in enumerate([*words, *pairs])}, texts / "source_vocab.pt")
    name_classes(texts, {"0": "World", "1": "Sports", "2": "Business"})
    ask = started(texts)
    found["texts"] = [ask([{"data": bytearray(each.encode())}]) for each in TEXTS]
    found["text"] = ask([{"body": TEXTS[0]}])
    return found


def _real_handler(name: str) -> type[Any]:
    module = importlib.import_module(f"ts.torch_handler.{name}")
    called = "".join(part.capitalize() for part in name.split("_"))
    found: type[Any] = getattr(module, called)
    return found


def _short(value: Any) -> Any:
    """Return an answer with eight digits of each number."""
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_short(each) for each in value]
    return float(f"{value:.8g}") if isinstance(value, float) else value


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        answers = _short(answers_of(_real_handler, Path(place)))
    lines = (f"{json.dumps(name)}: {json.dumps(each)}" for name, each in answers.items())
    sys.stdout.write("{\n" + ",\n".join(lines) + "\n}\n")
