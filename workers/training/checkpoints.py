"""Keeps the state of a run on the disk, whole or not at all."""

import errno
import io
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from inferpool.models.errors import CheckpointError
from inferpool.models.files.writing import replacing

_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SPARE_BYTES = 16 << 20
"""Room for the metrics and the report."""


class NoSpaceError(Exception):
    """The disk has no room for a file; what was there before is untouched."""


class Checkpoints:
    """The checkpoints of a run, with only the newest kept, and the weights of its best epoch.

    Args:
        folder: The folder of them.
        writer: Number of the rank that writes; hosts may share the folder.
    """

    def __init__(self, folder: Path, *, writer: int = 0) -> None:
        self._folder = folder
        self._writer = writer
        self.saved_best = 0
        """Best epoch that the newest checkpoint names."""

    @property
    def newest_step(self) -> int:
        """Step of the newest checkpoint; 0 if there is none."""
        return max((int(path.stem.partition("-")[2]) for path in self._steps()), default=0)

    def save(self, step: int, state: Mapping[str, Any], *, best_epoch: int) -> int:
        """Write a checkpoint, then remove what it replaces; return its size in bytes.

        Raises:
            NoSpaceError: The checkpoint before it is still there.
        """
        path = self._path(step)
        data = io.BytesIO()
        torch.save(state, data)
        write_whole(path, data.getbuffer(), writer=self._writer)
        for old in [each for each in self._steps() if each != path]:
            old.unlink(missing_ok=True)
        self._keep_best(best_epoch)
        self.saved_best = best_epoch
        return path.stat().st_size

    def read(self) -> bytes | None:
        """Return the newest checkpoint; None if there is none."""
        step = self.newest_step
        return self._path(step).read_bytes() if step else None

    def best(self, epoch: int) -> Path:
        """Return the path of the weights of a best epoch."""
        return self._folder / f"best-{epoch}.safetensors"

    def save_best(self, epoch: int, network: nn.Module) -> None:
        """Write the weights of an epoch; keep also those that the newest checkpoint names.

        Raises:
            NoSpaceError: There is no room.
        """
        save_weights(self.best(epoch), network, writer=self._writer)
        self._keep_best(epoch, self.saved_best)

    @property
    def num_bytes(self) -> int:
        """Bytes that they take on the disk."""
        return sum(path.stat().st_size for path in self._folder.glob("*.*"))

    def remove(self) -> None:
        """Remove all of them, since the run has ended."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _keep_best(self, *epochs: int) -> None:
        kept = [self.best(epoch) for epoch in epochs]
        for path in self._folder.glob("best-*.safetensors"):
            if path not in kept:
                path.unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step}.pt"

    def _steps(self) -> list[Path]:
        return [*self._folder.glob("step-*.pt")]


def decoded(data: bytes) -> dict[str, Any]:
    """Read a checkpoint, without running code in it.

    Raises:
        CheckpointError: It is damaged.
    """
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file makes torch.load raise almost anything
        raise CheckpointError(
            f"the checkpoint is damaged: {error}; begin anew with --overwrite"
        ) from error
    assert isinstance(state, dict)
    return state


def save_weights(path: Path, network: nn.Module, *, writer: int = 0) -> None:
    """Write a network's weights as safetensors, whole or not at all.

    Raises:
        NoSpaceError: There is no room.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in network.state_dict().items():
        # Weights that share memory are written for each name, as safetensors asks for.
        tensors[name] = tensor.detach().to("cpu").contiguous().clone()
    try:
        with replacing(path, f".{writer}.new") as draft:
            save_file(tensors, draft)
    except Exception as error:  # safetensors raises errors of its own for a full disk
        if isinstance(error, OSError) and error.errno not in _SPACE_ERRORS:
            raise
        raise NoSpaceError(f"{path} cannot be written: {error}") from error


def write_whole(path: Path, data: bytes | memoryview, *, writer: int = 0) -> None:
    """Write a file whole or not at all, and have it on the disk.

    Raises:
        NoSpaceError: There is no room.
    """
    try:
        with replacing(path, f".{writer}.new") as draft:
            draft.write_bytes(data)
    except OSError as error:
        if error.errno not in _SPACE_ERRORS:
            raise
        raise NoSpaceError(f"{path} cannot be written: {error.strerror}") from error


def room_error(folder: Path, network: nn.Module, *, has_average: bool, used: int = 0) -> str:
    """Return one sentence if a run's files will not fit on the disk; empty if they will.

    Args:
        folder: The folder of the run.
        network: Its network.
        has_average: Whether checkpoints hold averages of the weights.
        used: Bytes of its files that are there already.
    """
    num_bytes = sum(each.nbytes for each in network.state_dict().values())
    # Two checkpoints lie there at once, each with the weights, two moments of Adam and the average;
    # and the weights of two best epochs, and those that are served.
    need = num_bytes * (2 * (3 + has_average) + 3) + _SPARE_BYTES - used
    free = shutil.disk_usage(folder).free
    if free >= need:
        return ""
    return (
        f"{folder} has room for {free >> 20:,} MiB, but checkpoints and weights take "
        f"{need >> 20:,} MiB: free some, or choose another --output"
    )
