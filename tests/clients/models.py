"""The models of shapes.py for inferpool: one class each, whose answers are those of Triton's."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from inferpool.models.base import Model
from inferpool.models.errors import InputError
from inferpool.models.item import Features, Item
from inferpool.models.spec import TensorSpec
from tests.clients.shapes import DATATYPES, MAX_BATCH_SIZE, MODELS
from tests.clients.shapes import Tensor as Shape


def specs(tensors: Sequence[Shape]) -> list[TensorSpec]:
    """Return the tensors of shapes.py as a model declares them."""
    return [
        TensorSpec(name=name, dtype=DATATYPES[datatype], shape=(-1, *shape))
        for name, datatype, shape in tensors
    ]


class AddSub(Model):
    inputs = specs(MODELS["add_sub"].inputs)
    outputs = specs(MODELS["add_sub"].outputs)

    def forward(self, batch: Features) -> Features:
        one, two = batch["INPUT0"], batch["INPUT1"]
        return {"SUM": one + two, "DIFFERENCE": one - two}


class SameTensors(Model):
    """Returns each input as the output of its datatype."""

    inputs = specs(MODELS["types"].inputs)
    outputs = specs(MODELS["types"].outputs)
    finite_outputs = False

    def forward(self, batch: Features) -> Features:
        return {name.replace("IN_", "OUT_"): tensor for name, tensor in batch.items()}


class SameHalves(SameTensors):
    inputs = specs(MODELS["halves"].inputs)
    outputs = specs(MODELS["halves"].outputs)


class Scores(Model):
    inputs = specs(MODELS["scores"].inputs)
    outputs = specs(MODELS["scores"].outputs)
    labels = MODELS["scores"].labels
    finite_outputs = False

    def forward(self, batch: Features) -> Features:
        return {"y": batch["x"]}


class AnySize(Scores):
    inputs = specs(MODELS["any_size"].inputs)
    outputs = specs(MODELS["any_size"].outputs)
    labels = ()


class HalfFloats(AnySize):
    inputs = specs(MODELS["half_floats"].inputs)
    outputs = specs(MODELS["half_floats"].outputs)


class Lengths(Model):
    """Counts the bytes of a text."""

    outputs = specs(MODELS["lengths"].outputs)
    example = "four"
    accepts = "bytes"

    def preprocess(self, item: Item) -> Features:
        if item.kind == "bytes":
            return {"number": torch.tensor(len(item.payload), dtype=torch.int32)}
        value = item.json()
        if not isinstance(value, str | bytes):
            raise InputError("an instance is a text")
        data = value.encode() if isinstance(value, str) else value
        return {"number": torch.tensor(len(data), dtype=torch.int32)}

    def forward(self, batch: Features) -> Features:
        return {"length": batch["number"][:, None]}


class Counts(Model):
    """Answers n by the parts 0, 1, ... n - 1; fails at part 2 if n is more than 100."""

    inputs = specs(MODELS["counts"].inputs)
    example: object = {"n": [2]}

    def forward(self, batch: Features) -> Iterator[Mapping[str, Tensor]]:
        number = int(batch["n"])
        for part in range(number):
            if number > 100 and part == 2:
                raise ValueError("I was told to")
            yield {"part": torch.tensor([[part]], dtype=torch.int32)}


class Fails(Model):
    inputs = specs(MODELS["fails"].inputs)
    outputs = specs(MODELS["fails"].outputs)

    def forward(self, batch: Features) -> Features:
        if (batch["x"] < 0).any():
            raise ValueError("I was told to")
        return {"y": batch["x"]}


_CLASSES = {
    "add_sub": AddSub,
    "types": SameTensors,
    "halves": SameHalves,
    "scores": Scores,
    "any_size": AnySize,
    "half_floats": HalfFloats,
    "lengths": Lengths,
    "counts": Counts,
    "fails": Fails,
}
SETTINGS: dict[str, dict[str, object]] = {
    name: {
        "source": f"{__name__}:{found.__name__}",
        "replicas": 1,
        "max_batch_size": MAX_BATCH_SIZE,
    }
    for name, found in _CLASSES.items()
}
"""The settings of each model, for a settings file."""
REAL_MODELS: dict[str, dict[str, object]] = {
    "echo": {"source": "echo", "replicas": 1},
    "efficientnet_lite0": {"source": "efficientnet_lite0", "replicas": 1, "speed": "exact"},
    "minilm_l6": {"source": "minilm_l6", "replicas": 1, "speed": "exact"},
}
"""Models of the package, which Triton does not have."""
