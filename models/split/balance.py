"""Where to cut a network into stages, so that neither memory nor time is wasted. Worker processes.

What is sought: among the cuts with which the largest part has no more than `SPREAD` times an even
share of the bytes, or as little as is possible, those with which the slowest stage takes the least
time. A network is cut for its memory, so bytes come first; a pipeline is as fast as its slowest
stage, so time comes next. Of a network that is small beside the ranks' memory only time counts.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx, nn

from inferpool.models.errors import ModelError
from inferpool.models.split.sketch import fill
from inferpool.models.split.stages import Course

SPREAD = 1.25
"""Times an even share of the bytes: what the largest part may have of them."""
_NUM_TRIALS = 3
_BUDGET_S = 20.0
"""After that each step is tried once."""


def balanced(
    sizes: Sequence[float],
    costs: Sequence[float],
    places: Sequence[int],
    num_stages: int,
    largest_share: float = SPREAD,
) -> list[int]:
    """Choose the places to cut at.

    Args:
        sizes: The bytes of each step.
        costs: What each step takes, in any unit.
        places: The steps in front of which can be cut, ascending, without the first.
        num_stages: How many there are to be.
        largest_share: How many times an even share of the bytes the largest part may have.

    Raises:
        ModelError: There are too few places.
    """
    if len(places) < num_stages - 1:
        raise ModelError(
            f"the network cannot be cut into {num_stages} stages: there are {len(places)} places "
            f"between its submodules"
        )
    least, _ = _least_largest(sizes, places, num_stages)
    limit = max(least, largest_share * sum(sizes) / num_stages)
    _, positions = _least_largest(costs, places, num_stages, lambda a, b: b - a <= limit, sizes)
    return positions


def _least_largest(
    values: Sequence[float],
    places: Sequence[int],
    num_stages: int,
    allows: Callable[[float, float], bool] = lambda a, b: True,
    checked: Sequence[float] = (),
) -> tuple[float, list[int]]:
    """Cut so that the largest sum of values is least, of what is allowed for another sum."""
    limits = [0, *places, len(values)]
    before = [0, *accumulate(values)]
    sums = [0, *accumulate(checked)] if checked else before
    best: list[tuple[float, list[int]] | None] = [(0.0, [])] + [None] * (len(limits) - 1)
    for _ in range(num_stages):
        following: list[tuple[float, list[int]] | None] = [None] * len(limits)
        for j in range(1, len(limits)):
            end = limits[j]
            for i in range(j):
                known, begin = best[i], limits[i]
                if known is None or not allows(sums[begin], sums[end]):
                    continue
                largest = max(known[0], before[end] - before[begin])
                old = following[j]
                if old is None or largest < old[0]:
                    following[j] = (largest, [*known[1], begin])
        best = following
    found = best[-1]
    assert found is not None, "what is least for bytes is allowed"
    return found[0], found[1][1:]


def sizes_of(course: Course) -> list[int]:
    """The bytes of the parameters and buffers that each step uses, counted where used first."""
    seen: set[int] = set()
    sizes = []
    for step in course.steps:
        size = 0
        for tensor in _tensors_of(course.network, step):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                size += tensor.nbytes
        sizes.append(size)
    return sizes


def times_of(
    course: Course, example: Sequence[object] | Mapping[str, object], device: torch.device
) -> list[float]:
    """Measure each step, in seconds, with the parameters of one step at a time in memory.

    Raises:
        Exception: A step fails on the example.
    """
    clock = _Clock(device)
    run_steps(course, example, device, clock.timed)
    return [clock.seconds.get(step.name, 0.0) for step in course.steps]


def run_steps(
    course: Course,
    example: Sequence[object] | Mapping[str, object],
    device: torch.device,
    on_step: Callable[[fx.Node, Callable[[], Any]], Any],
) -> None:
    """Compute a network whose parameters have no numbers: each step gets small ones for its turn.

    Args:
        course: Of the network.
        example: What it is called with.
        device: Where to compute.
        on_step: Is given each step, and what computes it, and returns what that gives.

    Raises:
        Exception: A step fails on the example.
    """
    given: Mapping[str, object] = (
        example
        if isinstance(example, Mapping)
        else dict(zip(course.arguments, example, strict=True))
    )
    inputs = [_moved(given[name], device) for name in course.arguments]
    graph = fx.GraphModule(course.network, course.graph)
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
        """As torch's own, without its progress bar.

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
            module = _real(self.fetch_attr(str(n.target)), self._device)
            return self._on_step(n, lambda: module(*args, **kwargs))
        if n.op == "get_attr":
            value = self.fetch_attr(str(n.target))
            if not isinstance(value, Tensor):
                return value
            if value.is_meta:
                return _small_like(value, self._device)
            return value.to(self._device)
        if n.op in ("call_function", "call_method"):
            return self._on_step(n, lambda: getattr(self, n.op)(n.target, args, kwargs))
        return super().run_node(n)


class _Clock:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._until = time.perf_counter() + _BUDGET_S
        self.seconds: dict[str, float] = {}

    def timed(self, step: fx.Node, call: Callable[[], Any]) -> Any:
        shortest = float("inf")
        for _ in range(_NUM_TRIALS):
            began = time.perf_counter()
            result = call()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            now = time.perf_counter()
            shortest = min(shortest, now - began)
            if now > self._until:
                break
        self.seconds[step.name] = shortest
        return result


def _real(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a module, with numbers."""
    copied = deepcopy(module)
    parameters = dict(copied.named_parameters(remove_duplicate=False))

    def made(name: str) -> Tensor | None:
        return _small_like(parameters[name], device) if name in parameters else None

    fill(copied, made, device)
    return copied


def _small_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Small numbers, none of them denormal, which would be slow."""
    return torch.full(tensor.shape, 0.01, dtype=tensor.dtype, device=device)


def _moved(value: object, device: torch.device) -> object:
    return value.to(device) if isinstance(value, Tensor) else value


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
