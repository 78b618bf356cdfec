"""The forward pass of a network as a course of steps, and stages cut out of it. In workers."""

import itertools
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import cast

from torch import fx, nn

from inferpool.models.errors import ModelError
from inferpool.models.split.tracing import trace


class Course:
    """The steps of a network's forward pass, in their order.

    A stage is a run of steps. It takes what was made before it and is used in it or after it, and
    hands on what is used after it: any number of values. Parameters do not travel: each stage that
    uses one has it.
    """

    def __init__(
        self, network: nn.Module, example: Sequence[object] | Mapping[str, object]
    ) -> None:
        """Trace the network; it becomes evident whether it can be cut.

        Raises:
            ModelError: It cannot be traced.
        """
        self.network = network
        self.graph, self.arguments = trace(network, example)
        nodes = list(self.graph.nodes)
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        self.output = next(node for node in nodes if node.op == "output")
        self.steps = [n for n in nodes if n.op not in ("placeholder", "get_attr", "output")]
        self.starts = self._find_starts()
        """Where each submodule begins."""
        self.names: dict[int, str] = {}
        """The outermost submodule that begins at a step, where one does."""
        for name, position in self.starts.items():
            self.names.setdefault(position, name)
        self._last_uses = self._find_last_uses()

    def positions(self, cuts: Sequence[str]) -> list[int]:
        """Find the steps that submodules begin with, as the limits of stages.

        Raises:
            ModelError: There is no such submodule, it is not reached, or two begin together.
        """
        for name in cuts:
            if name in self.starts:
                continue
            near = get_close_matches(name, self.starts) or list(self.starts)[:5]
            raise ModelError(
                f"{type(self.network).__name__} cannot be cut in front of {name!r}: its forward "
                f"has {', '.join(near)}"
            )
        positions = [self.starts[name] for name in cuts]
        if positions != sorted({*positions} - {0}):
            raise ModelError(
                f"{type(self.network).__name__} cannot be cut in front of {', '.join(cuts)}: "
                f"there must be steps before and between them, in this order"
            )
        return positions

    def stages(self, positions: Sequence[int]) -> list[tuple[int, int]]:
        """The first step of each stage, and the one after its last."""
        limits = [0, *positions, len(self.steps)]
        return list(itertools.pairwise(limits))

    def cut(self, begin: int, end: int) -> fx.GraphModule:
        """Make a stage of the network's own submodules and parameters.

        Args:
            begin: Its first step.
            end: The step after its last.

        Returns:
            It takes what crosses to its first step, and returns what crosses to the step after its
            last; the last stage returns the network's output.
        """
        graph = fx.Graph()
        known = {node: graph.placeholder(node.name) for node in self._crossing(begin)}

        def copied(node: fx.Node) -> fx.Node:
            if node not in known:
                assert node.op == "get_attr", f"{node} is made in another stage"
                known[node] = graph.node_copy(node)
            return known[node]

        for node in self.steps[begin:end]:
            known[node] = graph.node_copy(node, copied)
        if end == len(self.steps):
            graph.output(fx.map_arg(self.output.args[0], copied))
        else:
            graph.output(tuple(known[node] for node in self._crossing(end)))
        graph.lint()
        return fx.GraphModule(self.network, graph)

    def num_crossing(self, position: int) -> int:
        """How many values a stage that begins there would take."""
        return len(self._crossing(position))

    def describe(self, begin: int, end: int) -> str:
        """Say which part of the network these steps are."""
        last = max(p for p in [*self.names, 0] if p < max(end, 1))
        first, last_name = self.names.get(begin, "the start"), self.names.get(last, "the end")
        if end == len(self.steps):
            return f"{first} to the end"
        return first if first == last_name else f"{first} to {last_name}"

    def _crossing(self, position: int) -> list[fx.Node]:
        """What is made before a step, and used by it or after it."""
        if position == 0:
            return self.inputs
        made = [*self.inputs, *self.steps[:position]]
        return [node for node in made if self._last_uses.get(node, -1) >= position]

    def _find_starts(self) -> dict[str, int]:
        starts: dict[str, int] = {}
        for position, node in enumerate(self.steps):
            stack = cast("Mapping[str, tuple[str, type]]", node.meta.get("nn_module_stack", {}))
            for path, _ in stack.values():
                if path:
                    starts.setdefault(path, position)
        return starts

    def _find_last_uses(self) -> dict[fx.Node, int]:
        last_uses = {}
        for position, step in enumerate([*self.steps, self.output]):
            for node in step.all_input_nodes:
                last_uses[node] = position
        return last_uses
