"""Bodies that hold tensors: raw bytes, npy, safetensors; read without torch and without copies.

A body is cut into views, one for each tensor of each instance; the arena gets them in their order.
Offsets inside a payload are multiples of each tensor's item size.
"""

import re
from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import msgspec

from inferpool.models.json_errors import JsonErrors, json_message
from inferpool.models.spec import DTYPE_BYTES, TensorHeader, TensorSpec
from inferpool.service.api.codecs import parameters
from inferpool.service.api.codecs.body import BodyContext, Decoded, Payload
from inferpool.service.errors import BadRequestError, InvalidInputError, TooLargeError
from inferpool.service.queue.instance import Buffer

NPY_TYPES = ("application/x-npy", "application/npy")
NPY_MAGIC = b"\x93NUMPY"
DTYPES = {
    "bool": ("|b1", "BOOL"),
    "uint8": ("|u1", "U8"),
    "int8": ("|i1", "I8"),
    "uint16": ("<u2", "U16"),
    "int16": ("<i2", "I16"),
    "uint32": ("<u4", "U32"),
    "int32": ("<i4", "I32"),
    "uint64": ("<u8", "U64"),
    "int64": ("<i8", "I64"),
    "float16": ("<f2", "F16"),
    "bfloat16": (None, "BF16"),
    "float32": ("<f4", "F32"),
    "float64": ("<f8", "F64"),
}
"""The `descr` of the npy format (numpy.lib.format), which has no bfloat16, and the name in the
safetensors format."""
NPY_DTYPES = {name: descr for name, (descr, _) in DTYPES.items() if descr}
SAFETENSORS_DTYPES = {name: theirs for name, (_, theirs) in DTYPES.items()}
_FROM_NPY = {descr: name for name, descr in NPY_DTYPES.items()}
_FROM_NPY |= {"<" + descr[1:]: name for descr, name in _FROM_NPY.items() if descr[0] == "|"}
_FROM_SAFETENSORS = {theirs: ours for ours, theirs in SAFETENSORS_DTYPES.items()}

_MAX_RANK = 16
_MAX_LENGTH = 1 << 40
"""The longest dimension: no body has so many bytes, and products of these can be written out."""
_MAX_EMPTY = 1 << 20
"""The largest product of the other dimensions of a tensor with a dimension of 0: it has no bytes
that would bound them, and a model may make something as large of them."""
_MAX_NAME_CHARS = 256
_MAX_NPY_HEADER = 10_000
"""The same as numpy's own `max_header_size`."""
_MAX_SAFETENSORS_HEADER = 1 << 20
_MAX_TENSORS = 256

_DESCR = re.compile(rb"""['"]descr['"]\s*:\s*['"]([<>|=]?[a-zA-Z]\d*)['"]""")
_ORDER = re.compile(rb"""['"]fortran_order['"]\s*:\s*(True|False)""")
_SHAPE = re.compile(rb"""['"]shape['"]\s*:\s*\(([0-9,\s]*)\)""")


class BodyTensor(NamedTuple):
    """One tensor of a body."""

    name: str
    """Empty if the format names none."""
    dtype: str
    shape: tuple[int, ...]
    chunks: Sequence[Buffer]


class _SafetensorsEntry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_entries = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry = msgspec.json.Decoder(_SafetensorsEntry)


