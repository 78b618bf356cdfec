"""Networks of tensors as models: inputs and outputs are named by specs. Worker processes only."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from inferpool.models.base import Model
from inferpool.models.errors import ModelError
from inferpool.models.item import Features, Item, Outputs
from inferpool.models.ragged import RaggedOutput, joined, outputs_of
from inferpool.models.sources.made_up import made_up
from inferpool.models.spec import DTYPE_BYTES, Placement, TensorSpec

_ANY_INPUT = TensorSpec(name="input", dtype="float32", shape=())
_NUM_SAMPLES = 16
"""Number of samples for comparing speed presets."""
_PROBE_ROWS = 2
"""Rows of the trial batch: one row could come out with its batch dimension squeezed away."""


class TensorModel(Model, ABC):
    """Base of models that pass tensors to a network by position, with the batch dimension first."""

    network: Callable[..., object]
    can_run_ahead = True
    _makes_samples = True

    def __init__(
        self,
        *,
        inputs: Sequence[TensorSpec] = (),
        outputs: Sequence[TensorSpec] = (),
        finite_outputs: bool = True,
        repeatable: bool = True,
        alone_as_in_batch: bool = True,
    ) -> None:
        self.inputs = list(inputs) or [_ANY_INPUT]
        self.outputs = list(outputs)
        self.finite_outputs = finite_outputs
        self.repeatable = repeatable
        self.alone_as_in_batch = alone_as_in_batch
        self.has_fixed_shapes = all(_is_known(spec) for spec in self.inputs)

    @abstractmethod
    def build_network(self, placement: Placement) -> Callable[..., object]:
        """Build the network on its devices, in eval mode.

        Raises:
            ModelError: It cannot be built.
        """

    def load(self, placement: Placement) -> None:
        """Build the network, and try it on zeros if the shapes of its inputs are known.

        Raises:
            ModelError: It cannot be built, or does not accept its declared inputs.
        """
        self.device = torch.device(placement.devices[0])
        self.network = self.build_network(placement)
        if all(_is_known(spec) for spec in self.inputs):
            self._probe()

    def forward(self, batch: Features) -> Outputs:
        """Call the network with the inputs in the order of their specs."""
        arguments = [batch[spec.name].to(self.device, non_blocking=True) for spec in self.inputs]
        return self._named(self.network(*arguments))

    def warmup(self) -> Sequence[Item]:
        """Return two instances with numbers by chance, if the shapes of the inputs are known."""
        return self._made_up(2, torch.rand) if all(map(_is_known, self.inputs)) else []

    def samples(self) -> Sequence[Item]:
        """Return random numbers, if all inputs are float32 of known shapes."""
        if not all(_is_known(spec) and spec.dtype == "float32" for spec in self.inputs):
            return []
        return self._made_up(_NUM_SAMPLES, torch.randn)

    def _made_up(self, num: int, numbers: Callable[..., Tensor]) -> Sequence[Item]:
        generator = torch.Generator().manual_seed(0)
        found = (made_up(self.inputs, generator, numbers) for _ in range(num))
        return [item for item in found if item is not None]

    def _named(self, result: object) -> dict[str, Any]:
        outputs = named_outputs(result)
        if not self.outputs:
            return outputs
        if len(outputs) != len(self.outputs):
            raise ModelError(
                f"the network has {len(outputs)} outputs, but {len(self.outputs)} are declared"
            )
        if set(outputs) == {spec.name for spec in self.outputs}:
            return outputs
        names = [spec.name for spec in self.outputs]
        return dict(zip(names, outputs.values(), strict=True))

    def _probe(self) -> None:
        batch = {spec.name: _zero_rows(spec, _PROBE_ROWS) for spec in self.inputs}
        try:
            with torch.inference_mode():
                outputs = self.forward(batch)
        except ModelError:
            raise
        except Exception as error:  # the network is the user's: it may raise anything
            raise ModelError(
                f"the network fails on zeros of its declared inputs: "
                f"{type(error).__name__}: {error}"
            ) from error
        for name, output in outputs.items():
            _check_rows(name, output, _PROBE_ROWS)
        self.outputs = self.outputs or [_found(name, output) for name, output in outputs.items()]


class SizedModel(TensorModel):
    """Base of models that compute only some sizes of batches, from `smallest` to `largest`.

    Larger batches are computed in pieces, the last one filled up with copies of its last row.
    """

    smallest: int = 1
    largest: int = sys.maxsize

    @property
    def fixed_size(self) -> int | None:
        """The only size of batches, if there is only one."""
        return self.smallest if self.smallest == self.largest else None

    def forward(self, batch: Features) -> Outputs:
        """Compute the batch, in pieces of the sizes that the network accepts."""
        inputs = [batch[spec.name].to(self.device, non_blocking=True) for spec in self.inputs]
        num_rows = len(inputs[0])
        if self.smallest <= num_rows <= self.largest:
            return self._named(self.network(*inputs))
        pieces = zip(*(tensor.split(min(self.largest, num_rows)) for tensor in inputs), strict=True)
        return joined([self._run_filled(piece) for piece in pieces])

    def _run_filled(self, piece: Sequence[Tensor]) -> Outputs:
        """Repeat the last row up to the smallest size, and cut the outputs to the real rows."""
        num_rows = len(piece[0])
        surplus = self.smallest - num_rows
        if surplus > 0:
            piece = [torch.cat([x, x[-1:].expand(surplus, *x.shape[1:])]) for x in piece]
        outputs = self._named(self.network(*piece))
        for name, output in outputs.items():
            _check_rows(name, output, len(piece[0]))  # to cut it would hide that
        return {name: output[:num_rows] for name, output in outputs.items()}


class ModuleModel(TensorModel):
    """Serves a user's `nn.Module` class with a forward that takes and returns tensors.

    Args:
        build: Makes the network, with random weights.
        weights: Checkpoint to load; None leaves the network as built.
        inputs: Inputs of forward, in order; by default one float32 tensor of any shape.
        outputs: Its outputs, in order; by default found by a trial.
        finite_outputs: Whether NaN and infinities in the outputs are errors.
        repeatable: See `Model`.
        alone_as_in_batch: See `Model`.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        *,
        weights: str | None = None,
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
        self._build = build
        self._weights = weights

    def build_network(self, placement: Placement) -> Callable[..., object]:
        """Build the network, load its weights and move it."""
        example = [_zero_rows(s, _PROBE_ROWS) if _is_known(s) else None for s in self.inputs]
        return self.load_network(self._build, self._weights, placement, example=example)


