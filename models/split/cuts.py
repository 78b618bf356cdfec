"""Where a pipeline is cut into stages, and a trial that they compute the same. In workers only."""

import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from inferpool.models.errors import ModelError
from inferpool.models.split.balance import SPREAD, balanced, sizes_of, times_of
from inferpool.models.split.ranks import Ranks
from inferpool.models.split.rehearsal import EXACT, Example, Rehearsal, copied
from inferpool.models.split.report import SplitReport
from inferpool.models.split.stages import Course
from inferpool.models.split.tracing import asks_for_types

logger = logging.getLogger(__name__)

_SLACK = 1.1
"""What cuts that fewer values cross may cost, in the bytes or in the time of a stage."""
_SMALL_SHARE = 0.25
"""Of the memory that each rank may take: a whole network below that is not cut for its memory."""


def choose_cuts(
    ranks: Ranks, course: Course, example: Example, split_points: Sequence[str], room_bytes: int
) -> SplitReport:
    """Choose where to cut a network: where the user says, or so that the stages are balanced.

    Args:
        ranks: This rank and the others; one stage for each.
        course: The steps of the network.
        example: What it will be called with, to measure the steps.
        split_points: The submodules to cut in front of, if the user names them.
        room_bytes: What each rank may take of its device's memory; 0 where that is not known.

    Raises:
        ModelError: The user names too few or too many, or there are too few places to cut at.
    """
    if split_points:
        if isinstance(split_points, str):
            raise ModelError(f"split_points is a list of names: [{split_points!r}]")
        if len(split_points) != ranks.size - 1:
            raise ModelError(
                f"{ranks.size} stages want {ranks.size - 1} split points, not {len(split_points)}, "
                f"which are for devices_per_replica = {len(split_points) + 1}"
            )
        return SplitReport(cuts=tuple(split_points), note="cut where the model says")
    sizes = sizes_of(course)
    times, note = _times(ranks, course, example)
    most = largest_share_for(sum(sizes), room_bytes)
    if times and most == math.inf:
        note = (
            f"balanced by time, since its {_mib(sum(sizes))} are little beside the "
            f"{_mib(room_bytes)} that each rank may take"
        )
    positions = cut_positions(course, sizes, times or sizes, ranks.size, largest_share=most)
    limits = course.stages(positions)
    shares = [_mib(sum(sizes[begin:end])) for begin, end in limits]
    if times:
        shares = [
            f"{share} in {sum(times[begin:end]) * 1e3:.3g} ms"
            for share, (begin, end) in zip(shares, limits, strict=True)
        ]
    return SplitReport(
        cuts=tuple(course.names[position] for position in positions),
        note=f"{note}: {', '.join(shares)}",
    )


def largest_share_for(num_bytes: int, room_bytes: int) -> float:
    """How many even shares of a network's bytes a stage may have, if each rank has so much room."""
    return math.inf if num_bytes <= _SMALL_SHARE * room_bytes else SPREAD


def cut_positions(
    course: Course,
    sizes: Sequence[int],
    costs: Sequence[float],
    num_stages: int,
    largest_share: float = SPREAD,
) -> list[int]:
    """The steps to cut at: balanced, and where a single value crosses if that costs little.

    Raises:
        ModelError: There are too few places to cut at.
    """
    places = sorted(position for position in course.names if position)
    best = balanced(sizes, costs, places, num_stages, largest_share)
    narrow = [position for position in places if course.num_crossing(position) == 1]
    if len(narrow) < num_stages - 1:
        return best
    simple = balanced(sizes, costs, narrow, num_stages, largest_share)

    def largest(values: Sequence[float], positions: Sequence[int]) -> float:
        return max(sum(values[begin:end]) for begin, end in course.stages(positions))

    matters = [costs] if largest_share == math.inf else [sizes, costs]
    is_near = all(largest(each, simple) <= _SLACK * largest(each, best) for each in matters)
    return simple if is_near else best


def _times(ranks: Ranks, course: Course, example: Example) -> tuple[list[float], str]:
    values = example.values() if isinstance(example, Mapping) else example
    if not example or any(value is None for value in values):
        return [], "balanced by bytes, since the shapes of its inputs are not known"
    try:
        return times_of(course, example, ranks.device), "balanced by bytes and time"
    except Exception as error:  # the network is the user's: it may raise anything
        text = "steps cannot be measured: %s: %s"
        logger.warning(text, type(error).__name__, error)
        return [], f"balanced by bytes, since measuring failed with {type(error).__name__}"


def rehearsed(
    course: Course, report: SplitReport, example: Example, device: torch.device
) -> SplitReport:
    """See that the stages compute what the whole network does; the report then says it.

    Raises:
        ModelError: They do not.
    """
    rehearsal = Rehearsal(course.network, example, device)
    if rehearsal.complaint and asks_for_types(course.network):
        raise ModelError(
            f"{type(course.network).__name__} cannot be cut: its forward asks for types, which "
            f"torch.fx may answer wrongly, and what it computes was not held against the whole "
            f"network: {rehearsal.complaint}; give `load_network` an `example`"
        )
    if rehearsal.complaint:
        text = f"{report.note}; not held against the whole network: {rehearsal.complaint}"
        return msgspec.structs.replace(report, note=text)
    limits = course.stages(course.positions(report.cuts))
    stages = [course.cut(begin, end) for begin, end in limits]
    signature = inspect.signature(course.network.forward)

    def compute(*args: object, **kwargs: object) -> object:
        bound = signature.bind(*args, **kwargs)
        values: Any = tuple(bound.arguments[name] for name in course.arguments)
        with torch.inference_mode():
            for stage in stages:
                values = stage(*copied(values))
        return values

    if difference := rehearsal.difference(compute, rehearsal.origins, EXACT):
        raise ModelError(
            f"{difference}. torch.fx has traced another way through its code than it takes: have "
            f"what branches on shapes, types or values, or computes with plain numbers, in "
            f'submodules of its own, or set placement = "replicate"'
        )
    return report


def _mib(num: int) -> str:
    return f"{num / (1 << 20):,.1f} MiB"
