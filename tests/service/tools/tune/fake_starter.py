"""Services whose speed is a function of their settings, on a machine that drifts and is noisy."""

import asyncio
import random
from collections.abc import Callable, Mapping
from math import sin

from inferpool.service.tools.trial.connection import TrialError
from inferpool.service.tools.trial.tally import LoadTally
from inferpool.service.tools.tune.candidates import LoadSample, ServiceCandidate, ServiceStarter

START_S, ROUND_S = 10.0, 1.0

Surface = Callable[[Mapping[str, object]], float]
"""Requests per second for some settings; none for those that do not come up."""


def sample_of(rate: float, latency_s: float) -> LoadSample:
    tally = LoadTally(num_in_time=int(rate * ROUND_S))
    tally.latency.record(latency_s, max(1, int(rate) // 100))
    return LoadSample(seconds=ROUND_S, tally=tally)


class FakeCandidate(ServiceCandidate):
    def __init__(self, starter: "FakeStarter", changes: Mapping[str, object], rate: float) -> None:
        self.memory_bytes = 100 * 2**20
        self.changes = changes
        self._starter = starter
        self.rate = rate

    async def measure(self, connections: int) -> LoadSample:
        starter = self._starter
        assert self in starter.alive
        starter.time_s += ROUND_S
        drift = 1 + starter.drift * sin(starter.time_s / 40)
        rate = self.rate * drift * starter.random.gauss(1, starter.noise)
        sample = sample_of(rate, connections / rate)  # Little's law
        starter.spoil(self, sample)
        return sample

    async def close(self) -> None:
        self._starter.alive.remove(self)


class FakeStarter(ServiceStarter):
    def __init__(
        self,
        surface: Surface,
        *,
        noise: float = 0.01,
        drift: float = 0.3,
        seed: int = 1,
        spoil: Callable[[FakeCandidate, LoadSample], None] = lambda *_: None,
    ) -> None:
        """Start at a time of 0; `spoil` may change each sample, or raise in its place."""
        self.time_s = 0.0
        self.drift = drift
        self.noise = noise
        self.spoil = spoil
        self.random = random.Random(seed)
        self.alive: list[FakeCandidate] = []
        self.most_alive = 0
        self.started: list[Mapping[str, object]] = []
        self._surface = surface

    async def start(self, changes: Mapping[str, object]) -> FakeCandidate:
        await asyncio.sleep(0)  # where a cancelled task ends
        self.time_s += START_S
        self.started.append(changes)
        rate = self._surface(changes)
        if not rate:
            raise TrialError("the service ended with exit code 3\nthe end of its log")
        candidate = FakeCandidate(self, changes, rate)
        self.alive.append(candidate)
        self.most_alive = max(self.most_alive, len(self.alive))
        return candidate

    def now(self) -> float:
        return self.time_s
