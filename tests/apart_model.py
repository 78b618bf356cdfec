"""A model whose instances decoders may prepare, and that says which process prepared them."""

import os
from collections.abc import Mapping, Sequence

import torch

from inferpool.models.item import Features, Item
from inferpool.models.spec import Placement
from tests.fault_model import FaultModel


class ApartModel(FaultModel):
    """A `FaultModel` that answers {"twice": ..., "pid": ..., "by": the preparing process} too."""

    prepares_apart = True

    def preprocess(self, item: Item) -> Features:
        by = 0 if item.payload == b'{"n": 0}' else os.getpid()
        return {**super().preprocess(item), "by": torch.tensor(by)}

    def forward(self, batch: Features) -> Features:
        return {**super().forward(batch), "by": batch["by"]}

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        answer = super().render(outputs, parameters)
        assert isinstance(answer, dict)
        return {**answer, "by": int(outputs["by"])}


class UnbuildableApart(ApartModel):
    """An `ApartModel` that only its worker can prepare for: decoders have no `load`."""

    def load(self, placement: Placement) -> None:
        super().load(placement)
        self._is_loaded = True

    def preprocess(self, item: Item) -> Features:
        assert self._is_loaded
        return super().preprocess(item)


class OddSamplesApart(ApartModel):
    """An `ApartModel` that cannot prepare one of its own samples."""

    def encoded_samples(self) -> Sequence[Item]:
        return [Item(kind="json", payload=b'{"n": 1, "do": "raise early"}')]
