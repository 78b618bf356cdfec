"""Chooses where a pipeline is cut, so that neither memory nor time is wasted. Worker processes.

A network is cut for its memory, so bytes come first: the largest stage has at most `SPREAD` times
an even share of them, or as little as is possible. A pipeline is as fast as its slowest stage, so
of such cuts those are chosen that make the slowest stage fastest. For a network that
is small beside the ranks' memory only time counts.
"""

import inspect
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import msgspec
import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from inferpool.models.accelerator.device import synchronize
from inferpool.models.errors import ModelError
from inferpool.models.runtime import Example, NetworkToSplit
from inferpool.models.spec import SplitReport
from inferpool.models.split.ranks import Ranks
from inferpool.models.split.stages import ForwardSteps, asks_for_types
from inferpool.models.split.verification import EXACT, Verification, copied, has_all_shapes

logger = logging.getLogger(__name__)

SPREAD = 1.25
"""Largest stage that is allowed, in even shares of the bytes."""
_SLACK = 1.1
"""Factor on the largest stage, in bytes or time, that cuts with fewer values crossing may cost."""
_SMALL_SHARE = 0.25
"""Share of the memory that each rank may take: a smaller network is not cut for its memory."""
_NUM_TRIALS = 3
_BUDGET_S = 20.0
"""Seconds of measuring after which each step is tried once."""


def choose_cuts(
    ranks: Ranks, steps: ForwardSteps, network: NetworkToSplit, room_bytes: int
) -> SplitReport:
    """Choose where to cut a network: where the user says, or so that the stages are balanced.

    Args:
        ranks: One for each stage.
        steps: The steps of the network.
        network: The network as the user describes it.
        room_bytes: Memory that every rank may take of its device; 0 where that is not known.

    Raises:
        ModelError: The user names too few or too many, or there are too few places to cut at.
    """
    split_points = network.split_points or getattr(steps.network, "split_points", ())
    if split_points:
        if isinstance(split_points, str):
            raise ModelError(f"split_points is a list of names: [{split_points!r}]")
        if len(split_points) != ranks.size - 1:
            raise ModelError(
                f"{ranks.size} stages want {ranks.size - 1} split points, not {len(split_points)}, "
                f"which are for devices_per_replica = {len(split_points) + 1}"
            )
        return SplitReport(cuts=tuple(split_points), note="cut where the model says")
    sizes = sizes_of(steps)
    times, note = _times(ranks, steps, network.example)
    most = largest_share_for(sum(sizes), room_bytes)
    if times and most == math.inf:
        note = (
            f"balanced by time, since its {_mib(sum(sizes))} are little beside the "
            f"{_mib(room_bytes)} that each rank may take"
        )
    positions = cut_positions(steps, sizes, times or sizes, ranks.size, largest_share=most)
    shares = [
        _mib(sum(sizes[begin:end])) + (f" in {sum(times[begin:end]) * 1e3:.3g} ms" if times else "")
        for begin, end in steps.stages(positions)
    ]
    return SplitReport(
        cuts=tuple(steps.names[position] for position in positions),
        note=f"{note}: {', '.join(shares)}",
    )


def largest_share_for(num_bytes: int, room_bytes: int) -> float:
    """Return how many even shares of a network's bytes a stage may have in some memory."""
    return math.inf if num_bytes <= _SMALL_SHARE * room_bytes else SPREAD


def cut_positions(
    steps: ForwardSteps,
    sizes: Sequence[int],
    costs: Sequence[float],
    num_stages: int,
    largest_share: float = SPREAD,
) -> list[int]:
    """Choose steps to cut at: balanced, and where a single value crosses if that costs little.

    Raises:
        ModelError: There are too few places to cut at.
    """
    places = sorted(position for position in steps.names if position)
    best = _balanced(sizes, costs, places, num_stages, largest_share)
    narrow = [position for position in places if len(steps.crossing(position)) == 1]
    if len(narrow) < num_stages - 1:
        return best
    simple = _balanced(sizes, costs, narrow, num_stages, largest_share)

    def largest(values: Sequence[float], positions: Sequence[int]) -> float:
        return max(sum(values[begin:end]) for begin, end in steps.stages(positions))

    matters = [costs] if largest_share == math.inf else [sizes, costs]
    is_near = all(largest(each, simple) <= _SLACK * largest(each, best) for each in matters)
    return simple if is_near else best


