"""An instance as a model sees it. Runs in worker processes only."""

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import torch
from torch import Tensor

from inferpool.models.attached import attached
from inferpool.models.errors import InputError
from inferpool.models.json_errors import JsonErrors, json_message
from inferpool.models.spec import Kind, TensorHeader

_B64_KEY = re.compile(rb'"b64"')
_URL_SAFE = re.compile(r"(?=.*[_-])[A-Za-z0-9_-]+={0,2}")
Features: TypeAlias = Mapping[str, Tensor]
"""Named tensors of one instance, or of a batch with the batch dimension first."""
Outputs: TypeAlias = Mapping[str, Any]
"""Named outputs of a batch: a tensor with the batch dimension first, or a list with a tensor for
each instance (`models.ragged.RaggedOutput`)."""


class Item(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """An instance as a model sees it. It is valid until its batch is answered."""

    kind: Kind
    payload: memoryview
    """A read-only view of shared memory: copy what must be changed."""
    headers: Sequence[TensorHeader] = ()
    parameters: Mapping[str, object] = {}
    is_document: bool = False
    """JSON that stands for itself: an object `{"b64": "..."}` in it is no bytes."""
    is_form: bool = False
    """JSON in the place of a form: an object `{"b64": "..."}` in it is an `Upload`."""

    def json(self) -> object:
        """Decode a payload of kind "json"; each object `{"b64": "..."}` in it becomes bytes.

        A form that is one instance is a dict of its fields, with an `Upload` for each file; so is
        JSON in its place.

        Raises:
            InputError: The payload is of another kind, or is not JSON.
        """
        if self.kind == "form":
            form: dict[str, object] = attached("read form")(self.payload, self.headers)
            return form
        value = self.plain_json()
        if self.is_document or not _B64_KEY.search(self.payload):
            return value
        return _with_bytes(value, "instance", attached("upload") if self.is_form else bytes)

    def plain_json(self) -> object:
        """Decode a payload of kind "json", without decoding base64.

        Raises:
            InputError: The payload is of another kind, or is not JSON.
        """
        if self.kind != "json":
            raise InputError(f"this model takes JSON, not {self.kind}")
        try:
            return msgspec.json.decode(self.payload)
        except JsonErrors as error:
            raise InputError(f"instance: {json_message(error, self.payload)}") from None

    def tensors(self) -> dict[str, Tensor]:
        """Copy the tensors of a payload of kind "tensors" to CPU memory, by name.

        Raises:
            InputError: The payload is of another kind.
        """
        return {name: view.clone() for name, view in self.views().items()}

    def views(self) -> dict[str, Tensor]:
        """Return the tensors of a payload of kind "tensors" in place; writing kills the process.

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


def _with_bytes(value: object, where: str, make: Callable[[bytes], object]) -> object:
    """Replace each `{"b64": ...}` in a JSON value by what `make` makes of its bytes.

    Messages call the value `where`. Text in the URL-safe alphabet, recognized by "-" or "_", is
    left as it is.
    """
    if isinstance(value, list):
        return [_with_bytes(each, f"{where}[{i}]", make) for i, each in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"b64"} and isinstance(value["b64"], str):
        try:
            return make(base64.b64decode(value["b64"], validate=True))
        except ValueError:
            if _URL_SAFE.fullmatch(value["b64"]):
                return value
            raise InputError(f"{where}.b64: not base64 in the standard alphabet") from None
    return {name: _with_bytes(each, f"{where}.{name}", make) for name, each in value.items()}
