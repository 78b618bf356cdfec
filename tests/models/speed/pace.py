"""A fake clock for trials: networks and decoders take the time that a test says."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inferpool.models.item import Features
from inferpool.models.speed.compiled import Compiled
from inferpool.models.speed.graphs import Graphed
from inferpool.models.speed.options import SpeedOptions, TrialTimes
from inferpool.models.speed.presets import Recast
from inferpool.models.speed.trial import Trial
from tests.models.items import AnyModel, encoded, image_item, loaded, photo
from tests.small_classifier import SmallClassifier

_LOW_BITS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def kind_of(network: object) -> str:
    """Return what a network is: "exact", "folded" for any preset in float32, "graphed_bf16" ...."""
    if isinstance(network, Graphed):
        return f"graphed_{kind_of(network.network)}"
    if isinstance(network, Recast):
        return _LOW_BITS.get(network.dtype, "folded")
    return "compiled" if isinstance(network, LoadedPackage | Compiled) else "exact"


class LoadedPackage(torch.nn.Module):
    """A fake package, which computes as the exact network does."""

    def __init__(
        self, path: Path, exact: torch.nn.Module | None, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.network = small().network.to(device)

    def forward(self, x: torch.Tensor) -> object:
        """Compute a batch."""
        return self.network(x)


class Pace:
    """A clock that stands still until a model computes or decodes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.batch_s = 0.001
        """Time of the exact network for a batch."""
        self.gains: dict[str, float] = {}
        """Number of times as fast as the exact network that each kind is; 1 for others."""
        self.prepare_s = 0.001
        """Time to prepare a batch."""
        self.decode_gains: dict[str, float] = {}
        """Number of times as fast as exact that each way decodes; 1 for others."""
        self.seen: list[str] = []
        """Kinds of the networks that have computed a batch, in order."""
        self.sizes: list[int] = []
        """Sizes of these batches."""
        self.seconds = self._usual_seconds
        """Returns how long a kind takes for a batch of some size."""

    def __call__(self) -> float:
        return self.now

    def favour_presets(self) -> None:
        """Let every preset gain, the later the more."""
        self.gains = {"folded": 2.0, "bf16": 3.0, "fp16": 4.0, "compiled": 9.0}
        self.gains |= {f"graphed_{kind}": gain + 3 for kind, gain in self.gains.items()}

    def of(self, model: AnyModel) -> AnyModel:
        """Let a model move the clock whenever it computes or prepares a batch."""
        forward, collate = model.forward, model.collate

        def timed_forward(batch: Features) -> Features:
            kind, size = kind_of(model.network), len(next(iter(batch.values())))
            self.seen.append(kind)
            self.sizes.append(size)
            self.now += self.seconds(kind, size)
            return forward(batch)

        def timed_collate(instances: Any) -> Features:
            self.now += self.prepare_s / self.decode_gains.get(model.decode, 1.0)
            return collate(instances)

        model.forward, model.collate = timed_forward, timed_collate  # type: ignore[method-assign]
        return model

    def _usual_seconds(self, kind: str, size: int) -> float:
        return self.batch_s / self.gains.get(kind, 1.0)

    def small(self) -> SmallClassifier:
        """Return a classifier that moves the clock."""
        return self.of(small())

    def times(self, **others: float) -> TrialTimes:
        """Return times by this clock."""
        return replace(TrialTimes(clock=self, decode_clock=self, now=self), **others)  # type: ignore[arg-type]  # others are fields

    def options(
        self, speed: str = "auto", cache_dir: Path | None = None, **others: Any
    ) -> SpeedOptions:
        """Return options with these times."""
        return options(speed, cache_dir, **{"times": self.times(), **others})

    def trial(self, model: AnyModel, max_batch_size: int = 4, **times: float) -> Trial:
        """Return a trial with these times."""
        wanted = SpeedOptions(max_batch_size=max_batch_size, times=self.times(**times))
        return Trial(self.of(model), wanted)


def options(speed: str = "auto", cache_dir: Path | None = None, **others: Any) -> SpeedOptions:
    """Return options for small batches."""
    return SpeedOptions(speed=speed, max_batch_size=4, cache_dir=cache_dir, **others)


class FewSamples(SmallClassifier):
    """A classifier with fewer samples, which are preprocessed sooner."""

    def samples(self):
        return super().samples()[:13]


PHOTOS = [image_item(encoded(photo(name))) for name in ("astronaut", "coffee", "chelsea")]


class Encoded(FewSamples):
    """A classifier whose ways to decode are tried on photographs."""

    def encoded_samples(self):
        return PHOTOS if self.can_be_quick else []


class Untried(Encoded):
    """A classifier whose ways to decode are not to be tried."""

    def encoded_samples(self):
        pytest.fail("it tries ways to decode")


def small() -> SmallClassifier:
    """Return a loaded classifier."""
    return loaded(FewSamples())


def quietly(stage: str) -> None:
    """Ignore progress."""