def decode_raw(chunks: Sequence[bytes], head: BodyContext) -> Decoded:
    """Read application/octet-stream: a tensor if its dtype and shape are known, else bytes."""
    headers = head.headers
    if not head.query and b"x-tensor-dtype" not in headers and b"x-tensor-shape" not in headers:
        return _decode_undescribed(chunks, head, b"")
    given = parameters.read_query(head.query)
    rest = parameters.merge(parameters.from_query(head.query))
    dtype = given.get("dtype", headers.get(b"x-tensor-dtype", b"").decode("latin-1"))
    shape_text = given.get("shape")
    if shape_text is None and b"x-tensor-shape" in headers:
        shape_text = headers[b"x-tensor-shape"].decode("latin-1")
    if not dtype and shape_text is None:
        return _decode_undescribed(chunks, head, rest)
    if not dtype or shape_text is None:
        lacking = "shape" if dtype else "dtype"
        raise BadRequestError(f"{lacking}: is missing; raw tensor bytes need a dtype and a shape")
    if dtype not in DTYPE_BYTES:
        raise BadRequestError(f"dtype: {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    shape = _shape_from(shape_text)
    check_length(sum(map(len, chunks)), dtype, shape, "the body")
    return _decode_as(BodyTensor(given.get("name", ""), dtype, shape, chunks), head, rest)


def decode_npy(chunks: Sequence[bytes], head: BodyContext) -> Decoded:
    """Read application/x-npy: one array."""
    tensor = read_npy(chunks, "the body")
    rest = b""
    if head.query:
        rest = parameters.merge(parameters.from_query(head.query))
        tensor = tensor._replace(name=parameters.read_query(head.query).get("name", ""))
    return instances_of([tensor], head, rest)


def decode_safetensors(chunks: Sequence[bytes], head: BodyContext) -> Decoded:
    """Read application/safetensors: the named inputs of one instance, or of a batch."""
    tensors = read_safetensors(chunks)
    return instances_of(tensors, head, parameters.merge(parameters.from_query(head.query)))


def instances_of(tensors: Sequence[BodyTensor], head: BodyContext, rest: bytes = b"") -> Decoded:
    """Split the tensors of one body into instances: one, or as many as a batch dimension says.

    A tensor with as many dimensions as the model's input (batch dimension included) is a batch;
    with one less it is one instance. If the model declares no shape, it is one instance.

    Raises:
        InvalidInputError: A tensor fits no input, or has a bad name, or some are batches and
            some are not.
        TooLargeError: The batch has too many instances.
    """
    for tensor in tensors:
        _check_name(tensor.name)
        if tensor.dtype == "bool":
            _check_bools(tensor)
    sizes = {_batch_size(tensor, head.inputs) for tensor in tensors}
    if len(sizes) > 1:
        found = ", ".join(f"{tensor.name!r} {list(tensor.shape)}" for tensor in tensors)
        raise InvalidInputError(f"the tensors disagree about the size of the batch: {found}")
    size = sizes.pop()
    # Largest items first: then each offset is a multiple of its own item size, without padding.
    ordered = sorted(tensors, key=lambda tensor: -DTYPE_BYTES[tensor.dtype])
    if size is None:
        return Decoded([_payload(ordered)], False, rest)
    if size == 0:
        raise InvalidInputError("the batch is empty: its first dimension is 0")
    if size > head.limits.max_instances:
        raise TooLargeError(
            f"a batch of {size}; the limit for one request is {head.limits.max_instances} instances"
        )
    rows = zip(*(_rows(tensor, size) for tensor in ordered), strict=True)
    return Decoded([_payload(row) for row in rows], True, rest)


def read_npy(chunks: Sequence[bytes], place: str) -> BodyTensor:
    """Read an npy array (numpy.lib.format, versions 1.0 to 3.0) without its pickles.

    Raises:
        BadRequestError: It is not npy.
        InvalidInputError: It is npy with a content that is not taken here.
    """
    start = _peek(chunks, 12 + _MAX_NPY_HEADER)
    if start[:6] != NPY_MAGIC or len(start) < 12 or start[6] not in (1, 2, 3):
        raise BadRequestError(f"{place}: not an npy file (numpy.save makes one)")
    size = 2 if start[6] == 1 else 4
    begin = 8 + size
    end = begin + int.from_bytes(start[8:begin], "little")
    if end - begin > _MAX_NPY_HEADER:
        raise BadRequestError(f"{place}: the npy header is longer than {_MAX_NPY_HEADER} bytes")
    text = start[begin:end]
    order, shape_match = _ORDER.search(text), _SHAPE.search(text)
    if len(text) < end - begin or order is None or shape_match is None or b"'descr'" not in text:
        raise BadRequestError(f"{place}: the npy header is damaged")
    dtype = _npy_dtype(text, place)
    shape = _shape_from(shape_match[1].decode(), place)
    if order[1] == b"True" and len(shape) > 1:
        raise InvalidInputError(
            f"{place}: the array is in Fortran order; send numpy.ascontiguousarray(array)"
        )
    num_bytes = sum(map(len, chunks)) - end
    check_length(num_bytes, dtype, shape, place)
    return BodyTensor("", dtype, shape, cut(chunks, [end, num_bytes])[1])


def read_safetensors(chunks: Sequence[bytes]) -> list[BodyTensor]:
    """Read a safetensors file: every byte of it must belong to exactly one tensor.

    Raises:
        BadRequestError: It is not safetensors.
        InvalidInputError: It is safetensors with a content that is not taken here.
    """
    total = sum(map(len, chunks))
    header_bytes = int.from_bytes(_peek(chunks, 8), "little")
    if total < 10 or header_bytes > min(total - 8, _MAX_SAFETENSORS_HEADER):
        raise BadRequestError("the body: not a safetensors file, or its header is cut off")
    text = _peek(chunks, 8 + header_bytes)[8:]
    entries = _read_entries(text)
    position = 0
    for name, entry in entries:
        _check_name(name)  # before it stands in a message
        begin, end = entry.data_offsets
        if begin != position or end < begin or end > total - 8 - header_bytes:
            raise BadRequestError(
                f"tensor {name!r}: its bytes {begin} to {end} leave a gap, overlap another's, or "
                "lie outside the body"
            )
        position = end
        if entry.dtype not in _FROM_SAFETENSORS:
            raise InvalidInputError(
                f"tensor {name!r}: {entry.dtype} is not one of {', '.join(_FROM_SAFETENSORS)}"
            )
        check_shape(entry.shape, f"tensor {name!r}")
        check_length(end - begin, _FROM_SAFETENSORS[entry.dtype], entry.shape, f"tensor {name!r}")
    if position != total - 8 - header_bytes:
        raise BadRequestError(f"the body: {total - 8 - header_bytes - position} bytes too many")
    sizes = [entry.data_offsets[1] - entry.data_offsets[0] for _, entry in entries]
    pieces = cut(chunks, [8 + header_bytes, *sizes])[1:]
    return [
        BodyTensor(name, _FROM_SAFETENSORS[entry.dtype], tuple(entry.shape), piece)
        for (name, entry), piece in zip(entries, pieces, strict=True)
    ]


def cut(chunks: Sequence[Buffer], sizes: Iterable[int]) -> list[list[Buffer]]:
    """Cut joined chunks into consecutive pieces of given sizes, as views."""
    views = iter([memoryview(chunk) for chunk in chunks])
    view = next(views, memoryview(b""))
    pieces = []
    for size in sizes:
        piece: list[Buffer] = []
        while size > len(view):
            piece.append(view)
            size -= len(view)
            view = next(views)
        if size:
            piece.append(view[:size])
            view = view[size:]
        pieces.append(piece)
    return pieces


def check_length(num_bytes: int, dtype: str, shape: Sequence[int], place: str) -> None:
    """Check that a tensor has as many bytes as its shape needs.

    Raises:
        InvalidInputError: It has more or fewer.
    """
    expected = prod(shape) * DTYPE_BYTES[dtype]
    if num_bytes != expected:
        raise InvalidInputError(
            f"{place}: {dtype} {list(shape)} takes {expected} bytes, found {num_bytes}"
        )


def _decode_undescribed(chunks: Sequence[bytes], head: BodyContext, rest: bytes) -> Decoded:
    """Read raw bytes without dtype and shape: the model's only input, if its shape is fixed."""
    if len(head.inputs) == 1:
        spec = head.inputs[0]
        shape = spec.instance_shape
        if spec.shape and min(shape, default=1) > 0:
            num_bytes = sum(map(len, chunks))
            size, excess = divmod(num_bytes, prod(shape) * DTYPE_BYTES[spec.dtype])
            if size and not excess:
                batch_shape = shape if size == 1 else (size, *shape)
                return _decode_as(BodyTensor("", spec.dtype, batch_shape, chunks), head, rest)
    return Decoded([Payload("bytes", chunks)], False, rest, is_whole=True)


def _decode_as(tensor: BodyTensor, head: BodyContext, rest: bytes) -> Decoded:
    """Split raw bytes into instances. If there is one, another body is read alike."""
    decoded = instances_of([tensor], head, rest)
    is_whole = len(decoded.payloads) == 1 and tensor.dtype != "bool"  # each bool is checked
    return Decoded(decoded.payloads, decoded.is_batch, rest, is_whole)


def _batch_size(tensor: BodyTensor, inputs: Sequence[TensorSpec]) -> int | None:
    """Return the length of a tensor's batch dimension, or None if it has none."""
    spec = next((each for each in inputs if each.name == tensor.name), None)
    if spec is None and not tensor.name and len(inputs) == 1:
        spec = inputs[0]
    if spec is None and tensor.name and inputs:
        names = ", ".join(repr(each.name) for each in inputs)
        raise InvalidInputError(
            f"tensor {tensor.name!r}: the model has no such input; it has {names}"
        )
    if spec is None or not spec.shape or len(tensor.shape) == len(spec.shape) - 1:
        return None
    if len(tensor.shape) == len(spec.shape):
        return tensor.shape[0]
    raise InvalidInputError(
        f"tensor {spec.name!r}: expected shape {_pattern(spec.instance_shape)} for one instance or "
        f"{_pattern(spec.shape)} for a batch, found {list(tensor.shape)}"
    )


def _pattern(shape: Sequence[int]) -> str:
    return "[" + ", ".join("any" if length < 0 else str(length) for length in shape) + "]"


def _rows(tensor: BodyTensor, size: int) -> list[BodyTensor]:
    shape = tensor.shape[1:]
    row_bytes = prod(shape) * DTYPE_BYTES[tensor.dtype]
    pieces = cut(tensor.chunks, [row_bytes] * size)
    return [BodyTensor(tensor.name, tensor.dtype, shape, piece) for piece in pieces]


def _payload(tensors: Sequence[BodyTensor]) -> Payload:
    headers = []
    chunks: list[Buffer] = []
    offset = 0
    for name, dtype, shape, pieces in tensors:
        header = TensorHeader(name, dtype, shape, offset)
        headers.append(header)
        chunks.extend(pieces)
        offset += header.num_bytes
    return Payload("tensors", chunks, tuple(headers))


def _check_bools(tensor: BodyTensor) -> None:
    """Check that bools are 0 or 1: torch's kernels rely on that."""
    if any(bytes(chunk).translate(None, b"\x00\x01") for chunk in tensor.chunks):
        raise InvalidInputError(f"tensor {tensor.name!r}: a bool has a byte other than 0 and 1")


def _shape_from(text: str, place: str = "shape") -> tuple[int, ...]:
    """Read a shape such as "3,224,224", "3,", "[3]", or nothing for a scalar."""
    parts = [part.strip() for part in text.strip().removeprefix("[").removesuffix("]").split(",")]
    if parts[-1] == "":
        parts.pop()
    if not all(part.isascii() and part.isdigit() and len(part) <= 18 for part in parts):
        raise BadRequestError(f"{place}: {text[:100]!r} is no shape such as 3,224,224")
    shape = tuple(map(int, parts))
    check_shape(shape, place)
    return shape


def check_shape(shape: Sequence[int], place: str) -> None:
    """Check that a body can have such a shape.

    Raises:
        InvalidInputError: It cannot.
    """
    if len(shape) > _MAX_RANK:
        raise InvalidInputError(f"{place}: more than {_MAX_RANK} dimensions")
    if min(shape, default=0) < 0:
        raise InvalidInputError(f"{place}: a dimension of {min(shape)}")
    if max(shape, default=0) > _MAX_LENGTH:
        raise InvalidInputError(f"{place}: a dimension is more than {_MAX_LENGTH}")
    if 0 in shape and prod(filter(None, shape)) > _MAX_EMPTY:
        raise InvalidInputError(
            f"{place}: {list(shape)} has no elements; the product of its other dimensions may "
            f"be {_MAX_EMPTY} at most"
        )


def _check_name(name: str) -> None:
    """Check a name, because it goes into messages, logs and headers of answers."""
    if len(name) > _MAX_NAME_CHARS:
        raise InvalidInputError(
            f"tensor {name[:40]!r}...: its name has {len(name)} characters; at most "
            f"{_MAX_NAME_CHARS} are taken"
        )
    if not name.isprintable():
        raise InvalidInputError(f"tensor {name!r}: its name has characters that cannot be printed")


def _npy_dtype(text: bytes, place: str) -> str:
    match = _DESCR.search(text)
    descr = match[1].decode() if match else "a structured dtype"
    if descr in _FROM_NPY:
        return _FROM_NPY[descr]
    if descr.startswith(">") and "<" + descr[1:] in _FROM_NPY:
        raise InvalidInputError(
            f"{place}: {descr} is big-endian; send array.astype('<{descr[1:]}')"
        )
    raise InvalidInputError(f"{place}: {descr} is not one of {', '.join(NPY_DTYPES)}")


def _read_entries(text: bytes) -> list[tuple[str, _SafetensorsEntry]]:
    """Return the tensors of a safetensors header, in the order of their bytes."""
    if parameters.is_too_deep(text):
        raise BadRequestError("the safetensors header: nested too deep")
    try:
        raws = _entries.decode(text)
        raws.pop("__metadata__", None)
        if not 0 < len(raws) <= _MAX_TENSORS:
            raise InvalidInputError(
                f"the body: {len(raws)} tensors; from 1 to {_MAX_TENSORS} are taken"
            )
        entries = [(name, _entry.decode(raw)) for name, raw in raws.items()]
    except JsonErrors as error:
        raise BadRequestError(f"the safetensors header: {json_message(error, text)}") from None
    return sorted(entries, key=lambda each: each[1].data_offsets)


def _peek(chunks: Sequence[bytes], size: int) -> bytes:
    """Return the first bytes of joined chunks."""
    found = chunks[0][:size] if chunks else b""
    for chunk in chunks[1:]:
        if len(found) >= size:
            break
        found += chunk[: size - len(found)]
    return found
