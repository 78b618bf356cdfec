"""Returns its inputs: for tests, and for measuring the service. Worker processes only."""

import time
from collections.abc import Mapping, Sequence
from struct import Struct
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from inferpool.models.base import Model
from inferpool.models.errors import InputError
from inferpool.models.item import Features, Item

# Names that no client's tensor has by chance.
_BYTES = "echo of bytes"
_JSON = "echo of json"
_HEAD = Struct("<8sQ")
"""The first 8 bytes, padded with zeros, and the number of bytes."""


class Echo(Model):
    """Serves the source `echo`: returns JSON and tensors; for bytes, their number and the first 8.

    A batch holds instances of one kind only, and tensors of one shape.

    Args:
        delay_s: Sleep in each forward pass.
    """

    example = "hello"
    finite_outputs = False  # it returns what it gets

    def __init__(self, *, delay_s: float = 0.0) -> None:
        if not 0 <= delay_s <= 3600:
            raise ValueError(f"delay_s must be from 0 to 3600 seconds, not {delay_s}")
        self._delay_s = delay_s

    def preprocess(self, item: Item) -> Features:
        """Return the tensors that the answer needs."""
        payload = item.payload
        if item.kind == "tensors":
            for header in item.headers:
                if "." in header.name:
                    raise InputError(
                        f"tensor {header.name!r}: no name of an output has a dot in it"
                    )
            return item.views()
        if item.kind == "json":
            item.plain_json()  # what is not JSON fails here, on its own
            return {_JSON: _tensor_of(payload.tobytes())}
        head = _HEAD.pack(payload[:8].tobytes(), len(payload))
        return {_BYTES: head}  # type: ignore[dict-item]  # `collate` makes one tensor of all heads

    def collate(self, instances: Sequence[Features]) -> Features:
        """Stack the instances; JSON is padded with spaces, which do not change it."""
        if _BYTES in instances[0]:
            heads: list[Any] = [each[_BYTES] for each in instances]
            return {_BYTES: _tensor_of(b"".join(heads)).view(-1, _HEAD.size)}
        if _JSON not in instances[0]:
            return super().collate(instances)
        rows = [each[_JSON] for each in instances]
        return {_JSON: pad_sequence(rows, batch_first=True, padding_value=float(ord(" ")))}

    def forward(self, batch: Features) -> Features:
        """Sleep for `delay_s`, once per batch."""
        if self._delay_s:
            time.sleep(self._delay_s)
        return batch

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        """Render one instance."""
        batch = {name: tensor[None] for name, tensor in outputs.items()}
        return self.render_batch(batch, [parameters])[0]

    def render_batch(
        self, outputs: Features, parameters: Sequence[Mapping[str, object]]
    ) -> Sequence[object]:
        """Render a batch, where possible without a tensor operation per instance."""
        if (heads := outputs.get(_BYTES)) is not None:
            return [
                {"num_bytes": num_bytes, "head": head[:num_bytes].hex()}
                for head, num_bytes in _HEAD.iter_unpack(heads.numpy().tobytes())
            ]
        if (texts := outputs.get(_JSON)) is not None:
            return [msgspec.json.decode(row.tobytes()) for row in texts.numpy()]
        rows = range(len(parameters))
        return [{name: tensor[row].tolist() for name, tensor in outputs.items()} for row in rows]


def _tensor_of(data: bytes) -> Tensor:
    # A bytearray, since torch warns of buffers that cannot be written to.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
