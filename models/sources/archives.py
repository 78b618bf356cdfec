"""Whole models from files: torch.export archives and TorchScript. Runs in worker processes only.

Such a file brings its own code: serve only those of makers that you trust.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass
from torch.fx import Node
from torch.utils import _pytree as pytree

from inferpool.models.errors import ModelError, SourceError
from inferpool.models.files.checkpoint import first_line
from inferpool.models.files.kinds import WholeKind, problem_of_file
from inferpool.models.sources.modules import SizedModel, TensorModel, dtype_name, named_outputs
from inferpool.models.spec import Placement, TensorSpec

_MOST_NAMED = 8
"""Most nodes that a message names."""
_RATES = ("p", "dropout", "dropout_p", "upper")
"""Arguments of operators that say how much chance there is in training."""


class ExportedModel(SizedModel):
    """Serves a file of `torch.export.save`, with the inputs and outputs it was exported with.

    Dimension 0 of each is the batch. If the program accepts only one batch size or a limited range,
    larger batches are computed in pieces, the last one filled up.

    Args:
        path: The archive.
        finite_outputs: Whether NaN and infinities in the outputs are errors.
        repeatable: See `Model`.
        alone_as_in_batch: See `Model`.
    """

    can_run_ahead = True

    def __init__(
        self,
        path: Path,
        *,
        finite_outputs: bool = True,
        repeatable: bool = True,
        alone_as_in_batch: bool = True,
    ) -> None:
        super().__init__(
            finite_outputs=finite_outputs,
            repeatable=repeatable,
            alone_as_in_batch=alone_as_in_batch,
        )
        self._path = path

    def build_network(self, placement: Placement) -> Callable[..., object]:
        """Read the program, with its inputs and outputs.

        Raises:
            SourceError: The file is no such archive, or is damaged.
            ModelError: The program accepts or returns anything but batches of tensors.
        """
        program = _read_program(self._path)
        inputs = _placeholders(program)
        self.smallest, self.largest = _batch_range(program, inputs)
        self.inputs = [_spec(name, value) for name, value in inputs.items()]
        self.outputs = [_spec(name, value) for name, value in _results(program, self.fixed_size)]
        self._load_flaws = self._flaws_of(program)
        program = move_to_device_pass(program, self.device)
        module = self._module = program.module()
        in_spec = program.call_spec.in_spec
        assert in_spec is not None

        def call(*flat: Tensor) -> object:
            arguments, keywords = pytree.tree_unflatten(flat, in_spec)
            return module(*arguments, **keywords)

        return call

    def _flaws_of(self, program: ExportedProgram) -> list[str]:
        """Return what makes the program train rather than infer, unless the options say so."""
        random, of_batch = training_nodes(program)
        flaws = []
        for nodes, says_so, option in (
            (random, not self.repeatable, "repeatable"),
            (of_batch, not self.alone_as_in_batch, "alone_as_in_batch"),
        ):
            if nodes and not says_so:
                flaws.append(
                    f"{self._path} was exported in training mode: {_listed(nodes)}; export it "
                    f"after `network.eval()`, or set options = {{ {option} = false }} if that is "
                    "meant"
                )
        return flaws


class ScriptedModel(TensorModel):
    """Serves a file of `torch.jit.save`, which does not name its inputs.

    Args:
        path: The archive.
        inputs: Inputs of forward, in order; by default one float32 tensor of any shape.
        outputs: Its outputs, in order; by default found by a trial.
        finite_outputs: Whether NaN and infinities in the outputs are errors.
        repeatable: See `Model`.
        alone_as_in_batch: See `Model`.
    """

    def __init__(
        self,
        path: Path,
        *,
        inputs: Sequence[TensorSpec] = (),
        outputs: Sequence[TensorSpec] = (),
        finite_outputs: bool = True,
        repeatable: bool = True,
        alone_as_in_batch: bool = True,
    ) -> None:
        super().__init__(
            inputs=inputs,
            outputs=outputs,
            finite_outputs=finite_outputs,
            repeatable=repeatable,
            alone_as_in_batch=alone_as_in_batch,
        )
        self._path = path

    def build_network(self, placement: Placement) -> Callable[..., object]:
        """Read the archive onto the device.

        Raises:
            SourceError: The file is no such archive, or is damaged.
        """
        _check_kind(self._path, "torchscript")
        try:
            with warnings.catch_warnings():
                # The user chose the format; docs/models.md mentions the deprecation.
                warnings.simplefilter("ignore")
                network: torch.jit.ScriptModule = torch.jit.load(
                    self._path, map_location=self.device
                )
        except Exception as error:  # a damaged archive makes it raise almost anything
            raise SourceError(f"{self._path} cannot be read: {first_line(error)}") from error
        return network.eval()


def training_nodes(program: ExportedProgram) -> tuple[list[str], list[str]]:
    """Return the names of training's nodes: those that draw by chance, and norms of the batch.

    The norms use the mean of their batch although they store a mean of the training.
    """
    random, of_batch = [], []
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None:
            continue
        names = [argument.name for argument in schema.arguments]
        given = {argument.name: argument.default_value for argument in schema.arguments}
        given |= dict(zip(names, node.args, strict=False)) | node.kwargs
        trains = given.get("train", given.get("training"))
        rate = next((given[name] for name in _RATES if name in given), None)
        if trains is True and given.get("running_mean") is not None:
            of_batch.append(_place_of(node))
        elif rate and (trains is True or "dropout_p" in given):
            random.append(_place_of(node))
    return random, of_batch


def _place_of(node: Node) -> str:
    """Return a node's name with the submodule that it is in."""
    stack = [*(node.meta.get("nn_module_stack") or {}).values()]
    path = str(stack[-1][0]).removeprefix("L['self'].") if stack else ""
    return f"{node.name} ({path})" if path else str(node.name)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _check_kind(path: Path, wanted: WholeKind) -> None:
    if problem := problem_of_file(path, wanted):
        raise SourceError(problem)