def named_outputs(result: object) -> dict[str, Any]:
    """Name a network's outputs: "output", or "output_0" and so on, or by their own names.

    A dict may have lists with a tensor for each instance, and a list of dicts has one for each.

    Raises:
        ModelError: They are not tensors.
    """
    if isinstance(result, Tensor):
        return {"output": result}
    is_of_dicts = isinstance(result, list) and any(isinstance(each, Mapping) for each in result)
    if isinstance(result, Mapping) or is_of_dicts:
        named = {str(name): value for name, value in outputs_of(result).items()}
    elif isinstance(result, tuple) and hasattr(result, "_asdict"):
        named = result._asdict()
    elif isinstance(result, tuple | list):
        named = {f"output_{i}": value for i, value in enumerate(result)}
    else:
        raise ModelError(f"the network returns a {type(result).__name__}, not tensors")
    for name, value in named.items():
        if not isinstance(value, Tensor | RaggedOutput):
            raise ModelError(
                f"the network's output {name!r} is a {type(value).__name__}, not a tensor"
            )
    return named


def _check_rows(name: str, output: Tensor | RaggedOutput, num_rows: int) -> None:
    """Check that an output is a batch of a size.

    Raises:
        ModelError: It is not.
    """
    if isinstance(output, RaggedOutput):
        if len(output) != num_rows:
            raise ModelError(
                f"for a batch of {num_rows} the network's output {name!r} is a list of "
                f"{len(output)}: it must have one tensor for each instance"
            )
    elif output.dim() == 0 or len(output) != num_rows:
        raise ModelError(
            f"for a batch of {num_rows} the network's output {name!r} has shape "
            f"{list(output.shape)}: its first dimension must be the batch"
        )


def _found(name: str, output: Tensor | RaggedOutput) -> TensorSpec:
    """Return the spec of an output; instances of a list may be of any size."""
    if isinstance(output, RaggedOutput):
        return TensorSpec(
            name=name, dtype=dtype_name(output[0].dtype), shape=(-1,) * (1 + output[0].dim())
        )
    return TensorSpec(name=name, dtype=dtype_name(output.dtype), shape=(-1, *output.shape[1:]))


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in specs.

    Raises:
        ModelError: No protocol can carry it.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ModelError(f"tensors of {name} cannot be served: known are {', '.join(DTYPE_BYTES)}")
    return name


def _is_known(spec: TensorSpec) -> bool:
    return bool(spec.shape) and -1 not in spec.instance_shape


def _zero_rows(spec: TensorSpec, num_rows: int) -> Tensor:
    return torch.zeros((num_rows, *spec.instance_shape), dtype=getattr(torch, spec.dtype))
