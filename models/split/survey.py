"""Measures what a network would take, whole and split, with one step of it at a time in memory.

Nothing is loaded: parameters have shapes and no numbers, but for those of the step that is being
computed. So a network can be larger than the memory that it is measured in. Not in the front end.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import isfunction
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from models.base import Model
from models.errors import ModelError
from models.spec import Placement
from models.split.balance import run_steps, sizes_of, times_of
from models.split.measures import Survey, Way
from models.split.packing import num_rows
from models.split.pipeline import cut_positions, largest_share_for
from models.split.rehearsal import Example
from models.split.sketch import Sketch, num_bytes
from models.split.stages import Course
from models.split.tensor import choose_plan, cut_parameters

_NUM_PIECES = 4
"""Of a batch, where a pipeline is estimated; the lead of a real one tries several numbers."""


class Peak(Protocol):
    """The most memory that is in use at a time."""

    def start(self) -> None:
        """Take what is in use now for nothing."""

    def reset(self) -> None:
        """Forget what was in use at most."""

    def read(self) -> int:
        """The most that was in use since then, in bytes."""


@dataclass(frozen=True, slots=True)
class FoundNetwork:
    """What a model's `load` has asked `load_network` for."""

    build: Callable[[], nn.Module]
    example: Example


class _Found(BaseException):
    def __init__(self, network: FoundNetwork) -> None:
        super().__init__()
        self.network = network


def may_have_network(model: Model) -> bool:
    """Whether the class of a model mentions `load_network`, as those that can be split do."""
    below = type(model).__mro__[: type(model).__mro__.index(Model)]
    functions = [each for kind in below for each in vars(kind).values() if isfunction(each)]
    return any("load_network" in each.__code__.co_names for each in functions)


def find_network(model: Model, placement: Placement) -> FoundNetwork | None:
    """Have a model say what network it would load, and load none of it.

    Returns:
        None if its `load` came to its end without a word of one: it has loaded itself.

    Raises:
        ModelError: It cannot be had.
    """

    def find(
        build: Callable[[], nn.Module],
        weights: Path | str | None,
        placement: Placement,
        *,
        example: Example = (),
    ) -> Callable[..., object]:
        raise _Found(FoundNetwork(build, example))

    model.load_network = find  # type: ignore[method-assign]  # of this object, which loads nothing
    try:
        model.load(placement)
    except _Found as found:
        return found.network
    return None