def _balanced(
    sizes: Sequence[float],
    costs: Sequence[float],
    places: Sequence[int],
    num_stages: int,
    largest_share: float,
) -> list[int]:
    if len(places) < num_stages - 1:
        raise ModelError(
            f"the network cannot be cut into {num_stages} stages: there are {len(places)} places "
            f"between its submodules"
        )
    bytes_before, cost_before = [0, *accumulate(sizes)], [0, *accumulate(costs)]
    limits = [0, *places, len(sizes)]

    def num_bytes(begin: int, end: int) -> float:
        return bytes_before[end] - bytes_before[begin]

    least, _ = _least_largest(num_bytes, limits, num_stages)
    allowed = max(least, largest_share * sum(sizes) / num_stages)

    def cost(begin: int, end: int) -> float:
        return (
            cost_before[end] - cost_before[begin] if num_bytes(begin, end) <= allowed else math.inf
        )

    return _least_largest(cost, limits, num_stages)[1]


def _least_largest(
    cost: Callable[[int, int], float], limits: Sequence[int], num_stages: int
) -> tuple[float, list[int]]:
    """Cut at some of the limits so that the costliest stage costs least; return its cost too."""

    @cache
    def best(num: int, end: int) -> tuple[float, list[int]]:
        if num == 1:
            return cost(0, end), []
        found = (math.inf, [0] * (num - 1))
        for begin in limits[num - 1 : limits.index(end)]:
            before, positions = best(num - 1, begin)
            largest = max(before, cost(begin, end))
            if largest < found[0]:
                found = (largest, [*positions, begin])
        return found

    return best(num_stages, limits[-1])


def sizes_of(steps: ForwardSteps) -> list[int]:
    """Count the bytes of parameters and buffers that each step uses, where they are used first."""
    seen: set[int] = set()
    sizes = []
    for step in steps.steps:
        new = {id(each): each for each in _tensors_of(steps.network, step) if id(each) not in seen}
        seen |= new.keys()
        sizes.append(sum(each.nbytes for each in new.values()))
    return sizes


def _tensors_of(network: nn.Module, step: fx.Node) -> list[Tensor]:
    tensors: list[Tensor] = []
    if step.op == "call_module":
        module = network.get_submodule(str(step.target))
        tensors += [*module.parameters(), *module.buffers()]
    for node in step.all_input_nodes:
        if node.op == "get_attr":
            path, _, name = str(node.target).rpartition(".")
            value = getattr(network.get_submodule(path), name)
            tensors += [value] if isinstance(value, Tensor) else []
    return tensors


def _times(ranks: Ranks, steps: ForwardSteps, example: Example) -> tuple[list[float], str]:
    if not has_all_shapes(example):
        return [], "balanced by bytes, since the shapes of its inputs are not known"
    try:
        return times_of(steps, example, ranks.device), "balanced by bytes and time"
    except Exception as error:  # the network is the user's: it may raise anything
        text = "steps cannot be measured: %s: %s"
        logger.warning(text, type(error).__name__, error)
        return [], f"balanced by bytes, since measuring failed with {type(error).__name__}"


def times_of(
    steps: ForwardSteps, example: Sequence[object] | Mapping[str, object], device: torch.device
) -> list[float]:
    """Measure each step, in seconds, with the parameters of one step at a time in memory.

    Raises:
        Exception: A step fails on the example.
    """
    until = time.perf_counter() + _BUDGET_S
    seconds: dict[fx.Node, float] = {}

    def timed(step: fx.Node, call: Callable[[], Any]) -> Any:
        for _ in range(_NUM_TRIALS):
            began = time.perf_counter()
            result = call()
            synchronize(device)
            now = time.perf_counter()
            seconds[step] = min(seconds.get(step, math.inf), now - began)
            if now > until:
                break
        return result

    run_steps(steps, example, device, timed)
    return [seconds.get(step, 0.0) for step in steps.steps]


