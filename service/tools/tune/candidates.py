"""Real services as candidates: each is a process of its own that listens on a free port."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from inferpool.models.vision import photos
from inferpool.service.client.health import ModelState, ServiceHealth
from inferpool.service.settings.loader import LoadedSettings, Row
from inferpool.service.tools.trial.connection import (
    NoAnswerError,
    TrialError,
    connected,
    post_request,
)
from inferpool.service.tools.trial.inputs import (
    TrialInput,
    is_image,
    made_up,
    read_inputs,
    specs_of,
)
from inferpool.service.tools.trial.load import LoadGenerator, LoadPlan, require_answers
from inferpool.service.tools.trial.processes import pss_of
from inferpool.service.tools.trial.service import TrialService, rows_of
from inferpool.service.tools.trial.tally import LoadTally
from inferpool.service.tools.tune.knobs import Changes, key_of
from inferpool.service.tools.tune.plan import TunePlan
from inferpool.workers.shared.memory import available_bytes

if TYPE_CHECKING:
    from inferpool.service.settings.names import Key

_MAX_START_S = 900.0
_ASK_S = 120.0
_PATIENCE_S = 60.0
_SEED = 1
_NUM_MADE_UP = 8
_ECHO_BYTES = 1024
_PHOTOS = Path(photos.__file__).parent
_WARM_DECODERS_S = 10.0
"""Decoders start after their worker is ready; with few clients some may never get an instance."""
NUM_ROUNDS = 3


@dataclass(slots=True, kw_only=True)
class LoadSample:
    """Result of some seconds of load."""

    seconds: float = 0.0
    tally: LoadTally = field(default_factory=LoadTally)
    generator_s: float = 0.0

    @property
    def rate(self) -> float:
        """Good answers per second."""
        return self.tally.num_in_time / self.seconds if self.seconds else 0.0

    @property
    def generator_cores(self) -> float:
        """Cores that the clients kept busy; near 1, they limit the figures."""
        return self.generator_s / self.seconds if self.seconds else 0.0

    def percentile_s(self, percent: float) -> float:
        """Return the time within which `percent` of the good answers came."""
        return self.tally.latency.percentile_s(percent)

    def add(self, other: "LoadSample") -> None:
        """Add the counts of another one."""
        self.seconds += other.seconds
        self.tally.add(other.tally)
        self.generator_s += other.generator_s


class ServiceCandidate:
    """A running service and its load."""

    def __init__(self, subject: TrialService, warm_s: float, round_s: float) -> None:
        self.memory_bytes = 0
        self._subject = subject
        self._warm_s = warm_s
        self._round_s = round_s
        self._requests: Sequence[bytes] = ()

    async def warm_up(self, requests: Sequence[bytes], connections: int) -> None:
        """Check that it answers, and keep it busy for a moment."""
        try:
            async with connected(self._subject.address) as connection:
                for request in requests:
                    answer = await connection.ask(request, _ASK_S)
                    if answer.status != 200:
                        text = answer.body[:300].decode(errors="replace")
                        raise TrialError(f"an input is answered with {answer.status}: {text}")
        except NoAnswerError as error:
            raise TrialError(f"an input has no answer: {error}") from error
        self._requests = requests
        await self._load(connections, self._warm_s)
        until = time.monotonic() + _WARM_DECODERS_S
        while not (await self._subject.health()).are_decoders_warm and time.monotonic() < until:
            await self._load(connections, self._warm_s)
        self.memory_bytes = sum(pss_of(each.pid).total for each in self._subject.family())

    async def measure(self, connections: int) -> LoadSample:
        """Return the result of a round of load.

        Raises:
            TrialError: It does not answer.
        """
        return await self._load(connections, self._round_s)

    async def close(self) -> None:
        """Kill the service with all of its processes."""
        try:
            await self._subject.stop()
        finally:
            self._subject.__exit__(None, None, None)

    async def _load(self, connections: int, least_s: float) -> LoadSample:
        """Send load for at least `least_s`, and until each client has had two answers.

        The first answers, which come while the queue fills, do not count.
        """
        plan = LoadPlan(
            address=self._subject.address,
            requests=self._requests,
            connections=connections,
            duration_s=least_s,
            least_answers=2 * connections,
            warmup_answers=max(1, connections // 2),
            timeout_s=_PATIENCE_S,
        )
        generator = LoadGenerator(plan)
        tally = await generator.run()
        require_answers(tally)
        return LoadSample(seconds=generator.measured_s, tally=tally, generator_s=generator.cpu_s)


class ServiceStarter:
    """Starts services with changes of the user's settings."""

    def __init__(self, loaded: LoadedSettings, model: str, plan: TunePlan) -> None:
        self.preset = "exact"
        self.decode = "exact"
        self.num_fronts = 1
        self.num_decoders = 0
        own = loaded.settings.models[model]
        self._source = own.source
        self._placement = own.placement
        self._rows = rows_of(loaded)
        self._model = model
        self._plan = plan
        self._requests: Sequence[bytes] = ()
        """The requests, chosen from what the first service says of its inputs."""
        self._most_bytes = 0

    def now(self) -> float:
        """Return the time, in seconds."""
        return time.monotonic()

    async def start(self, changes: Changes) -> ServiceCandidate:
        """Start a service with these changes, and warm it up.

        Raises:
            TrialError: It does not come up.
        """
        if self._most_bytes > available_bytes():
            raise TrialError("there is no memory for a second service beside the best one")
        subject = TrialService(self._changed(changes))
        is_pipeline = changes.get("placement", self._placement) == "pipeline"
        warm_s = self._plan.warm_pipeline_s if is_pipeline else self._plan.warm_s
        candidate = ServiceCandidate(subject, warm_s, self._plan.secs / NUM_ROUNDS)
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(subject.__exit__, None, None, None)
            subject.__enter__()
            await subject.until_ready(_MAX_START_S)
            if not self._requests:
                self._learn(await subject.health())
            await candidate.warm_up(self._requests, self._plan.goal.connections)
            if not changes:
                health = await subject.health()
                self.num_decoders = max((len(w.decoders) for w in health.workers), default=0)
            stack.pop_all()
        self._most_bytes = max(self._most_bytes, candidate.memory_bytes)
        return candidate

    def _learn(self, health: ServiceHealth) -> None:
        (model,) = health.models
        inputs = choose_inputs(self._plan.inputs, self._source, model)
        path = f"/predict/{self._model}"
        self._requests = [post_request(path, each.body, each.content_type) for each in inputs]
        self.num_fronts = max(1, len(health.fronts))
        self.preset = next((w.speed for w in model.workers if w.speed), self.preset)
        self.decode = next((w.decode for w in model.workers if w.decode), self.decode)

    def _changed(self, changes: Changes) -> list[Row]:
        values: dict[Key, object] = {("speed_search",): False}  # it would slow both down
        values |= {key_of(name, self._model): value for name, value in changes.items()}
        return [
            (key, values[key], "tune") if key in values else (key, value, origin)
            for key, value, origin in self._rows
        ]


def choose_inputs(given: Path | None, source: str, model: ModelState) -> list[TrialInput]:
    """Return the user's inputs; else photographs for images, or made-up ones as declared.

    Raises:
        TrialError: None is given, and the model has no declared inputs and no example.
    """
    if given is not None:
        return read_inputs(given)
    if source == "echo":
        body = bytes(_ECHO_BYTES)
        return [TrialInput(name="1 KiB", body=body, content_type="application/octet-stream")]
    if is_image(specs_of(model)):
        return read_inputs(_PHOTOS)
    return made_up(model, _SEED, _NUM_MADE_UP)
