"""A model that does not stream, and tells what its process has imported."""

import sys
from collections.abc import Mapping

import torch

from inferpool.models.base import Model
from inferpool.models.item import Features, Item


class Imports(Model):
    """Answers with the modules of ours that its process has imported."""

    def preprocess(self, item: Item) -> Features:
        return {"x": torch.zeros(1)}

    def forward(self, batch: Features) -> Features:
        return batch

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        return [name for name in sys.modules if name.startswith("inferpool.")]
