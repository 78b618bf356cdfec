"""Versions of models that are worse than the one that serves, each in one way."""

from collections.abc import Mapping
from pathlib import Path

import torch

from inferpool.models.item import Features
from tests.marked_model import MarkedModel
from tests.small_classifier import SmallClassifier


class SmallShuffled(SmallClassifier):
    """A `SmallClassifier` with its labels in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.labels = self.labels[1:] + self.labels[:1]


class Worse(MarkedModel):
    """A `MarkedModel` that labels numbers, and may turn worse while it serves."""

    def __init__(
        self, *, nan_in: int = 0, slower: int = 0, bad: str = "", **options: object
    ) -> None:
        """Take the options of `MarkedModel`, and how it is worse.

        Args:
            nan_in: One number of so many has an output of NaN.
            slower: Work beyond its own, in units of it.
            bad: File without which it is as good as any; if empty, it is worse from the start.
            options: The options of `MarkedModel`.
        """
        super().__init__(**options)  # type: ignore[arg-type]  # as they are given
        self._nan_in = nan_in
        self._slower = slower
        self._bad = Path(bad) if bad else None

    def forward(self, batch: Features) -> Features:
        outputs = super().forward(batch)
        _work(1)
        if self._bad is not None and not self._bad.exists():
            return outputs
        _work(self._slower)
        if self._nan_in:
            is_nan_B = outputs["twice"] // 2 % self._nan_in == 7 % self._nan_in
            outputs["share"] = outputs["share"].masked_fill(is_nan_B[:, None], torch.nan)
        return outputs

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        number = int(outputs["twice"]) // 2
        return {"label": f"rest {number % 5}", "n": number, "mark": self._mark}


def _work(num: int) -> None:
    """Compute a while, so many times as long."""
    for _ in range(num):
        torch.ones(256, 256) @ torch.ones(256, 256)
