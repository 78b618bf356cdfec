"""Weights from files, without running what is in them. Runs in worker processes only."""

import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from models.errors import CheckpointError

_WRAPPERS = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts keep the weights, beside an optimizer's state and the like."""
_PREFIXES = ("module.", "_orig_mod.")
"""Put before every name by DistributedDataParallel and by torch.compile."""
_SHOWN = 4


def load_weights(network: nn.Module, path: Path | str) -> None:
    """Copy a checkpoint's weights into a network, all of them.

    Raises:
        CheckpointError: The file cannot be read, or its weights belong to another network.
    """
    weights = read_weights(path)
    own = network.state_dict()
    # A counter that inference never reads, and that checkpoints before PyTorch 0.4.1 lack.
    missing = [n for n in own if n not in weights and not n.endswith("num_batches_tracked")]
    unexpected = [name for name in weights if name not in own]
    reshaped = [
        f"{name} ({list(weights[name].shape)} in the file, {list(tensor.shape)} in the network)"
        for name, tensor in own.items()
        if name in weights and weights[name].shape != tensor.shape
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
    network.load_state_dict(weights, strict=False)


def read_weights(path: Path | str) -> dict[str, Tensor]:
    """Read a .safetensors file, or a .pth or .pt file of a state_dict, onto the CPU.

    A state_dict that lies in a training checkpoint is found, and prefixes of wrappers are taken
    off its names.

    Raises:
        CheckpointError: The file is missing, unreadable, or holds more than tensors.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file")
    if not path.stat().st_size:
        raise CheckpointError(f"{path} is not a checkpoint: the file is empty")
    if path.suffix == ".safetensors":
        return _without_prefixes(_read_safetensors(path), path)
    if archive_kind(path) == "torchscript":
        raise CheckpointError(
            f"{path} is a TorchScript archive, a whole model: name it as the source, not as weights"
        )
    if archive_kind(path) == "export":
        raise CheckpointError(
            f"{path} is a torch.export archive, a whole model: name it as the source, "
            "not as weights"
        )
    return _without_prefixes(_unwrapped(_read_pickle(path), path), path)


def archive_kind(path: Path) -> Literal["torchscript", "export", "checkpoint", "other"]:
    """Tell apart the archives that torch writes, by the names inside rather than by their own."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.partition("/")[2] for name in archive.namelist()}
    except (OSError, zipfile.BadZipFile):
        return "other"
    if "archive_format" in names:
        return "export"
    if "constants.pkl" in names:
        return "torchscript"
    return "checkpoint" if "data.pkl" in names else "other"


def _read_safetensors(path: Path) -> object:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


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
        # Torch's own first line advises to load it unsafely; what is wrong comes after that.
        reason = re.search(r"WeightsUnpickler error:\s*(.+)", str(error))
        text = reason[1].strip() if reason else _first_line(error)
        raise CheckpointError(
            f"{path} is not a checkpoint: torch.load finds no pickled tensors in it ({text})"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {_first_line(error)}") from error
    except Exception as error:  # torch.load raises whatever a damaged file makes it stumble over
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


def _without_prefixes(value: object, path: Path) -> dict[str, Tensor]:
    assert isinstance(value, Mapping)
    odd = [str(key) for key, tensor in value.items() if not isinstance(tensor, Tensor)]
    if odd or not value:
        found = _listed("these are not tensors", odd) or "it is empty"
        raise CheckpointError(f"{path} is not a state_dict: {found}")
    weights = {str(name): tensor for name, tensor in value.items()}
    while prefix := next((p for p in _PREFIXES if _all_start_with(weights, p)), None):
        weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return weights


def _all_start_with(names: Iterable[str], prefix: str) -> bool:
    return all(name.startswith(prefix) for name in names)


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{more}"


def _first_line(error: Exception) -> str:
    text = re.sub(r"\x1b\[\d*m", "", str(error)).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def _named(error: Exception) -> str:
    """The error with its type: the text alone may be empty, or the key of a KeyError."""
    text = _first_line(error)
    name = type(error).__name__
    return text if text.startswith(name) else f"{name}: {text}"
