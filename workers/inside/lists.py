"""Outputs that are lists, with a tensor for each instance: checks, and the way to clients.

The code of each call imports this only for a model that returns such lists. In worker processes.
"""

from collections.abc import Mapping, Sequence
from itertools import chain

import msgspec
import torch
from torch import Tensor

from inferpool.models.ragged import Output, row_of
from inferpool.models.spec import TensorSpec, matches
from inferpool.workers.inside.checks import BrokenPromiseError
from inferpool.workers.inside.outcomes import Keep, TensorOutputs
from inferpool.workers.shared.messages import TensorBlob


class OutgoingLists(TensorOutputs):
    """Outputs of some instances of a batch, to be sent as tensors; some of them are lists."""

    def __init__(self, outputs: Mapping[str, Output], num_rows: int) -> None:
        """Measure them; each instance is checked when it is sent."""
        self._outputs = outputs
        self._ragged = {name for name, output in outputs.items() if isinstance(output, list)}
        tensors = chain.from_iterable(
            output if isinstance(output, list) else (output,) for output in outputs.values()
        )
        num_bytes = sum(each.numel() * each.itemsize for each in tensors)  # if it is sparse, too
        self.row_bytes = -(-num_bytes // max(1, num_rows))

    def row(self, row: int, keep: Keep) -> list[TensorBlob]:
        """Copy the outputs of one instance.

        Raises:
            BrokenPromiseError: They cannot be sent.
        """
        one = {name: output[None] for name, output in row_of(self._outputs, row).items()}
        blobs = TensorOutputs(one, 1).row(0, keep)
        return [
            msgspec.structs.replace(blob, is_ragged=True) if blob.name in self._ragged else blob
            for blob in blobs
        ]


def check_list(
    name: str, output: Sequence[Tensor], num_rows: int, declared: TensorSpec | None
) -> None:
    """Check that a list has a tensor for each instance, as the model declares them.

    Raises:
        BrokenPromiseError: It has not; a batch is then computed in halves, so that an instance at
            fault fails alone.
    """
    if "." in str(name):
        raise BrokenPromiseError(
            f"the model returned {name!r}: name it without a dot, since the tensors of a list have "
            "names such as `boxes.0`"
        )
    if len(output) != num_rows:
        raise BrokenPromiseError(
            f"the model returned a list of {len(output)} as {name!r} for a batch of {num_rows}: "
            "it must have one tensor for each instance"
        )
    if declared is None:
        return
    shape, dtype = declared.instance_shape, getattr(torch, declared.dtype)
    for each in output:
        if declared.shape and not matches(each.shape, shape):
            raise BrokenPromiseError(
                f"the model returned {name!r} of shape {list(each.shape)} for an instance, where "
                f"it declares {list(shape)}"
            )
        if each.dtype is not dtype:
            found = str(each.dtype).removeprefix("torch.")
            raise BrokenPromiseError(
                f"the model returned {name!r} as {found} for an instance, where it declares "
                f"{declared.dtype}"
            )
