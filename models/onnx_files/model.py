"""Serves files of ONNX, with the inputs and outputs that they declare. Worker processes only."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from inferpool.models.accelerator.failures import lacks_resources
from inferpool.models.errors import InputError, ModelError, SourceError
from inferpool.models.files.checkpoint import first_line
from inferpool.models.files.kinds import problem_of_file
from inferpool.models.files.opened import announce
from inferpool.models.inputs import describe, features_of, json_place, json_texts
from inferpool.models.item import Features, Item
from inferpool.models.onnx_files.reference import compare
from inferpool.models.onnx_files.session import (
    OnnxSession,
    Port,
    batch_range,
    decoded_text,
    encoded_texts,
)
from inferpool.models.ragged import RaggedOutput
from inferpool.models.sources.modules import SizedModel
from inferpool.models.spec import Placement, TensorSpec

logger = logging.getLogger(__name__)

_FREE_SIZE = 32
"""Size of each free dimension in the trial, apart from the batch."""
_TRIES = 2
_ROWS = 2
"""Rows of the trial: one could come out with its batch squeezed away."""


class OnnxModel(SizedModel):
    """Serves a `.onnx` file by onnxruntime, with the inputs and outputs that it declares.

    Dimension 0 of each is the batch. A file with a batch of one size computes larger batches in
    pieces, the last one filled up. Texts are JSON strings; scores that come as maps, and labels
    that are texts, are answered as such.

    Args:
        path: The file. Files of external data lie beside it.
        reference: A source of the same network, such as `net.pt2` or `package.module:Class`:
            its outputs for numbers by chance must be the same.
        reference_weights: The weights of that network, if its source needs a file of them.
        finite_outputs: Whether NaN and infinities in the outputs are errors.
        repeatable: See `Model`.
        alone_as_in_batch: See `Model`.
    """

    can_run_ahead = False  # onnxruntime copies to its device itself

    def __init__(
        self,
        path: Path,
        *,
        reference: str | None = None,
        reference_weights: str | None = None,
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
        self._reference = reference, reference_weights
        self._texts: dict[str, Port] = {}
        self._ragged: frozenset[str] = frozenset()
        """Outputs of a file for one instance that have no batch, such as boxes: any number."""
        self._columns: frozenset[str] = frozenset()
        """Inputs of one number for each instance, which may stand without a list."""

    def build_network(self, placement: Placement) -> Callable[..., object]:
        """Open the file on the device of the placement.

        Raises:
            SourceError: It is no file of ONNX, or onnxruntime cannot compute it.
            ModelError: It has inputs without a batch, or the device cannot be used.
        """
        if problem := problem_of_file(self._path, "onnx"):
            raise SourceError(problem)
        announce(self._path)
        self._session = session = OnnxSession(self._path, placement)
        self.smallest, self.largest = batch_range(self._path, session.inputs)
        self._ragged = frozenset()
        self.inputs = [port.spec for port in session.inputs]
        self._texts = {port.served: port for port in session.inputs if port.kind == "text"}
        self._columns = frozenset(each.name for each in self.inputs if each.instance_shape == (1,))
        self.preprocessed = None if self._texts else self.inputs
        return self._batch_of

    def load(self, placement: Placement) -> None:
        """Open the file, try it, and compare it with the reference if there is one.

        Raises:
            ModelError: It cannot be opened, fails, or computes something else.
        """
        self.device = torch.device("cpu")  # of the batches that it is given
        self.network = self.build_network(placement)
        found = self._tried()
        self.outputs = [
            _ragged_spec(port, found[port.served])
            if port.served in self._ragged
            else _output_spec(port, found.get(port.served))
            for port in self._session.outputs
        ]
        self._log_found(placement)
        source, weights = self._reference
        if source is not None:
            compare(self, self._path, source, weights, placement)
        if self._texts:
            self.example = {
                spec.name: _example_of(spec, self._texts.get(spec.name)) for spec in self.inputs
            }

    def preprocess(self, item: Item) -> Features:
        """Read an instance; a text is a string, or a list of them where the file wants several."""
        if item.kind != "json" or not (self._texts or self._columns):
            return features_of(item, self.inputs)
        texts = json_texts(item.payload, [spec.name for spec in self.inputs])
        features: dict[str, Tensor] = {}
        for spec in self.inputs:
            text = texts[spec.name]
            where = json_place(item.payload, spec.name)
            if port := self._texts.get(spec.name):
                features[spec.name] = _read_text(text, port, where)
                continue
            if spec.name in self._columns and bytes(text[:1]) not in (b"[", b"{"):
                text = memoryview(b"[" + bytes(text) + b"]")
            named = b"{" + msgspec.json.encode(spec.name) + b":" + bytes(text) + b"}"
            features |= features_of(Item(kind="json", payload=memoryview(named)), [spec])
        return features

    def collate(self, instances: Sequence[Features]) -> Features:
        """Stack tensors; fill up texts to the longest."""
        if not self._texts:
            return super().collate(instances)
        others = [
            {name: value for name, value in each.items() if name not in self._texts}
            for each in instances
        ]
        texts = {
            name: encoded_texts([decoded_text(each[name]) for each in instances])
            for name in self._texts
        }
        return {**super().collate(others), **texts}

    def forward(self, batch: Features) -> Features:
        """Compute the batch; outputs of any number for each instance are lists of tensors."""
        if not self._ragged:
            return super().forward(batch)
        inputs = [batch[spec.name] for spec in self.inputs]
        rows: Any = [self._session(*row) for row in zip(*(x.split(1) for x in inputs), strict=True)]
        outputs: dict[str, Any] = {}
        for name in rows[0]:
            found = [row[name] for row in rows]
            if name in self._ragged:
                outputs[name] = RaggedOutput(found)
                continue
            for each in found:
                self._checked({name: each}, 1)
            outputs[name] = torch.cat(found)
        return outputs

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        """Render numbers as lists, texts as strings, and maps of scores as objects."""
        ports = {port.served: port for port in self._session.outputs}
        if all(port.kind == "tensor" for port in ports.values()):
            return super().render(outputs, parameters)
        values: dict[str, object] = {}
        for name, tensor in outputs.items():
            match ports[name].kind:
                case "maps":
                    classes = map(str, self._session.classes[name])
                    values[name] = dict(zip(classes, tensor.tolist(), strict=True))
                case "text":
                    text = decoded_text(tensor)
                    is_one = ports[name].width == 1
                    values[name] = text if is_one else msgspec.json.decode(text)
                case "tensor":
                    values[name] = tensor.tolist()
        return next(iter(values.values())) if len(values) == 1 else values

    def _tried(self) -> Features:
        """Compute made-up instances, and find out what the file says wrongly about its batch.

        Returns:
            The outputs; none if free dimensions are in the way.

        Raises:
            ModelError: The file fails on inputs that it declares.
        """
        has_free_sizes = any(-1 in (spec.instance_shape or (-1,)) for spec in self.inputs)
        try:
            found = self._computed(self.fixed_size or _ROWS)
            if self.fixed_size == 1:
                self._ragged = self._outputs_without_batch(found)
                return found
            if self.fixed_size or all(len(each) == _ROWS for each in found.values() if each.dim()):
                return self._checked(found, self.fixed_size or _ROWS)
        except ModelError:
            raise
        except Exception as error:  # onnxruntime's have no common base
            if lacks_resources(error):
                raise
            failure = error
        else:
            failure = ModelError(f"outputs of {_ROWS} instances are {_shapes(found)}")
        if self.fixed_size is None:
            try:
                found = self._computed(1)
                if all(each.dim() and len(each) == 1 for each in found.values()):
                    self.smallest = self.largest = 1
                    logger.warning(
                        "%s says that its batch is free, but computes one instance at a time only "
                        "(%s): batches are computed one by one",
                        self._path,
                        first_line(failure),
                    )
                    return found
            except Exception as error:  # as above
                if lacks_resources(error):
                    raise
        if has_free_sizes:
            return {}
        raise ModelError(
            f"{self._path} fails on zeros of the inputs that it declares: {first_line(failure)}"
        ) from failure

    def _computed(self, num_rows: int) -> Features:
        """Compute zeros, with no more rows than the file accepts at once."""
        with torch.inference_mode():
            return self._session(*(_zeros(port, num_rows) for port in self._session.inputs))

    def _outputs_without_batch(self, outputs: Features) -> frozenset[str]:
        """Return the outputs of a file for one instance that are not batches of one.

        A file may find one of something by chance, so numbers are tried as well.
        """
        tries = [outputs]
        generator = torch.Generator().manual_seed(0)
        with torch.inference_mode():
            for _ in range(_TRIES):
                zeros = [_zeros(port, 1) for port in self._session.inputs]
                given = [
                    torch.rand(each.shape, generator=generator).to(each.dtype)
                    if each.is_floating_point()
                    else each
                    for each in zeros
                ]
                tries.append(self._session(*given))
        ports = {port.served: port for port in self._session.outputs}
        return frozenset(
            name
            for name in outputs
            if ports[name].kind == "tensor"
            and ports[name].shape[:1] != [1]
            and any(not each[name].dim() or len(each[name]) != 1 for each in tries)
        )

    def _batch_of(self, *tensors: Tensor) -> Features:
        """Compute a batch of a size that the file accepts.

        Raises:
            ModelError: An output is no batch of that size.
        """
        return self._checked(self._session(*tensors), len(tensors[0]))

    def _checked(self, outputs: Features, rows: int) -> Features:
        """Check that the first dimension of outputs is the batch.

        Raises:
            ModelError: It is not.
        """
        for name, tensor in outputs.items():
            if not tensor.dim() or len(tensor) != rows:
                raise ModelError(
                    f"{self._path}: for a batch of {rows} the output {name!r} has shape "
                    f"{list(tensor.shape)}: its first dimension must be the batch. If the inputs "
                    "of the file have no batch either, export it with one"
                )
        return outputs

    def _log_found(self, placement: Placement) -> None:
        size = self.fixed_size
        logger.info(
            "%s: inputs %s; outputs %s; %s; %s with %d threads%s",
            self._path,
            describe(self.inputs),
            describe(self.outputs),
            "batches of any size" if size is None else f"computes {size} at a time",
            self._session.provider,
            placement.num_threads,
            "".join(
                f"; {port.name!r} is served as {port.served!r}"
                for port in (*self._session.inputs, *self._session.outputs)
                if port.name != port.served
            ),
        )


def _output_spec(port: Port, found: Tensor | None) -> TensorSpec:
    """Return the spec of an output: sizes that the file does not say are those of the trial."""
    if port.kind != "tensor":
        return TensorSpec(name=port.served, dtype=port.dtype, shape=(-1, -1))
    if found is None:
        return port.spec
    said = port.shape[1:]
    is_said = len(port.shape) == found.dim() and all(
        want in (-1, size) for want, size in zip(said, found.shape[1:], strict=True)
    )
    rest = said if is_said else found.shape[1:]
    return TensorSpec(name=port.served, dtype=port.dtype, shape=(-1, *rest))


def _ragged_spec(port: Port, found: Tensor) -> TensorSpec:
    """Return the spec of an output without a batch, the first dimension of which is any number."""
    rest = (-1, *found.shape[1:]) if found.dim() else ()
    return TensorSpec(name=port.served, dtype=port.dtype, shape=(-1, *rest))


def _zeros(port: Port, num_rows: int) -> Tensor:
    if port.kind == "text":
        rows = "" if port.width == 1 else msgspec.json.encode([""] * abs(port.width)).decode()
        return encoded_texts([rows] * num_rows)
    sizes = [_FREE_SIZE if size == -1 else size for size in port.shape[1:]]
    return torch.zeros((num_rows, *sizes), dtype=getattr(torch, port.dtype))


def _read_text(text: memoryview, port: Port, where: str) -> Tensor:
    """Read a string, or a list of as many strings as the input has, to UTF-8 in uint8.

    Raises:
        InputError: It is something else.
    """
    try:
        found: str | list[str] = msgspec.json.decode(text, type=str | list[str])
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = []
    strings = [found] if isinstance(found, str) else found
    if not strings or port.width not in (-1, len(strings)):
        many = "several strings" if port.width == -1 else f"{port.width} strings"
        raise InputError(f"{where}: expected {'a string' if port.width == 1 else many}")
    value = strings[0] if port.width == 1 else msgspec.json.encode(strings).decode()
    return torch.tensor(list(value.encode()), dtype=torch.uint8)


def _example_of(spec: TensorSpec, text: Port | None) -> object:
    if text is None:
        sizes = [1 if size == -1 else size for size in spec.instance_shape]
        return torch.zeros(sizes if math.prod(sizes) < 1000 else 0).tolist()
    return "text" if text.width == 1 else ["text"] * abs(text.width)


def _shapes(outputs: Features) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in outputs.items())
