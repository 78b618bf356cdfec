"""Kills or disturbs the worker on a parameter of a request, for `inferpool chaos` only.

Runs in worker processes. Chaos names `Poisonable` as the source instead of the user's; otherwise
the model is the user's own.
"""

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence

import torch

from inferpool.models.base import Model
from inferpool.models.example import reads_own_form
from inferpool.models.item import Features, Item
from inferpool.models.overrides import forward_can_run_ahead, is_streaming
from inferpool.models.sources.registry import build

PARAMETER = "inferpool_chaos"
"""Parameter of a request: where it acts ("preprocess", "forward" or "render"), how ("die",
"scribble" or "exit"), and anything more, with hyphens between."""
HOWS = ("die", "scribble", "exit")
"""Kills its process; writes to all its descriptors; raises SystemExit."""
_MARK = "inferpool_chaos.poison"
"""Tensor that marks a poisoned instance and its batch with a way to act, and that the user's model
never sees."""
_JUNK = b"\xff" * 64


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
        kind = _PoisonedStream if is_streaming(model) else _Poisoned
        model.__class__ = type("Poisoned", (kind, type(model)), as_before)
        return model


class _Poisoned(Model):
    """Comes before the user's class and acts where the parameter says."""

    _marks: Sequence[str] = ("forward",)
    """Places where a marked batch acts."""

    def preprocess(self, item: Item) -> Features:
        """Mark the instance, or act."""
        place, how = _poison_of(item.parameters)
        if place == "preprocess":
            _act(how)
        if not place:
            return super().preprocess(item)
        # The model may refuse parameters that it does not know.
        rest = {name: value for name, value in item.parameters.items() if name != PARAMETER}
        features = super().preprocess(
            Item(kind=item.kind, payload=item.payload, headers=item.headers, parameters=rest)
        )
        marked = place in self._marks
        return {**features, _MARK: torch.tensor(HOWS.index(how))} if marked else features

    def collate(self, instances: Sequence[Features]) -> Features:
        marks = [each[_MARK] for each in instances if _MARK in each]
        if not marks:
            return super().collate(instances)
        batch = super().collate(
            [{name: each[name] for name in each if name != _MARK} for each in instances]
        )
        return {**batch, _MARK: marks[0]}

    def forward(self, batch: Features) -> Features:
        return super().forward(_unmarked(batch))

    def render_batch(
        self, outputs: Features, parameters: Sequence[Mapping[str, object]]
    ) -> Sequence[object]:
        """Act between the computation and the answer."""
        for place, how in map(_poison_of, parameters):
            if place == "render":
                _act(how)
        return super().render_batch(outputs, parameters)


class _PoisonedStream(_Poisoned):
    """Comes before a user's class that answers in parts, whose `render` may never be called."""

    _marks = ("forward", "render")

    def stream(self, batch: Features) -> object:
        own = getattr(super(), "stream", None)  # else its `forward` is a generator
        return own(_unmarked(batch)) if own else self.forward(batch)

    def admit(self, batch: Features, positions: Sequence[int]) -> None:
        """Act, or have instances join that run."""
        super().admit(_unmarked(batch), positions)  # type: ignore[misc]  # the user's, if it joins


def _unmarked(batch: Features) -> Features:
    """Act if a batch is marked; else return it."""
    if _MARK in batch:
        _act(HOWS[int(batch[_MARK])])
    return {name: tensor for name, tensor in batch.items() if name != _MARK}


def _poison_of(parameters: Mapping[str, object]) -> tuple[str, str]:
    place, _, rest = str(parameters.get(PARAMETER, "")).partition("-")
    how = rest.partition("-")[0]
    return place, how if how in HOWS else "die"


def _act(how: str) -> None:
    if how == "exit":
        raise SystemExit(0)
    if how == "scribble":
        _scribble()
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def _scribble() -> None:
    """Write to each descriptor of anonymous memory or of a pipe, but not to the user's files."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it cannot be written, or was the listing's own
            kind = os.readlink(f"/proc/self/fd/{name}")
            if kind.startswith("/memfd:"):
                os.pwrite(int(name), _JUNK, 0)
            elif kind.startswith("pipe:") and int(name) > 2:
                os.write(int(name), _JUNK)