def run_steps(
    steps: ForwardSteps,
    example: Sequence[object] | Mapping[str, object],
    device: torch.device,
    on_step: Callable[[fx.Node, Callable[[], Any]], Any],
) -> None:
    """Compute a network with empty parameters: each step gets small numbers for its turn.

    Args:
        steps: The steps of the network.
        example: Its arguments.
        device: Where to compute.
        on_step: Called with each step and a function that computes it; returns the result of that.

    Raises:
        Exception: A step fails on the example.
    """
    if isinstance(example, Mapping):
        example = [example[name] for name in steps.arguments]
    inputs = [each.to(device) if isinstance(each, Tensor) else each for each in example]
    graph = fx.GraphModule(steps.network, steps.graph)
    with torch.inference_mode():
        _StepByStep(graph, device, on_step).run(*inputs)


class _StepByStep(fx.Interpreter):
    def __init__(
        self,
        module: fx.GraphModule,
        device: torch.device,
        on_step: Callable[[fx.Node, Callable[[], Any]], Any],
    ) -> None:
        super().__init__(module)
        self._device = device
        self._on_step = on_step

    def run(self, *args: Any, **_: object) -> Any:
        """Run all nodes, without the progress bar of torch's own `run`.

        That makes a named semaphore, which would stay in /dev/shm if this rank were killed.
        """
        self.env: dict[fx.Node, Any] = {}
        self.args_iter = iter(args)
        for node in self.graph.nodes:
            self.env[node] = self.run_node(node)
            for used in self.user_to_last_uses.get(node, ()):
                del self.env[used]
        return self.env[node]

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.op == "call_module":
            module = self.fetch_attr(str(n.target))
            tensors = {name: each.to(self._device) for name, each in module.named_buffers()}
            for name, each in module.named_parameters():
                tensors[name] = self._with_numbers(each)
            return self._on_step(n, lambda: functional_call(module, tensors, args, kwargs))
        if n.op in ("call_function", "call_method"):
            return self._on_step(n, lambda: getattr(self, n.op)(n.target, args, kwargs))
        result = super().run_node(n)
        if n.op == "get_attr" and isinstance(result, Tensor):
            return self._with_numbers(result)
        return result

    def _with_numbers(self, tensor: Tensor) -> Tensor:
        """Return small numbers for a meta tensor, none of them denormal, which would be slow."""
        if not tensor.is_meta:
            return tensor.to(self._device)
        return torch.full(tensor.shape, 0.01, dtype=tensor.dtype, device=self._device)


def verified(
    steps: ForwardSteps, report: SplitReport, example: Example, device: torch.device
) -> SplitReport:
    """Compare the stages with the whole network; the report says if that is impossible.

    Raises:
        ModelError: They compute something else.
    """
    name = type(steps.network).__name__
    verification = Verification(steps.network, example, device)
    if verification.complaint and asks_for_types(steps.network):
        raise ModelError(
            f"{name} cannot be cut: its forward asks for types, which torch.fx may answer "
            f"wrongly, and what it computes was not compared with the whole network: "
            f"{verification.complaint}; give `load_network` an `example`"
        )
    if verification.complaint:
        text = f"{report.note}; not compared with the whole network: {verification.complaint}"
        return msgspec.structs.replace(report, note=text)
    stages = [steps.cut(*each) for each in steps.stages(steps.positions(report.cuts))]
    signature = inspect.signature(steps.network.forward)

    def compute(*args: object, **kwargs: object) -> object:
        bound = signature.bind(*args, **kwargs)
        values: Any = tuple(bound.arguments[name] for name in steps.arguments)
        with torch.inference_mode():
            for stage in stages:
                values = stage(*copied(values))
        return values

    if difference := verification.difference(compute, verification.origins, EXACT):
        raise ModelError(
            f"{difference}. torch.fx has traced another way through its code than it takes: have "
            f"what branches on shapes, types or values, or computes with plain numbers, in "
            f'submodules of its own, or set placement = "replicate"'
        )
    return report


def _mib(num: int) -> str:
    return f"{num / (1 << 20):,.1f} MiB"