def _read_program(path: Path) -> ExportedProgram:
    _check_kind(path, "export")
    try:
        return torch.export.load(path)
    except Exception as error:  # a damaged archive makes it raise almost anything
        raise SourceError(f"{path} cannot be read: {first_line(error)}") from error


def _placeholders(program: ExportedProgram) -> dict[str, Tensor]:
    """Return the inputs' example values: tensors without data, with symbols for free dimensions."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    inputs = {}
    for name in program.graph_signature.user_inputs:
        value = values.get(name) if isinstance(name, str) else name
        if not isinstance(value, Tensor):
            raise ModelError(
                f"the exported program takes {name!r}, which is a {type(value).__name__}: "
                "only tensors can be served"
            )
        if value.dim() == 0:
            raise ModelError(f"the exported program's input {name!r} has no batch dimension")
        inputs[str(name)] = value
    if not inputs:
        raise ModelError("the exported program takes no inputs")
    return inputs


def _batch_range(program: ExportedProgram, inputs: dict[str, Tensor]) -> tuple[int, int]:
    sizes: dict[str, Any] = {name: value.shape[0] for name, value in inputs.items()}
    if len({isinstance(size, SymInt) for size in sizes.values()}) > 1:
        fixed = [name for name, size in sizes.items() if not isinstance(size, SymInt)]
        raise ModelError(
            f"dimension 0 of {', '.join(map(repr, fixed))} is fixed in the exported program, "
            "but free in its other inputs: it must be the batch in all of them"
        )
    ranges = [_range_of(program, size) for size in sizes.values()]
    smallest = max(low for low, _ in ranges)
    largest = min(high for _, high in ranges)
    if smallest > largest:
        raise ModelError(
            f"the inputs of the exported program have different batch sizes: "
            f"{', '.join(f'{name} {size}' for name, size in sizes.items())}"
        )
    return smallest, largest


def _range_of(program: ExportedProgram, size: int | SymInt) -> tuple[int, int]:
    if not isinstance(size, SymInt):
        return int(size), int(size)
    limits = program.range_constraints.get(size.node.expr)
    if limits is None:
        return 1, sys.maxsize
    low, high = limits.lower, limits.upper
    # An infinite limit has no integer; a batch has at least one row.
    return max(int(low), 1), int(high) if high.is_Integer else sys.maxsize


def _results(program: ExportedProgram, fixed_size: int | None) -> list[tuple[str, Tensor]]:
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    flat = [values.get(name, name) for name in program.graph_signature.user_outputs]
    out_spec = program.call_spec.out_spec
    assert out_spec is not None
    outputs = named_outputs(pytree.tree_unflatten(flat, out_spec))
    for name, value in outputs.items():
        if not isinstance(value, Tensor):
            raise ModelError(
                f"the exported program's output {name!r} is a list: only tensors can be served"
            )
        rows: int | SymInt = value.shape[0] if value.dim() else 0
        is_batch = isinstance(rows, SymInt) if fixed_size is None else rows == fixed_size
        if not is_batch:
            raise ModelError(
                f"the exported program's output {name!r} has shape {list(value.shape)}: "
                "its first dimension must be the batch"
            )
    return list(outputs.items())


def _spec(name: str, value: Tensor) -> TensorSpec:
    dims: list[Any] = list(value.shape[1:])
    rest = [-1 if isinstance(size, SymInt) else int(size) for size in dims]
    return TensorSpec(name=name, dtype=dtype_name(value.dtype), shape=(-1, *rest))
