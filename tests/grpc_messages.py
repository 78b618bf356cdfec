"""Messages of the Open Inference Protocol as bytes, written and read without anybody's code.

Numbers of fields are those of Triton's `grpc_service.proto`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

SERVICE = "/inference.GRPCInferenceService"
_VARINT, _FIXED_64, _LENGTH, _FIXED_32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class SentTensor:
    """A tensor in a message."""

    datatype: str
    shape: Sequence[int]
    data: bytes


def varint(number: int) -> bytes:
    """Encode a whole number; a negative one as 64 bits in two's complement."""
    number &= (1 << 64) - 1
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def field(number: int, value: bytes | str | int | bool) -> bytes:
    """Encode a field: a number as varint, text and bytes with their length."""
    if isinstance(value, int):
        return varint(number << 3 | _VARINT) + varint(int(value))
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | _LENGTH) + varint(len(data)) + data


def parameter(name: str, value: bool | int | str) -> bytes:
    """Encode an entry of `parameters`, a map from texts to `InferParameter`."""
    kind = 1 if isinstance(value, bool) else 2 if isinstance(value, int) else 3
    return field(1, name) + field(2, field(kind, value))


def input_tensor(name: str, datatype: str, shape: Sequence[int], *more: bytes) -> bytes:
    """Encode an `InferInputTensor`, with more fields such as its `contents`."""
    dims = b"".join(map(varint, shape))
    return field(1, name) + field(2, datatype) + field(3, dims) + b"".join(more)


def infer_request(
    model: str,
    tensors: Mapping[str, SentTensor],
    parameters: Mapping[str, bool | int | str] | None = None,
    *,
    version: str = "",
    request_id: str = "",
) -> bytes:
    """Encode a `ModelInferRequest` with raw contents."""
    return b"".join(
        [
            field(1, model),
            *([field(2, version)] if version else []),
            *([field(3, request_id)] if request_id else []),
            *(field(4, parameter(*each)) for each in (parameters or {}).items()),
            *(field(5, input_tensor(n, t.datatype, t.shape)) for n, t in tensors.items()),
            *(field(7, each.data) for each in tensors.values()),
        ]
    )


def fields_of(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field of a message.

    Raises:
        ValueError: It is no message.
    """
    place = 0
    while place < len(data):
        key, place = _read_varint(data, place)
        kind = key & 7
        if kind == _VARINT:
            number, place = _read_varint(data, place)
            yield key >> 3, number
            continue
        length = {_FIXED_64: 8, _FIXED_32: 4}.get(kind, 0)
        if kind == _LENGTH:
            length, place = _read_varint(data, place)
        elif not length:
            raise ValueError(f"a field of kind {kind}")
        if place + length > len(data):
            raise ValueError("a field is cut off")
        yield key >> 3, data[place : place + length]
        place += length


def outputs_in(response: bytes) -> dict[str, SentTensor]:
    """Return the outputs in a `ModelInferResponse` by name."""
    found = list(fields_of(response))
    raw = [value for number, value in found if number == 6]
    heads = [value for number, value in found if number == 5]
    outputs = {}
    for head, data in zip(heads, raw, strict=True):
        assert isinstance(head, bytes)
        assert isinstance(data, bytes)
        name = datatype = ""
        shape: list[int] = []
        for number, value in fields_of(head):
            if number == 1 and isinstance(value, bytes):
                name = value.decode()
            elif number == 2 and isinstance(value, bytes):
                datatype = value.decode()
            elif number == 3:
                shape += [value] if isinstance(value, int) else _varints(value)
        outputs[name] = SentTensor(datatype, shape, data)
    return outputs


def _varints(data: bytes) -> list[int]:
    numbers, place = [], 0
    while place < len(data):
        number, place = _read_varint(data, place)
        numbers.append(number)
    return numbers


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        if place >= len(data) or shift > 63:
            raise ValueError("a number is cut off")
        byte = data[place]
        number |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return number, place
