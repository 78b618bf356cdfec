"""Lets a parameter of a request kill the worker, for `inferpool chaos` only.

Runs in worker processes. Chaos names `Poisonable` as the source instead of the user's; otherwise
the model is the user's own.
"""

import os
import signal
from collections.abc import Mapping, Sequence

import torch

from inferpool.models.base import Model
from inferpool.models.border import forward_can_run_ahead
from inferpool.models.example import reads_own_form
from inferpool.models.item import Features, Item
from inferpool.models.sources.registry import build

PARAMETER = "inferpool_chaos"
"""Parameter of a request: "preprocess", "forward" or "render", then anything after a hyphen."""
_MARK = "inferpool_chaos.poison"
"""Tensor that marks a poisoned instance and its batch; the user's model never sees it."""


class Poisonable(Model):
    """Builds the model of a source and makes it die of poisoned requests."""

    def __new__(  # type: ignore[misc]  # it makes an object of the user's class, extended
        cls, *, source: str, weights: str = "DEFAULT", options: Mapping[str, object] | None = None
    ) -> Model:
        """Build the model. The arguments are those in the settings."""
        model = build(source, None if weights.lower() == "none" else weights, options or {})
        if not reads_own_form(model):
            model.preprocessed = ()  # nor does it, with the `preprocess` below before its own
        as_before = {"can_run_ahead": forward_can_run_ahead(model)}
        model.__class__ = type("Poisoned", (_Poisoned, type(model)), as_before)
        return model


class _Poisoned(Model):
    """Comes before the user's class and dies where the parameter says."""

    def preprocess(self, item: Item) -> Features:
        """Mark the instance, or die."""
        place = _place_of(item.parameters)
        if place == "preprocess":
            _die()
        if not place:
            return super().preprocess(item)
        # The model may refuse parameters that it does not know.
        rest = {name: value for name, value in item.parameters.items() if name != PARAMETER}
        features = super().preprocess(
            Item(kind=item.kind, payload=item.payload, headers=item.headers, parameters=rest)
        )
        return {**features, _MARK: torch.tensor(1)} if place == "forward" else features

    def collate(self, instances: Sequence[Features]) -> Features:
        """Mark a batch with a marked instance."""
        if not any(_MARK in each for each in instances):
            return super().collate(instances)
        batch = super().collate(
            [{name: each[name] for name in each if name != _MARK} for each in instances]
        )
        return {**batch, _MARK: torch.tensor(1)}

    def forward(self, batch: Features) -> Features:
        """Die of a marked batch."""
        if _MARK in batch:
            _die()
        return super().forward(batch)

    def render_batch(
        self, outputs: Features, parameters: Sequence[Mapping[str, object]]
    ) -> Sequence[object]:
        """Die between the computation and the answer."""
        if any(_place_of(each) == "render" for each in parameters):
            _die()
        return super().render_batch(outputs, parameters)


def _place_of(parameters: Mapping[str, object]) -> str:
    return str(parameters[PARAMETER]).partition("-")[0] if PARAMETER in parameters else ""


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
