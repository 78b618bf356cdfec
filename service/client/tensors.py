"""Arrays and tensors as raw bytes, and back.

numpy and torch are imported only when the caller uses them.
"""

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import UnsendableError
from .safetensors import SAFETENSORS_DTYPES, RawTensor

if TYPE_CHECKING:
    import numpy as np
    import torch

_Made = TypeVar("_Made")


def is_tensor(value: object) -> bool:
    """Return whether a value is a numpy array or a torch tensor, without importing either."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        return True
    return torch is not None and isinstance(value, torch.Tensor)


def raw_tensor(value: Any) -> RawTensor:
    """Return the bytes of an array or tensor on any device; copies only if it must.

    Raises:
        UnsendableError: The service has no such dtype.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach().resolve_conj().cpu().contiguous()
        dtype = str(value.dtype).removeprefix("torch.")
        _check_dtype(dtype)
        data = memoryview(value.reshape(-1).view(torch.uint8).numpy())
        return RawTensor(dtype, tuple(value.shape), data)
    import numpy as np

    array = np.asarray(value, order="C")
    _check_dtype(array.dtype.name)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    flat: Any = array.reshape(-1).view(np.uint8)
    return RawTensor(array.dtype.name, array.shape, memoryview(flat))


def by_output(
    tensors: Mapping[str, RawTensor], made: Callable[[RawTensor], _Made]
) -> dict[str, _Made | list[_Made]]:
    """Return tensors by outputs: those named "boxes.0", "boxes.1", ... are one list, "boxes"."""
    found: dict[str, _Made | list[_Made]] = {}
    lists: dict[str, dict[str, RawTensor]] = {}
    for name, tensor in tensors.items():
        output, _, number = name.rpartition(".")
        if output and number.isdecimal():
            lists.setdefault(output, {})[number] = tensor
        else:
            found[name] = made(tensor)
    for output, rows in lists.items():
        numbers = [str(number) for number in range(len(rows))]
        if rows.keys() == set(numbers):
            found[output] = [made(rows[number]) for number in numbers]
        else:  # of a service that had dots in its names
            found |= {f"{output}.{number}": made(row) for number, row in rows.items()}
    return found


def to_numpy(tensor: RawTensor) -> "np.ndarray[Any, Any]":
    """Return a numpy array; bfloat16, which numpy lacks, becomes float32 of the same value."""
    import numpy as np

    if tensor.dtype == "bfloat16":
        bits = np.frombuffer(tensor.data, "<u2").astype("<u4") << 16
        return bits.view("<f4").reshape(tensor.shape)
    return np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)


def to_torch(tensor: RawTensor) -> "torch.Tensor":
    """Return a CPU tensor."""
    import torch

    dtype = getattr(torch, tensor.dtype)
    if not tensor.data:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(tensor.data, dtype=dtype).reshape(tensor.shape)


def _check_dtype(dtype: str) -> None:
    if dtype not in SAFETENSORS_DTYPES:
        raise UnsendableError(f"{dtype} cannot be sent; these can: {', '.join(SAFETENSORS_DTYPES)}")
