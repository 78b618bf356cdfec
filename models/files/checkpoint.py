"""Reads weights from files, without running code in them. Runs in worker processes only."""

import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from inferpool.models.errors import CheckpointError
from inferpool.models.files.kinds import problem_of_weights
from inferpool.models.files.opened import announce

_WRAPPERS = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts save the weights beside an optimizer's state."""
_PREFIXES = ("module.", "_orig_mod.", "model.")
"""Prefixes that DistributedDataParallel, torch.compile and Lightning put before every name."""
_INDEX_SUFFIX = ".safetensors.index.json"
_SHOWN = 4


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def load_weights(network: nn.Module, path: Path | str) -> None:
    """Copy all of a checkpoint's weights into a network.

    Raises:
        CheckpointError: The file cannot be read, or its weights belong to another network.
    """
    weights = read_weights(path, network)
    check_fit(network, {name: tensor.shape for name, tensor in weights.items()}, path)
    network.load_state_dict(weights, strict=False)


def check_fit(network: nn.Module, shapes: Mapping[str, Sequence[int]], path: Path | str) -> None:
    """Check that a checkpoint has the network's tensors, by names and shapes.

    A network's class may have `unused_weights`: prefixes of names that its checkpoints may have in
    addition.

    Raises:
        CheckpointError: The weights belong to another network.
    """
    own = network.state_dict()
    # A counter that inference never reads, and that checkpoints before PyTorch 0.4.1 lack.
    missing = [n for n in own if n not in shapes and not n.endswith("num_batches_tracked")]
    unused = tuple(getattr(network, "unused_weights", ()))
    unexpected = [name for name in shapes if name not in own and not name.startswith(unused)]
    reshaped = [
        f"{name} ({list(shapes[name])} in the file, {list(tensor.shape)} in the network)"
        for name, tensor in own.items()
        if name in shapes and tuple(shapes[name]) != tuple(tensor.shape)
    ]
    if missing or unexpected or reshaped:
        complaints = [
            _listed("missing", missing),
            _listed("unexpected", unexpected),
            _listed("of another shape", reshaped),
        ]
        raise CheckpointError(
            f"{path} does not fit {type(network).__name__}: "
            + "; ".join(text for text in complaints if text)
        )


class StoredWeights:
    """The tensors of a checkpoint, each read when it is asked for, whole or in part.

    The file is a .safetensors file, the .safetensors.index.json of several, or a .pth or .pt file
    of a state_dict or a training checkpoint. Files are mapped, so tensors that are not read take no
    memory.

    Args:
        path: The file.
        network: The network that they are for. Prefixes of wrappers are cut off the names until it
            has one of them: it may have a part of its own that is called `model`.

    Raises:
        CheckpointError: A file is missing, unreadable, or holds more than tensors.
    """

    def __init__(self, path: Path | str, network: nn.Module) -> None:
        self.path = Path(path)
        own = network.state_dict().keys()
        self._parts = _without_prefixes(_open(self.path), self.path, own)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors, by name."""
        return {
            name: tuple(part.shape if isinstance(part, Tensor) else part.get_shape())
            for name, part in self._parts.items()
        }

    def read(self, name: str, *index: slice) -> Tensor:
        """Copy a tensor, or its part at an index, to the CPU.

        Raises:
            CheckpointError: The file cannot be read.
        """
        try:
            part: Tensor = self._parts[name][index or ...]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        return part.detach().clone(memory_format=torch.contiguous_format)

    def mapped(self) -> dict[str, Tensor]:
        """Return all tensors mapped from the files: read when used, and never to be changed."""
        return {
            name: part if isinstance(part, Tensor) else part[...]
            for name, part in self._parts.items()
        }


def read_weights(path: Path | str, network: nn.Module) -> dict[str, Tensor]:
    """Read a checkpoint's tensors by name onto the CPU; see `StoredWeights`.

    Raises:
        CheckpointError: A file is missing, unreadable, or holds more than tensors.
    """
    return StoredWeights(path, network).mapped()


def _open(path: Path) -> object:
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file")
    if problem := problem_of_weights(path):
        raise CheckpointError(problem)
    if path.name.endswith(_INDEX_SUFFIX):
        return _open_index(path)
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    return _unwrapped(_read_pickle(path), path)


def _open_safetensors(path: Path) -> dict[str, object]:
    announce(path)
    try:
        file: Any = safe_open(path, framework="pt", device="cpu")  # its methods have no types
        return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def _open_index(path: Path) -> dict[str, object]:
    try:
        names = msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as an index: {error}") from error
    for file in sorted(set(names.values())):
        if Path(file).name != file:
            raise CheckpointError(f"{path} names {file!r}, which is not a file beside it")
    files = {file: _open(path.parent / file) for file in sorted(set(names.values()))}
    parts = {}
    for name, file in names.items():
        stored = files[file]
        if not isinstance(stored, Mapping) or name not in stored:
            raise CheckpointError(f"{path} says that {name} is in {file}, and it is not")
        parts[name] = stored[name]
    return parts


def _read_pickle(path: Path) -> object:
    try:
        # Files older than the zip format (PyTorch 1.6) cannot be mapped.
        is_zip = zipfile.is_zipfile(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        if found := re.search(r"(?:GLOBAL|class|type) ([\w.]+)", str(error)):
            raise CheckpointError(
                f"{path} holds objects other than tensors ({found[1]}), and loading those would "
                "run code: save the network's state_dict alone, or convert it to safetensors"
            ) from error
        # Torch's own first line advises to load it unsafely; the fault comes after that.
        reason = re.search(r"WeightsUnpickler error:\s*(.+)", str(error))
        text = reason[1].strip() if reason else first_line(error)
        raise CheckpointError(
            f"{path} is not a checkpoint: torch.load finds no pickled tensors in it ({text})"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error
    except Exception as error:  # a damaged file makes torch.load raise almost anything
        raise CheckpointError(
            f"{path} is not a checkpoint, or is damaged: torch.load fails with {_named(error)}"
        ) from error


def _unwrapped(value: object, path: Path) -> object:
    while isinstance(value, Mapping):
        inner = next((value[k] for k in _WRAPPERS if isinstance(value.get(k), Mapping)), None)
        if inner is None:
            return value
        value = inner
    raise CheckpointError(f"{path} holds a {type(value).__name__}, not a state_dict")


def _without_prefixes(value: object, path: Path, own: Set[str]) -> dict[str, Any]:
    """Return what can be sliced for each tensor: a Tensor, or a slice of safetensors."""
    assert isinstance(value, Mapping)
    odd = [
        str(key)
        for key, part in value.items()
        if not isinstance(part, Tensor) and not hasattr(part, "get_shape")
    ]
    if odd or not value:
        found = _listed("these are not tensors", odd) or "it is empty"
        raise CheckpointError(f"{path} is not a state_dict: {found}")
    weights = {str(name): part for name, part in value.items()}
    while own.isdisjoint(weights):
        prefix = next((p for p in _PREFIXES if _all_start_with(weights, p)), None)
        if prefix is None:
            break
        weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return weights


def _all_start_with(names: Iterable[str], prefix: str) -> bool:
    return all(name.startswith(prefix) for name in names)


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{more}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, without colours; its type if it has no text."""
    text = re.sub(r"\x1b\[\d*m", "", str(error)).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def _named(error: Exception) -> str:
    """Return the error with its type: its text may be empty, or the key of a KeyError."""
    text = first_line(error)
    name = type(error).__name__
    return text if text.startswith(name) else f"{name}: {text}"