def survey(
    model: Model,
    found: FoundNetwork,
    *,
    device: torch.device,
    max_rows: int,
    rooms: Mapping[int, int],
    peak: Peak,
) -> Survey:
    """Measure a network: whole, and split over each of several numbers of ranks.

    Args:
        model: It may say how its network is to be split.
        found: The network.
        device: Where to compute.
        max_rows: The largest batch.
        rooms: The numbers of ranks to think of, with the bytes that each rank has then.
        peak: Measures memory on the device.

    Raises:
        Exception: As it was raised by the building of the network.
    """
    network = Sketch(found.build).network
    try:
        course = Course(network, found.example)
    except ModelError as error:
        trial = _Trial(note=f"not tried, since it cannot be cut ({error})")
        pipelines = [Way(split="pipeline", num_ranks=n, problem=str(error)) for n in rooms]
    else:
        trial = _try(course, found.example, device, max_rows, peak)
        pipelines = [_pipeline(model, course, trial, n, room) for n, room in rooms.items()]
    whole = Way(
        split=None,
        rank_bytes=(num_bytes(network),),
        rank_s=(trial.batch_s,) if trial.seconds else (),
        throughput=1.0 if trial.seconds else None,
        text="whole",
    )
    return Survey(
        num_bytes=num_bytes(network),
        num_rows=max_rows,
        batch_s=trial.batch_s if trial.seconds else None,
        activation_bytes=trial.activation_bytes,
        note=trial.note,
        ways=(whole, *pipelines, *_tensors(model, found, trial, list(rooms))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """What came of computing the largest batch, step by step."""

    steps: Sequence[str] = ()
    """The submodules that they call; empty where it is none."""
    seconds: Sequence[float] = ()
    """Of each step; empty if the batch could not be tried."""
    piece_s: Sequence[float] = ()
    """Of each step, for one of `num_pieces` of the batch."""
    num_pieces: int = 1
    activation_bytes: int | None = None
    note: str = ""

    @property
    def batch_s(self) -> float:
        return sum(self.seconds)


def _try(
    course: Course, example: Example, device: torch.device, max_rows: int, peak: Peak
) -> _Trial:
    num_pieces = min(max_rows, _NUM_PIECES)
    batch, piece = (_with_rows(example, rows) for rows in (max_rows, max_rows // num_pieces))
    if not batch or not piece:
        return _Trial(note="not tried, since the shapes of its inputs are not known")
    try:
        seconds = times_of(course, batch, device)
        return _Trial(
            steps=[str(each.target) if each.op == "call_module" else "" for each in course.steps],
            seconds=seconds,
            piece_s=times_of(course, piece, device),
            num_pieces=num_pieces,
            activation_bytes=_activation_bytes(course, batch, device, peak),
        )
    except Exception as error:  # the network is the user's: it may raise anything
        return _Trial(note=f"not tried to the end ({type(error).__name__}: {error})")


def _with_rows(example: Example, num: int) -> Sequence[Tensor] | Mapping[str, Tensor]:
    """An example of so many rows; empty where that cannot be made."""
    values = list(example.values()) if isinstance(example, Mapping) else list(example)
    known = [each for each in values if each is not None]
    if len(known) < len(values) or num_rows(known) is None:
        return ()
    rows = [each[:1].repeat(num, *[1] * (each.dim() - 1)) for each in known]
    return dict(zip(example, rows, strict=True)) if isinstance(example, Mapping) else rows


def _activation_bytes(
    course: Course,
    batch: Sequence[Tensor] | Mapping[str, Tensor],
    device: torch.device,
    peak: Peak,
) -> int:
    """The most that is in use at a time beside the parameters of the step that is computed."""
    sizes = dict(zip(course.steps, sizes_of(course), strict=True))
    most = 0

    def watched(step: fx.Node, call: Callable[[], Any]) -> Any:
        nonlocal most
        peak.reset()
        result = call()
        most = max(most, peak.read() - sizes[step])
        return result

    peak.start()
    run_steps(course, batch, device, watched)
    return most


def _pipeline(model: Model, course: Course, trial: _Trial, num_ranks: int, room_bytes: int) -> Way:
    sizes = sizes_of(course)
    points = model.split_points or getattr(course.network, "split_points", ())
    try:
        if points and len(points) != num_ranks - 1:
            raise ModelError(f"the model has split points for {len(points) + 1} stages")
        positions = (
            course.positions(points)
            if points
            else cut_positions(
                course,
                sizes,
                trial.seconds or sizes,
                num_ranks,
                largest_share=largest_share_for(sum(sizes), room_bytes),
            )
        )
    except ModelError as error:
        return Way(split="pipeline", num_ranks=num_ranks, problem=str(error))
    stages = course.stages(positions)
    rank_s = [sum(trial.seconds[begin:end]) for begin, end in stages]
    in_pieces_s = [sum(trial.piece_s[begin:end]) for begin, end in stages]
    # All stages fill once, and the slowest computes the other pieces meanwhile or after that.
    batch_s = min(sum(rank_s), sum(in_pieces_s) + (trial.num_pieces - 1) * max(in_pieces_s))
    return Way(
        split="pipeline",
        num_ranks=num_ranks,
        rank_bytes=tuple(sum(sizes[begin:end]) for begin, end in stages),
        rank_s=tuple(rank_s) if trial.seconds else (),
        throughput=trial.batch_s / (num_ranks * batch_s) if trial.seconds else None,
        text=" | ".join(course.describe(begin, end) for begin, end in stages),
    )


def _tensors(
    model: Model, found: FoundNetwork, trial: _Trial, num_ranks: Sequence[int]
) -> list[Way]:
    network = Sketch(found.build).network  # another: that which was traced is not as it was
    return [_tensor(model, network, trial, each) for each in num_ranks]


def _tensor(model: Model, network: nn.Module, trial: _Trial, num_ranks: int) -> Way:
    try:
        plan, text = choose_plan(network, num_ranks, model.tensor_plan)
    except ModelError as error:
        return Way(split="tensor", num_ranks=num_ranks, problem=str(error))
    cut = cut_parameters(network, plan)
    left_out = 1 - 1 / num_ranks
    cut_bytes = sum(each.nbytes for each in cut)
    rank_bytes = round(num_bytes(network) - left_out * cut_bytes)
    rank_s = sum(
        seconds * (1 - left_out * _share(network.get_submodule(name), cut)) if name else seconds
        for name, seconds in zip(trial.steps, trial.seconds, strict=True)
    )
    return Way(
        split="tensor",
        num_ranks=num_ranks,
        rank_bytes=(rank_bytes,) * num_ranks,
        rank_s=(rank_s,) * num_ranks if trial.seconds else (),
        throughput=trial.batch_s / (num_ranks * rank_s) if trial.seconds else None,
        text=text,
    )


def _share(module: nn.Module, cut: Sequence[nn.Parameter]) -> float:
    """The part of a module's bytes that is cut."""
    known = set(map(id, cut))
    own = list(module.parameters())
    return sum(p.nbytes for p in own if id(p) in known) / max(1, sum(p.nbytes for p in own))
