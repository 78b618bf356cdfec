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

from inferpool.models.base import Model
from inferpool.models.errors import ModelError
from inferpool.models.spec import Placement
from inferpool.models.split.cuts import (
    cut_positions,
    largest_share_for,
    run_steps,
    sizes_of,
    times_of,
)
from inferpool.models.split.meta_network import MetaNetwork, num_bytes
from inferpool.models.split.packing import num_rows
from inferpool.models.split.report import Survey, Way
from inferpool.models.split.stages import ForwardSteps
from inferpool.models.split.tensor import choose_plan, cut_parameters
from inferpool.models.split.verification import Example


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
    network = MetaNetwork(found.build).network
    try:
        steps = ForwardSteps(network, found.example)
    except ModelError as error:
        trial = _Trial(note=f"not tried, since it cannot be cut ({error})")
        pipelines = [Way(split="pipeline", num_ranks=n, problem=str(error)) for n in rooms]
    else:
        trial = _try(steps, found.example, device, max_rows, peak)
        pipelines = [_pipeline(model, steps, trial, n, room) for n, room in rooms.items()]
    whole = Way(split=None, rank_bytes=(num_bytes(network),), text="whole")
    return Survey(
        num_bytes=num_bytes(network),
        num_rows=max_rows,
        activation_bytes=trial.activation_bytes,
        note=trial.note,
        ways=(whole, *pipelines, *_tensors(model, found, list(rooms))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """What came of computing the largest batch, step by step."""

    seconds: Sequence[float] = ()
    """Of each step; empty if the batch could not be tried."""
    activation_bytes: int | None = None
    note: str = ""


def _try(
    steps: ForwardSteps, example: Example, device: torch.device, max_rows: int, peak: Peak
) -> _Trial:
    batch = _with_rows(example, max_rows)
    if not batch:
        return _Trial(note="not tried, since the shapes of its inputs are not known")
    try:
        return _Trial(
            seconds=times_of(steps, batch, device),
            activation_bytes=_activation_bytes(steps, batch, device, peak),
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
    steps: ForwardSteps,
    batch: Sequence[Tensor] | Mapping[str, Tensor],
    device: torch.device,
    peak: Peak,
) -> int:
    """The most that is in use at a time beside the parameters of the step that is computed."""
    sizes = dict(zip(steps.steps, sizes_of(steps), strict=True))
    most = 0

    def watched(step: fx.Node, call: Callable[[], Any]) -> Any:
        nonlocal most
        peak.reset()
        result = call()
        most = max(most, peak.read() - sizes[step])
        return result

    peak.start()
    run_steps(steps, batch, device, watched)
    return most


def _pipeline(
    model: Model, steps: ForwardSteps, trial: _Trial, num_ranks: int, room_bytes: int
) -> Way:
    sizes = sizes_of(steps)
    points = model.split_points or getattr(steps.network, "split_points", ())
    try:
        if points and len(points) != num_ranks - 1:
            raise ModelError(f"the model has split points for {len(points) + 1} stages")
        positions = (
            steps.positions(points)
            if points
            else cut_positions(
                steps,
                sizes,
                trial.seconds or sizes,
                num_ranks,
                largest_share=largest_share_for(sum(sizes), room_bytes),
            )
        )
    except ModelError as error:
        return Way(split="pipeline", num_ranks=num_ranks, problem=str(error))
    stages = steps.stages(positions)
    return Way(
        split="pipeline",
        num_ranks=num_ranks,
        rank_bytes=tuple(sum(sizes[begin:end]) for begin, end in stages),
        text=" | ".join(steps.describe(begin, end) for begin, end in stages),
    )


def _tensors(model: Model, found: FoundNetwork, num_ranks: Sequence[int]) -> list[Way]:
    network = MetaNetwork(found.build).network  # another: that which was traced is not as it was
    return [_tensor(model, network, each) for each in num_ranks]


def _tensor(model: Model, network: nn.Module, num_ranks: int) -> Way:
    try:
        plan, text = choose_plan(network, num_ranks, model.tensor_plan)
    except ModelError as error:
        return Way(split="tensor", num_ranks=num_ranks, problem=str(error))
    cut_bytes = sum(each.nbytes for each in cut_parameters(network, plan))
    rank_bytes = round(num_bytes(network) - (1 - 1 / num_ranks) * cut_bytes)
    return Way(
        split="tensor",
        num_ranks=num_ranks,
        rank_bytes=(rank_bytes,) * num_ranks,
        text=text,
    )
