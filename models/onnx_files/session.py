"""A file of ONNX in onnxruntime: what it takes and gives, and how it is called. In workers only.

onnxruntime is imported when a file is opened. It has a pool of threads of its own, of the size
that torch's has in this worker; they sleep between two batches.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from inferpool.models.accelerator.failures import lacks_resources
from inferpool.models.errors import ModelError, SourceError
from inferpool.models.files.checkpoint import first_line
from inferpool.models.spec import Placement, TensorSpec

_DTYPES = {
    "float": "float32",
    "double": "float64",
    "float16": "float16",
    **{name: name for name in ("bool", "int8", "int16", "int32", "int64")},
    **{name: name for name in ("uint8", "uint16", "uint32", "uint64")},
}
"""Names of torch's dtypes by those of ONNX, as far as NumPy has them too."""
_TENSOR = re.compile(r"tensor\((\w+)\)")
_MAPS = re.compile(r"seq\(map\((?:int64|string),tensor\((float|double)\)\)\)")
"""The scores by class that converters of scikit-learn write, a map for each row."""
_PROVIDER = "ExecutionProvider"
_CPU = f"CPU{_PROVIDER}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """An input or output of the file."""

    name: str
    """The name in the file."""
    served: str
    """The name that clients use."""
    kind: Literal["tensor", "text", "maps"]
    dtype: str
    """The dtype that it is served with. Texts are served as UTF-8, in uint8."""
    shape: Sequence[int]
    """Sizes as the file says them, with -1 for any; empty if it does not say them."""

    @property
    def width(self) -> int:
        """The number of texts of an instance, or -1 for any."""
        return self.shape[1] if len(self.shape) > 1 else 1

    @property
    def spec(self) -> TensorSpec:
        """The spec, with a free batch."""
        rest = [-1] if self.kind != "tensor" else self.shape[1:]
        shape = (-1, *rest) if self.shape or self.kind != "tensor" else ()
        return TensorSpec(name=self.served, dtype=self.dtype, shape=shape)


class OnnxSession:
    """An opened file. One thread calls it at a time.

    Args:
        path: The file; files of external data lie where it says, from its own folder.
        placement: Device and threads.

    Raises:
        SourceError: The file cannot be read, or has a type that cannot be served.
        ModelError: onnxruntime is not installed, or cannot use the device.
    """

    def __init__(self, path: Path, placement: Placement) -> None:
        self._path = path
        self._session, self.provider = _opened(path, placement)
        self.inputs = _ports(path, "input", self._session.get_inputs())
        self.outputs = _ports(path, "output", self._session.get_outputs())
        self.classes: dict[str, list[object]] = {}
        """Classes of each output of maps, in the order of its numbers, once it has been called."""
        if not self.inputs:
            raise SourceError(f"{path} takes no inputs")

    def __call__(self, *tensors: Tensor) -> dict[str, Any]:
        """Compute a batch of CPU tensors, in the order of the inputs.

        Returns:
            CPU tensors by the names they are served with. They share the memory of onnxruntime.
        """
        feeds = {
            port.name: _texts(tensor, port) if port.kind == "text" else tensor.numpy()
            for port, tensor in zip(self.inputs, tensors, strict=True)
        }
        found = self._session.run([port.name for port in self.outputs], feeds)
        return {
            port.served: self._tensor(port, value)
            for port, value in zip(self.outputs, found, strict=True)
        }

    def _tensor(self, port: Port, value: Any) -> Tensor:
        match port.kind:
            case "maps":
                return self._from_maps(port, value)
            case "text":
                return encoded_texts([_text_of(row, port) for row in value])
            case "tensor":
                return torch.from_numpy(np.asarray(value))

    def _from_maps(self, port: Port, maps: Sequence[Mapping[object, float]]) -> Tensor:
        classes = self.classes.setdefault(port.served, list(maps[0]) if maps else [])
        rows = [[row[each] for each in classes] for row in maps]
        if any(len(row) != len(classes) for row in maps):
            raise ModelError(f"{self._path}: rows of output {port.name!r} have other classes")
        return torch.tensor(rows, dtype=getattr(torch, port.dtype))


def encoded_texts(texts: Sequence[str]) -> Tensor:
    """Return texts as UTF-8 in uint8 [B, bytes], with zeros after the shorter ones."""
    rows = [torch.tensor(list(text.encode()), dtype=torch.uint8) for text in texts]
    return pad_sequence(rows, batch_first=True) if rows else torch.zeros(0, 0, dtype=torch.uint8)


def decoded_text(row: Tensor) -> str:
    """Return the text of a row of `encoded_texts`."""
    return row.numpy().tobytes().rstrip(b"\0").decode("utf-8", "replace")


def _texts(tensor: Tensor, port: Port) -> NDArray[np.object_]:
    """Return texts as onnxruntime takes them: [B], or [B, C]."""
    rows = [decoded_text(row) for row in tensor]
    if len(port.shape) == 1:
        return np.array(rows, dtype=object)
    if port.width == 1:
        return np.array([[row] for row in rows], dtype=object)
    return np.array([msgspec.json.decode(row) for row in rows], dtype=object)


def _text_of(row: Any, port: Port) -> str:
    """Return one row of texts: the text itself, or a list of several as JSON."""
    found = row.tolist() if isinstance(row, np.ndarray) else [row]
    return str(found[0]) if port.width == 1 else msgspec.json.encode(found).decode()


def _opened(path: Path, placement: Placement) -> tuple[Any, str]:
    try:
        import onnxruntime
    except ImportError as error:
        raise ModelError(
            f"{path} needs the package onnxruntime, which cannot be imported ({error}): "
            "pip install 'inferpool[onnx]'"
        ) from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = placement.num_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # it raises what it would log
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    providers = _providers(onnxruntime, path, placement)
    try:
        session = onnxruntime.InferenceSession(str(path.absolute()), options, providers=providers)
    except Exception as error:  # its errors have no common base
        if lacks_resources(error):
            raise
        reason = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", first_line(error))
        raise SourceError(
            f"{path} cannot be read by onnxruntime {onnxruntime.__version__}: {reason}"
        ) from error
    provider = str(session.get_providers()[0])
    if placement.devices[0] != "cpu" and provider == _CPU:
        raise ModelError(
            f"{path} is to run on {placement}, but onnxruntime cannot load the libraries for "
            'it: install those that it names above, or set devices = "cpu"'
        )
    return session, provider


def _providers(onnxruntime: Any, path: Path, placement: Placement) -> list[Any]:
    device = torch.device(placement.devices[0])
    wanted = f"{device.type.upper()}{_PROVIDER}"
    if wanted not in onnxruntime.get_available_providers():
        raise ModelError(
            f"{path} is to run on {placement}, but the installed onnxruntime computes only on "
            'CPUs: pip install onnxruntime-gpu in its place, or set devices = "cpu"'
        )
    if wanted == _CPU:
        return [_CPU]
    if hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()  # finds those that torch has brought
    return [(wanted, {"device_id": device.index or 0}), _CPU]


def _ports(path: Path, what: str, found: Sequence[Any]) -> list[Port]:
    ports: list[Port] = []
    for each in found:
        kind, dtype = _kind_of(path, what, each)
        served = _served_name(each.name, {port.served for port in ports}, what)
        sizes = [-1 if not isinstance(size, int) or size < 0 else size for size in each.shape or ()]
        ports.append(Port(name=each.name, served=served, kind=kind, dtype=dtype, shape=sizes))
    return ports


def _kind_of(path: Path, what: str, found: Any) -> tuple[Literal["tensor", "text", "maps"], str]:
    """Return how a type of ONNX is served, and its dtype.

    Raises:
        SourceError: It cannot be served.
    """
    if match := _TENSOR.fullmatch(found.type):
        if match[1] == "string":
            return "text", "uint8"
        if match[1] in _DTYPES:
            return "tensor", _DTYPES[match[1]]
        hint = "export the model with float32 or float16"
    elif what == "output" and (match := _MAPS.fullmatch(found.type)):
        return "maps", _DTYPES[match[1]]
    else:
        hint = "only tensors can be served, and the maps of scores that classifiers have"
    raise SourceError(
        f"{path}: {what} {found.name!r} is a {found.type}, which cannot be served: {hint}"
    )


def _served_name(name: str, taken: set[str], what: str) -> str:
    """Return a name without dots and other characters that clients would have to escape."""
    plain = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_") or what
    served, number = plain, 2
    while served in taken:
        served, number = f"{plain}_{number}", number + 1
    return served


def batch_range(path: Path, ports: Sequence[Port]) -> tuple[int, int]:
    """Return the smallest and the largest batch that the inputs of a file allow.

    onnxruntime shows a single number and an unknown shape alike. Numbers of several instances would
    be taken for a row, so a file with such an input computes one instance at a time.

    Raises:
        ModelError: An input has no batch, or they have different ones.
    """
    sizes = {port.name: port.shape[0] for port in ports if port.shape}
    fixed = {name: size for name, size in sizes.items() if size != -1}
    if shapeless := [port.name for port in ports if not port.shape]:
        if {*fixed.values()} - {1}:
            raise ModelError(
                f"input {shapeless[0]!r} of {path} has no dimension for the batch, but others "
                "have a batch of one size: export it with that dimension in all inputs"
            )
        return 1, 1
    if not fixed:
        return 1, sys.maxsize
    if len(set(fixed.values())) > 1 or len(fixed) < len(sizes):
        said = ", ".join(
            f"{name!r} {'any' if size == -1 else size}" for name, size in sizes.items()
        )
        raise ModelError(
            f"dimension 0 of all inputs must be the batch, but {path} has there: {said}. Export "
            "it with that dimension free in all inputs"
        )
    (size,) = set(fixed.values())
    return size, size
