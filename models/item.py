"""One instance as a model sees it, and its tensors. Runs in worker processes only."""

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec
import torch
from torch import Tensor

from inferpool.models.errors import InputError
from inferpool.models.spec import TensorHeader

_B64_KEY = re.compile(rb'"b64"')
_URL_SAFE = re.compile(r"(?=.*[_-])[A-Za-z0-9_-]+={0,2}")
Kind: TypeAlias = Literal["image", "bytes", "json", "tensors"]
"""What a payload is: an encoded image, opaque bytes, a JSON value, or raw tensors with headers."""

Features: TypeAlias = Mapping[str, Tensor]
"""Named tensors of one instance, or of a batch with the batch dimension first."""


class Item(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """One instance as a model sees it, valid until the batch that it belongs to is answered."""

    kind: Kind
    payload: memoryview
    """A read-only view of shared memory: copy what must be changed."""
    headers: Sequence[TensorHeader] = ()
    parameters: Mapping[str, object] = {}

    def json(self) -> object:
        """Decode a payload of kind "json"; each object `{"b64": "..."}` in it becomes bytes.

        Raises:
            InputError: The payload is of another kind, or is not JSON.
        """
        value = self.plain_json()
        return _with_bytes(value, "instance") if _B64_KEY.search(self.payload) else value

    def plain_json(self) -> object:
        """Decode a payload of kind "json", and leave what is in base64 as it is.

        Raises:
            InputError: The payload is of another kind, or is not JSON.
        """
        if self.kind != "json":
            raise InputError(f"this model takes JSON, not {self.kind}")
        try:
            return msgspec.json.decode(self.payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InputError(str(error)) from None

    def tensors(self) -> dict[str, Tensor]:
        """Copies of the tensors of a payload of kind "tensors", by name, on the CPU.

        Raises:
            InputError: The payload is of another kind.
        """
        return {name: view.clone() for name, view in self.views().items()}

    def views(self) -> dict[str, Tensor]:
        """The tensors of a payload of kind "tensors" in place: writing to one ends the process.

        Raises:
            InputError: The payload is of another kind.
        """
        if self.kind != "tensors":
            raise InputError(f"this model takes tensors, not {self.kind}")
        return {header.name: self._view(header) for header in self.headers}

    def _view(self, header: TensorHeader) -> Tensor:
        dtype = getattr(torch, header.dtype)
        if header.num_bytes == 0:
            return torch.empty(header.shape, dtype=dtype)
        end = header.offset + header.num_bytes
        return torch.frombuffer(self.payload[header.offset : end], dtype=dtype).view(header.shape)


def _with_bytes(value: object, where: str) -> object:
    """JSON with bytes in the place of what is encoded in base64; `where` is its place.

    Text in the URL-safe alphabet, which "-" and "_" tell, is left to the model as it is.
    """
    if isinstance(value, list):
        return [_with_bytes(each, f"{where}[{i}]") for i, each in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"b64"} and isinstance(value["b64"], str):
        try:
            return base64.b64decode(value["b64"], validate=True)
        except ValueError:
            if _URL_SAFE.fullmatch(value["b64"]):
                return value
            raise InputError(f"{where}.b64: not base64 in the standard alphabet") from None
    return {name: _with_bytes(each, f"{where}.{name}") for name, each in value.items()}
