"""Finds the placements that fit each model on these devices, from the sizes of its network.

The sizes do not tell the speed: two processes that split minilm_l6 by its matrices answer less than
half of what its layers' times promise. So the speed is measured, or not reported at all.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from inferpool.models.spec import Placement
from inferpool.models.split.report import Survey, Way
from inferpool.service.checks.facts import Facts
from inferpool.service.checks.findings import Finding, error, note, ok, warning
from inferpool.service.checks.memory import FORKSERVER_BYTES, FRONT_END_BYTES, WORKER_BYTES
from inferpool.service.client.texts import in_words
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.settings import Settings
from inferpool.service.tools.doctor.probes import PROBE_TIMEOUT_S, may_split, order_for, probe
from inferpool.workers.host.devices import Host

if TYPE_CHECKING:  # `--measure` alone imports it
    from inferpool.service.tools.tune.race import PlacementRace, Speed

_USUAL_RANKS = (2, 4)
_CLIENTS_PER_ROW = 4
"""Clients per row of a batch: one batch runs, one waits at the worker, two more fill up."""
_LOOK_S = 1.0
_BUSY = 25.0
"""Use of all processors, in per cent, above which speeds are not measured."""
_SURVEYS_S = 60.0
"""Time for all models together, unless placements are measured."""
_HEAD = ("placement", "needs", "fits", "what each process has")


def check_ways(
    facts: Facts,
    settings: Settings,
    names: Sequence[str],
    race: "PlacementRace | None",
    find_use: Callable[[], float] = lambda: psutil.cpu_percent(_LOOK_S),
) -> Iterator[Finding]:
    """Measure the networks of models without loading them, and say how to place them.

    Measures the speed of placements only if there is a `race`, and if `find_use` returns a low use
    of the processors by others, in per cent.
    """
    if race and (busy := find_use()) > _BUSY:
        race = None
        yield note(
            "speed of placements",
            f"not measured: others keep {busy:.0f} % of the processors busy, which favours "
            "placements with more processes",
            "measure when they are done",
        )
    until = time.monotonic() + _SURVEYS_S
    for name in names:
        model = settings.models[name]
        if not may_split(model):
            continue
        left_s = PROBE_TIMEOUT_S + model.load_timeout_s
        if race is None:
            left_s = min(left_s, until - time.monotonic())
        if left_s <= 0:
            yield note(
                f"placement of {name}",
                f"not checked: the models before it took {_SURVEYS_S:.0f} s",
                "--measure has no such limit",
            )
            continue
        room = room_for(name, facts, settings)
        rooms = [(num, room.has_bytes(num)) for num in room.num_ranks]
        order = order_for(facts, settings, name, "survey", rooms=rooms)
        for answer in probe([order], left_s):
            yield from _judge_answer(name, answer, room, race)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRoom:
    """Devices and memory for one model, and the placement that its settings choose."""

    chosen: Placement
    num_replicas: int
    num_alone: int
    """Replicas if none were split."""
    num_devices: int
    """Number of GPUs, or of cores."""
    is_gpu: bool
    device_bytes: int
    """Memory of the smallest GPU, or all free memory for CPU processes."""
    num_sharing: int
    """Processes that share a GPU; for CPUs, the processes of the other models."""
    max_batch_size: int = 1

    @property
    def num_ranks(self) -> list[int]:
        """Numbers of devices to consider for a split."""
        usual = [n for n in _USUAL_RANKS if not self.is_gpu or n <= max(2, self.num_devices)]
        more = {self.num_devices} if self.is_gpu and self.num_devices > 2 else set()
        return sorted({*usual, *more, self.chosen.num_ranks} - {1})

    def has_bytes(self, num_processes: int) -> int:
        """Return the memory of each process, if the model has this many."""
        if self.is_gpu:
            return self.device_bytes // self.num_sharing
        return self.device_bytes // (num_processes + self.num_sharing)


def room_for(name: str, facts: Facts, settings: Settings) -> ModelRoom:
    """Return the room for a model."""
    model = settings.models[name]
    chosen = facts.placements[name]
    alone = _unsplit(model, settings.host_of(name, facts.host))
    uuids = [uuid for placement in alone for uuid in placement.gpu_of_each_rank]
    device_bytes = max(
        0, facts.free_bytes - settings.arena_bytes - FRONT_END_BYTES - FORKSERVER_BYTES
    )
    if uuids:
        sizes = {gpu.uuid: gpu.memory_bytes for gpu in facts.host.gpus if not gpu.is_unified}
        device_bytes = min(sizes.get(uuid, device_bytes) for uuid in uuids)
        num_sharing = max(map(uuids.count, uuids))
    else:
        others = [p for other, ps in facts.placements.items() if other != name for p in ps]
        num_sharing = sum(p.num_ranks for p in others if not p.visible)
    return ModelRoom(
        chosen=chosen[0],
        num_replicas=len(chosen),
        num_alone=len(alone),
        num_devices=len(set(uuids)) if uuids else facts.host.num_cores,
        is_gpu=bool(uuids),
        device_bytes=device_bytes,
        num_sharing=num_sharing,
        max_batch_size=model.batch_size,
    )


def judge(
    name: str,
    survey: Survey,
    room: ModelRoom,
    context_bytes: int = 0,
    race: "PlacementRace | None" = None,
) -> Finding:
    """Find the best placement for a model, and problems of the chosen one.

    `context_bytes` is GPU memory in use besides torch's allocations.
    """
    options = list(_options(survey, room, context_bytes))
    chosen = next(o for o in options if o.is_chosen(room))
    best = next((option for option in options if option.fits), None)
    check = f"placement of {name}"
    about = f"{in_words(survey.num_bytes)} of parameters" + (
        f", {in_words(survey.activation_bytes)} more for a batch of {survey.num_rows}"
        if survey.activation_bytes is not None
        else ""
    )
    reason = f"{about}; {_reason(best, options[0], room)}"
    if survey.note:
        reason += f" (a batch was {survey.note})"
    advice = "" if best is None else f"set {best.in_settings(room)}"
    speeds = _speeds(name, options, room, race) if race else {}
    ratio = speeds[chosen.name].ratio if chosen.name in speeds else None
    if best is None:
        found = error(check, reason, _what_would_fit(options, room))
    elif not chosen.fits and chosen.is_hopeless:
        found = error(check, f"{chosen.name} does not fit: {reason}", advice)
    elif not chosen.fits:
        found = warning(check, f"{chosen.name} may not fit: {reason}", advice)
    elif best.way.split != chosen.way.split and (ratio is None or ratio < 1):
        cost = "costs throughput"
        if ratio is not None:
            cost = f"has {ratio:.2f} of the throughput of {best.name}"
        found = warning(check, f"{chosen.name} is chosen, which {cost}: {reason}", advice)
    else:
        found = ok(check, reason)
    rows = [_HEAD, *(option.row for option in options)]
    if speeds:
        head = (*_HEAD[:-1], "inputs/s", _HEAD[-1])
        rows = [head, *(_with_speed(option.row, speeds.get(option.name)) for option in options)]
    return replace(found, rows=tuple(rows))


def _speeds(
    name: str, options: Sequence["_PlacementOption"], room: ModelRoom, race: "PlacementRace"
) -> Mapping[str, "Speed"]:
    """Measure all placements that fit, each compared with the whole model if that fits."""
    most = max(_USUAL_RANKS[0], room.num_devices)
    fitting = [o for o in options if o.fits and (o.way.num_ranks <= most or o.is_chosen(room))]
    whole = [option for option in fitting if option.way.split is None][:1]
    split = [option for option in fitting if option.way.split]
    if not split:
        return {}
    return race(
        name,
        {option.name: option.settings for option in [*whole, *split]},
        num_clients=_CLIENTS_PER_ROW * room.max_batch_size * max(2, room.num_alone),
        is_side_by_side=not room.is_gpu,
    )


def _with_speed(row: tuple[str, ...], speed: "Speed | None") -> tuple[str, ...]:
    *figures, parts = row
    if speed is None:
        return (*figures, "", parts)
    if speed.problem:
        return (*figures, "not measured", speed.problem)  # only the last column is wrapped
    rate = f"{speed.rate:.0f}" if speed.rate >= 10 else f"{speed.rate:.2g}"
    return (*figures, rate if speed.ratio is None else f"{rate} ({speed.ratio:.2f})", parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlacementOption:
    way: Way
    num_replicas: int
    need_bytes: int
    """Memory that the largest process needs."""
    least_bytes: int
    """Memory of its part of the parameters: it needs at least this."""
    has_bytes: int
    problem: str

    @property
    def fits(self) -> bool:
        return not self.problem and self.need_bytes <= self.has_bytes

    @property
    def is_hopeless(self) -> bool:
        return bool(self.problem) or self.least_bytes > self.has_bytes

    @property
    def name(self) -> str:
        if self.way.split is None:
            return f"replicate x{self.num_replicas}"
        groups = f"{self.num_replicas} of " if self.num_replicas > 1 else ""
        return f"{groups}{self.way.split} x{self.way.num_ranks}"

    @property
    def row(self) -> tuple[str, ...]:
        if self.problem:
            return (self.name, "", "no", self.problem)
        parts = " + ".join(in_words(each) for each in self.way.rank_bytes)
        if self.way.split == "tensor":
            parts = f"{in_words(self.way.rank_bytes[0])}: {self.way.text}"
        sizes = f"{in_words(self.need_bytes)} of {in_words(self.has_bytes)}"
        return (self.name, sizes, "yes" if self.fits else "no", parts)

    @property
    def settings(self) -> Mapping[str, object]:
        return {
            "placement": self.way.split or "replicate",
            "devices_per_replica": self.way.num_ranks if self.way.split else "auto",
            "replicas": self.num_replicas,
            **({"speed": "auto"} if self.way.split else {}),  # a split model takes no other
        }

    def is_chosen(self, room: ModelRoom) -> bool:
        if self.way.split is None and room.chosen.split is None:
            return self.num_replicas == room.num_replicas
        return (self.way.split, self.way.num_ranks) == (room.chosen.split, room.chosen.num_ranks)

    def in_settings(self, room: ModelRoom) -> str:
        if self.way.split is None:
            is_fewer = self.num_replicas < room.num_alone
            return 'placement = "replicate"' + (
                f", replicas = {self.num_replicas}" if is_fewer else ""
            )
        return f'placement = "{self.way.split}", devices_per_replica = {self.way.num_ranks}'


def _options(survey: Survey, room: ModelRoom, context_bytes: int) -> Iterator[_PlacementOption]:
    beside = context_bytes if room.is_gpu else WORKER_BYTES
    beside += survey.activation_bytes or 0
    for way in survey.ways:
        for num_replicas in _numbers_of_replicas(way, room):
            num_processes = num_replicas * way.num_ranks
            least = max(way.rank_bytes, default=0)
            problem = way.problem
            if room.is_gpu and way.num_ranks > room.num_devices:
                problem = f"there are fewer than {way.num_ranks} GPUs"
            yield _PlacementOption(
                way=way,
                num_replicas=num_replicas,
                need_bytes=least + beside,
                least_bytes=least,
                has_bytes=room.has_bytes(num_processes),
                problem=problem,
            )


def _numbers_of_replicas(way: Way, room: ModelRoom) -> Sequence[int]:
    if way.split is None:
        return [room.num_alone, 1] if room.num_alone > 1 and not room.is_gpu else [room.num_alone]
    if room.is_gpu:
        return [max(1, room.num_devices // way.num_ranks)]
    is_chosen = (way.split, way.num_ranks) == (room.chosen.split, room.chosen.num_ranks)
    return [room.num_replicas if is_chosen else 1]


def _unsplit(model: ModelSettings, host: Host) -> Sequence[Placement]:
    whole = {"placement": "replicate", "devices_per_replica": "auto"}
    if model.split:
        whole["replicas"] = "auto"
    return model.model_copy(update=whole).placements_on(host)


def _reason(best: _PlacementOption | None, whole: _PlacementOption, room: ModelRoom) -> str:
    device = "one GPU" if room.is_gpu else "one process"
    sizes = f"{in_words(whole.need_bytes)} of the {in_words(whole.has_bytes)} of {device}"
    if best is None:
        return f"nothing fits: the whole model needs {sizes}"
    if best.way.split is None and best.num_replicas == whole.num_replicas:
        return f"it fits, with {sizes}: replicate; split only what does not fit"
    need, has = in_words(best.need_bytes), in_words(best.has_bytes)
    if best.way.split is None:
        return f"{whole.num_replicas} replicas do not fit, but one does, with {need} of {has}"
    return (
        f"the whole model needs {in_words(whole.need_bytes)}, and {device} has "
        f"{in_words(whole.has_bytes)}: {best.name} takes {need} of {has} on each"
    )


def _what_would_fit(options: Sequence[_PlacementOption], room: ModelRoom) -> str:
    whole = options[0]
    left = whole.has_bytes - (whole.need_bytes - whole.least_bytes)
    one = f"one with {in_words(whole.need_bytes)}"
    if not room.is_gpu:
        return f"free at least {in_words(whole.need_bytes)} of memory"
    if left <= 0:
        return f"larger GPUs or smaller batches (max_batch_size) would help: {one}"
    num = math.ceil(whole.least_bytes / left)
    return f'{num} such GPUs would be enough (placement = "pipeline"), or {one}'


def _judge_answer(
    name: str, answer: Mapping[str, Any], room: ModelRoom, race: "PlacementRace | None"
) -> Iterator[Finding]:
    if answer.get("problem"):
        yield note(f"placement of {name}", answer["problem"])
    elif answer["kind"] == "survey":
        survey = msgspec.convert(answer["survey"], Survey)
        yield judge(name, survey, room, answer["context_bytes"], race)
