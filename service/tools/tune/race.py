"""Measures the speed of a model's placements for the doctor, with real services under load."""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import uvloop

from inferpool.service.settings.loader import LoadedSettings
from inferpool.service.tools.trial.connection import TrialError
from inferpool.service.tools.trial.screen import Screen
from inferpool.service.tools.tune.candidates import NUM_ROUNDS, ServiceCandidate, ServiceStarter
from inferpool.service.tools.tune.knobs import Changes
from inferpool.service.tools.tune.plan import Goal, TunePlan

_MAX_S = 300.0
_PLAN = TunePlan(goal=Goal(), secs=3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Measured speed of a placement."""

    rate: float = 0.0
    ratio: float | None = None
    """Rate divided by that of the placement measured first; None for that one."""
    problem: str = ""
    """Reason why there is no measurement; empty if there is one."""


class PlacementRace:
    """Measures placements of the user's models."""

    def __init__(self, loaded: LoadedSettings, screen: Screen, plan: TunePlan = _PLAN) -> None:
        """Store the settings and the plan; each call gives its own number of clients."""
        self._loaded = loaded
        self._screen = screen
        self._plan = plan

    def __call__(
        self,
        model: str,
        ways: Mapping[str, Changes],
        *,
        num_clients: int,
        is_side_by_side: bool,
    ) -> Mapping[str, Speed]:
        """Start a service for each placement, put it under load, and return the speeds.

        `ways` has the model's settings for each placement, by the placement's name; the first is
        the reference for the others. `is_side_by_side`: two services fit at a time, and take turns.
        """
        plan = replace(self._plan, goal=Goal(connections=num_clients))
        starter = ServiceStarter(_alone(self._loaded, model), model, plan)
        course = measured(
            starter,
            model,
            ways,
            self._screen,
            num_clients=num_clients,
            is_side_by_side=is_side_by_side,
        )
        found = uvloop.run(course)
        self._screen.begin(f"measuring {model}")  # the next step is not of a placement
        return found


async def measured(
    starter: ServiceStarter,
    model: str,
    ways: Mapping[str, Changes],
    screen: Screen,
    *,
    num_clients: int,
    is_side_by_side: bool,
) -> Mapping[str, Speed]:
    """Start a service for each way, and return the speeds; see `PlacementRace`."""
    rates: dict[str, list[float]] = {}
    problems: dict[str, str] = {}
    first_name = ""
    first: ServiceCandidate | None = None
    """The others are measured in turns with it: machines drift."""
    async with contextlib.AsyncExitStack() as stack:
        for name, changes in ways.items():
            screen.begin(f"measuring {model}: {name}")
            try:
                async with asyncio.timeout(_MAX_S), contextlib.AsyncExitStack() as while_measured:
                    candidate = await starter.start(changes)
                    while_measured.push_async_callback(candidate.close)
                    own = []
                    for _ in range(NUM_ROUNDS):
                        if first is not None:
                            rates[first_name].append((await first.measure(num_clients)).rate)
                        own.append((await candidate.measure(num_clients)).rate)
                    if not rates and is_side_by_side:
                        stack.push_async_exit(while_measured.pop_all())
                        first, first_name = candidate, name
                    rates[name] = own
            except TrialError as error:
                problems[name] = str(error).splitlines()[0]
            except TimeoutError:
                problems[name] = f"not measured within {_MAX_S:g} s"
    # Other load on the machine can only have lowered it.
    best = {name: max(own) for name, own in rates.items()}
    against = next(iter(best.values()), 0.0)
    found = {name: Speed(problem=problem) for name, problem in problems.items()}
    for number, (name, rate) in enumerate(best.items()):
        found[name] = Speed(rate=rate, ratio=rate / against if number else None)
    return found


def _alone(loaded: LoadedSettings, model: str) -> LoadedSettings:
    settings = loaded.settings
    only = {"models": {model: settings.models[model]}, "default_model": model}
    return LoadedSettings(settings=settings.model_copy(update=only), origins=loaded.origins)
