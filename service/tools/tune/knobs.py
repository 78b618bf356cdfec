"""The knobs that tuning varies, beginning with those that are likely to matter most."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from inferpool.models.spec import Placement
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.settings import Settings
from inferpool.service.tools.tune.plan import Goal
from inferpool.workers.host.devices import Host

Changes = Mapping[str, object]
"""New values of settings by name. Names of models' settings differ from those of the top level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """Settings that are varied together."""

    name: str
    ways: Sequence[Sequence[Changes]]
    """Ladders of changes that begin at the user's settings. Each is climbed while a step gains;
    once one has gained, the others are left out."""

    @property
    def settings(self) -> frozenset[str]:
        """Names of the settings that it changes."""
        return frozenset(name for way in self.ways for step in way for name in step)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobFacts:
    """Facts that the knobs depend on."""

    settings: Settings
    model: str
    host: Host
    goal: Goal
    preset: str = "exact"
    """Speed preset in use with the user's settings."""
    decode: str = "exact"
    num_fronts: int = 1
    num_decoders: int = 0
    """Decoders that each worker has; none if the model does not allow them, or the settings."""

    @property
    def own(self) -> ModelSettings:
        """Settings of the model."""
        return self.settings.models[self.model]

    @property
    def is_on_gpus(self) -> bool:
        """Replicas go to GPUs."""
        return bool(self.host.gpus) and self.own.devices != "cpu"


def knobs_for(facts: KnobFacts, fixed: frozenset[str]) -> list[Knob]:
    """Return the knobs that a model has on this host, without those of `fixed` settings."""
    found = []
    for name, ways_of in _KNOBS.items():
        ways = [list(way) for way in ways_of(facts)]
        knob = Knob(name=name, ways=[way for way in ways if way])
        if knob.ways and not knob.settings & fixed:
            found.append(knob)
    return found


def key_of(name: str, model: str) -> tuple[str, ...]:
    """Return the path of a setting in the file."""
    return (name,) if name in Settings.model_fields else ("models", model, name)


_Ways = Sequence[Sequence[Changes]]


def _replicas(facts: KnobFacts) -> _Ways:
    """Vary how replicas share the cores; on GPUs, how many share one."""
    now = facts.settings.placements_of(facts.model, facts.host)
    num = len(now)
    if now[0].split:
        return _split_replicas(facts, now)
    if facts.is_on_gpus:
        per_gpu = len({placement.visible for placement in now})
        return [[{"replicas": num + per_gpu}, {"replicas": num + 2 * per_gpu}]]
    cores = facts.host.num_cores
    each = now[0].num_threads
    fewer = [_share(count, cores) for count in _halves(num)]
    more = [_share(count, cores) for count in (2 * num, 4 * num) if count <= cores]
    # The front end keeps a core: with a quick model it has most of the work.
    spared = [{"replicas": num - 1, "threads_per_replica": each}] if num > 1 else []
    return [spared, fewer, more] if spared != fewer[:1] else [fewer, more]


def _split_replicas(facts: KnobFacts, now: Sequence[Placement]) -> _Ways:
    """Use the same devices for more replicas of fewer parts each."""
    num_devices = sum(placement.num_ranks for placement in now)
    sizes = [size for size in _halves(now[0].num_ranks) if size > 1]
    return [[{"devices_per_replica": size, "replicas": num_devices // size} for size in sizes]]


def _share(replicas: int, cores: int) -> Changes:
    return {"replicas": replicas, "threads_per_replica": max(1, cores // replicas)}


def _halves(number: int) -> list[int]:
    found = []
    while number > 1:
        number //= 2
        found.append(number)
    return found


def _batch_size(facts: KnobFacts) -> _Ways:
    size = facts.own.batch_size
    up = [{"max_batch_size": size * factor} for factor in (2, 4, 8)]
    down = [{"max_batch_size": size // factor} for factor in (2, 4, 8) if size >= factor]
    return [up, down]


def _credit(facts: KnobFacts) -> _Ways:
    credit = facts.own.credit
    up = [{"credit": credit + step} for step in (1, 2)]
    return [up, [{"credit": credit - 1}] if credit > 1 else []]


def _front_ends(facts: KnobFacts) -> _Ways:
    now = facts.num_fronts
    up = [{"front_ends": now + step} for step in (1, 2) if now + step <= facts.host.num_cores]
    return [up, [{"front_ends": now - 1}] if now > 1 else []]


def _objective(facts: KnobFacts) -> _Ways:
    """Try the objective, which keeps batches small."""
    wanted = facts.goal.p99_ms
    is_new = wanted is not None and facts.own.objective_p99_ms != wanted
    return [[{"objective_p99_ms": wanted}]] if is_new else []


def _batch_wait(facts: KnobFacts) -> _Ways:
    now = facts.own.batch_wait_ms
    up = [{"batch_wait_ms": wait} for wait in (1.0, 2.0, 5.0) if wait > now]
    return [up, [{"batch_wait_ms": 0.0}] if now else []]


def _prepare_threads(facts: KnobFacts) -> _Ways:
    now = facts.own.prepare_threads
    if now == "auto":
        up = (12, 16) if facts.is_on_gpus else (2, 4)
        return [[{"prepare_threads": count} for count in up]]
    return [[{"prepare_threads": 2 * now}], [{"prepare_threads": count} for count in _halves(now)]]


def _decoders(facts: KnobFacts) -> _Ways:
    """Vary the processes that decode, where there are some.

    Without a GPU there are none unless the user wants some: they take cores from the replicas.
    """
    now = facts.num_decoders
    if not now:
        return []
    return [[{"decoders": now + 2}], [{"decoders": count} for count in (*_halves(now), 0)]]


def _decode(facts: KnobFacts) -> _Ways:
    """Try exact decoding where `auto` has chosen another; the user's own choice stays."""
    is_chosen = facts.own.decode == "auto" and facts.decode != "exact"
    return [[{"decode": "exact"}]] if is_chosen else []


def _speed(facts: KnobFacts) -> _Ways:
    """Try presets that change answers by no more than rounding, where the choice is open.

    Only `auto` tries the others, since it verifies them. Where `auto` found nothing to gain, there
    is nothing to try.
    """
    if facts.own.speed != "auto" or facts.preset == "exact":
        return []
    names = ("exact", "channels_last", "folded")
    return [[{"speed": name}] for name in names if name != facts.preset]


_KNOBS: Mapping[str, Callable[[KnobFacts], _Ways]] = {
    "replicas x threads": _replicas,
    "batch size": _batch_size,
    "processes that take calls": _front_ends,
    "objective": _objective,
    "credit": _credit,
    "decoders": _decoders,
    "threads that prepare": _prepare_threads,
    "wait for a batch": _batch_wait,
    "speed preset": _speed,
    "decoding": _decode,
}
