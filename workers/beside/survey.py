"""Measures the memory that a network takes, whole and split, one step at a time.

Nothing is loaded: only the step being computed has real parameters, so a network may be larger than
this machine's memory. Not in the front end.
"""

from collections.abc import Callable, Mapping, Sequence
from inspect import isfunction
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, fx, nn

from inferpool.models.accelerator.device import is_accelerator, peak_bytes, reset_peak
from inferpool.models.base import Model
from inferpool.models.errors import ModelError, PassesThrough
from inferpool.models.runtime import Example
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
from inferpool.models.split.verification import has_all_shapes
from inferpool.workers.inside.allocator import give_back

_FORGET_PEAK = "5"
"""Value for /proc/PID/clear_refs that resets the peak of the resident set (proc(5))."""


class PeakMemory:
    """Peak of the memory in use, above the level at the start.

    On a CPU it is the peak of the resident set, which includes what libraries keep; on a GPU the
    peak of torch's allocations. Where the system does not record the peak, it is the present value.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = 0

    def start(self) -> None:
        """Use the memory in use now as the level that counts as zero."""
        self._start = 0
        self.reset()
        self._start = self.read()

    def reset(self) -> None:
        """Begin a new peak."""
        if is_accelerator(self._device):
            reset_peak(self._device)
            return
        give_back()
        try:
            Path("/proc/self/clear_refs").write_text(_FORGET_PEAK)
        except OSError:  # another system, or not permitted
            return

    def read(self) -> int:
        """Return the peak since the last reset, in bytes."""
        is_apart = is_accelerator(self._device)
        return (peak_bytes(self._device) if is_apart else _peak_bytes()) - self._start


def _peak_bytes() -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        lines = []
    found = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(found[0]) << 10 if found else int(psutil.Process().memory_info().rss)


class FoundNetwork(PassesThrough):
    """Ends a model's `load` where that calls `load_network`, and holds its arguments."""

    def __init__(self, build: Callable[[], nn.Module], example: Example) -> None:
        super().__init__()
        self.build = build
        self.example = example


def may_have_network(model: Model) -> bool:
    """Return whether a model's class mentions `load_network`, which splitting needs."""
    below = type(model).__mro__[: type(model).__mro__.index(Model)]
    functions = [each for kind in below for each in vars(kind).values() if isfunction(each)]
    return any("load_network" in each.__code__.co_names for each in functions)


def find_network(model: Model, placement: Placement) -> FoundNetwork | None:
    """Find the network that a model would load, without loading it.

    Returns:
        None if its `load` ended without calling `load_network`: then it is loaded.

    Raises:
        ModelError: Its `load` fails.
    """

    def find(
        build: Callable[[], nn.Module],
        weights: Path | str | None,
        placement: Placement,
        *,
        example: Example = (),
    ) -> Callable[..., object]:
        raise FoundNetwork(build, example)

    model.load_network = find  # type: ignore[method-assign]  # of this object, which loads nothing
    try:
        model.load(placement)
    except FoundNetwork as found:
        return found
    return None


def survey(
    model: Model,
    found: FoundNetwork,
    *,
    device: torch.device,
    max_rows: int,
    rooms: Mapping[int, int],
) -> Survey:
    """Measure a network: whole, and split over each of several numbers of ranks.

    Args:
        model: Its attributes may say how its network is to be split.
        found: The network.
        device: Device to compute on.
        max_rows: Rows of the largest batch.
        rooms: Numbers of ranks to try, with the bytes that each rank then has.

    Raises:
        Exception: Raised by the building of the network.
    """
    peak = PeakMemory(device)
    network = MetaNetwork(found.build).network
    num_used = num_bytes(network)
    seconds: Sequence[float] = ()
    activation_bytes: int | None = None
    try:
        steps = ForwardSteps(network, found.example)
    except ModelError as error:
        note = f"not tried, since it cannot be cut ({error})"
        pipelines = [Way(split="pipeline", num_ranks=n, problem=str(error)) for n in rooms]
    else:
        note = "not tried, since the shapes of its inputs are not known"
        if batch := _with_rows(found.example, max_rows):
            try:
                seconds = times_of(steps, batch, device)
                activation_bytes = _activation_bytes(steps, batch, device, peak)
                note = ""
            except Exception as error:  # the network is the user's: it may raise anything
                note = f"not tried to the end ({type(error).__name__}: {error})"
                seconds = ()
        pipelines = [_pipeline(model, steps, seconds, *each) for each in rooms.items()]
    fresh = MetaNetwork(found.build).network  # tracing has changed the other
    tensors = [_tensor(model, fresh, found.example, num_ranks) for num_ranks in rooms]
    return Survey(
        num_bytes=num_used,
        num_rows=max_rows,
        activation_bytes=activation_bytes,
        note=note,
        ways=(Way(split=None, rank_bytes=(num_used,), text="whole"), *pipelines, *tensors),
    )


def _with_rows(example: Example, num: int) -> Sequence[Tensor] | Mapping[str, Tensor]:
    """Return an example of `num` rows; empty if its shapes are not known."""
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
    peak: PeakMemory,
) -> int:
    """Measure the peak in addition to the parameters of the step being computed."""
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
    model: Model, steps: ForwardSteps, seconds: Sequence[float], num_ranks: int, room_bytes: int
) -> Way:
    sizes = sizes_of(steps)
    points = model.split_points or getattr(steps.network, "split_points", ())
    try:
        if points and len(points) != num_ranks - 1:
            raise ModelError(f"the model has split points for {len(points) + 1} stages")
        if points:
            positions = steps.positions(points)
        else:
            most = largest_share_for(sum(sizes), room_bytes)
            positions = cut_positions(steps, sizes, seconds or sizes, num_ranks, most)
    except ModelError as error:
        return Way(split="pipeline", num_ranks=num_ranks, problem=str(error))
    stages = steps.stages(positions)
    return Way(
        split="pipeline",
        num_ranks=num_ranks,
        rank_bytes=tuple(sum(sizes[begin:end]) for begin, end in stages),
        text=" | ".join(steps.describe(begin, end) for begin, end in stages),
    )


def _tensor(model: Model, network: nn.Module, example: Example, num_ranks: int) -> Way:
    try:
        can_verify = has_all_shapes(example)
        plan, text = choose_plan(network, num_ranks, model.tensor_plan, can_verify=can_verify)
    except ModelError as error:
        return Way(split="tensor", num_ranks=num_ranks, problem=str(error))
    cut_bytes = sum(each.nbytes for each in cut_parameters(network, plan))
    rank_bytes = round(num_bytes(network) - (1 - 1 / num_ranks) * cut_bytes)
    return Way(split="tensor", num_ranks=num_ranks, rank_bytes=(rank_bytes,) * num_ranks, text=text)
