"""Bodies of infer requests over HTTP: JSON, and tensors behind it. Runs in the event loop.

Members and the binary form are those of the Open Inference Protocol, version 2, and of Triton's
extension "binary tensor data".
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import msgspec
from msgspec import Raw

from inferpool.models.json_errors import BYTE_ORDER_MARK, JsonErrors, json_message
from inferpool.models.spec import DTYPE_BYTES, TensorSpec
from inferpool.service.api.codecs.body import Limits
from inferpool.service.api.codecs.parameters import MAX_DEPTH, is_too_deep
from inferpool.service.api.codecs.tensors import check_shape, cut
from inferpool.service.api.exchange import ModelEntry
from inferpool.service.errors import BadRequestError, InvalidInputError, TooLargeError
from inferpool.service.parts.open_inference.elements import read_elements
from inferpool.service.parts.open_inference.tensors import refuse_shared_memory, whole_number
from inferpool.service.parts.open_inference.values import (
    BYTES,
    BYTES_INPUT,
    DATATYPES,
    InferInput,
    InferRequest,
    RequestedOutput,
)
from inferpool.service.queue.instance import Buffer

HEADER_LENGTH = b"inference-header-content-length"
SIZE = "binary_data_size"
BINARY = "binary_data"
BINARY_OUTPUT = "binary_data_output"

RAW_REQUEST = InferRequest((), parameters={BINARY_OUTPUT: True})
"""The request of a body that is a tensor alone: all outputs, as binary."""

_MAX_DIGITS = 18
KNOWN_BYTES = 2048
"""JSON up to this size is remembered: a client sends the same with each call of its loop."""
_MAX_BESIDES = 1 << 16
"""Most bytes of JSON besides data: they may be thousands of shapes, parameters and outputs."""
_NOTHING = Raw()


class _Input(msgspec.Struct, frozen=True, gc=False):
    name: str
    shape: tuple[int, ...]
    datatype: str
    parameters: dict[str, Any] | None = None
    data: Raw = _NOTHING


class _Output(msgspec.Struct, frozen=True, gc=False):
    name: str
    parameters: dict[str, Any] | None = None


class _Body(msgspec.Struct, frozen=True, gc=False):
    """The JSON of a request. Members that nobody knows are left alone, as Triton does."""

    inputs: tuple[_Input, ...]
    id: str = ""
    parameters: dict[str, Any] | None = None
    outputs: tuple[_Output, ...] = ()


class _Data(msgspec.Struct, frozen=True, gc=False):
    """An input whose other members are skipped."""

    data: Raw = _NOTHING


class _AllData(msgspec.Struct, frozen=True, gc=False):
    inputs: list[_Data]


_body = msgspec.json.Decoder(_Body)
_all_data = msgspec.json.Decoder(_AllData)


def read_request(
    chunks: Sequence[Buffer], headers: Mapping[bytes, bytes], limits: Limits
) -> InferRequest:
    """Read a body that has JSON, and maybe tensors behind it.

    Args:
        chunks: The body, without an encoding.
        headers: Those of the call.
        limits: How long JSON may be, and how many texts there may be.

    Raises:
        BadRequestError: It cannot be read, or its sizes are wrong.
        InvalidInputError: A number does not fit its datatype.
        TooLargeError: The JSON is too long.
    """
    total = sum(map(len, chunks))
    num_json_bytes = header_length(headers)
    if num_json_bytes is None:
        num_json_bytes = total
    if num_json_bytes > total:
        raise BadRequestError(
            f"Inference-Header-Content-Length: {num_json_bytes} is more than the {total} bytes of "
            "the body"
        )
    if num_json_bytes > limits.max_json_bytes:
        raise TooLargeError(
            f"the JSON is larger than {limits.max_json_bytes} bytes, the limit for JSON (the "
            "setting max_json_bytes); send tensors as binary, by binary_data_size: these may have "
            "as many bytes as max_body_bytes says"
        )
    rest_bytes = total - num_json_bytes
    views = cut(chunks, [num_json_bytes, rest_bytes])
    text = b"".join(views[0])
    asked, given, sizes = _read_short(text) if len(text) <= KNOWN_BYTES else _read(text)
    num_bytes = sum(size for size in sizes if size is not None)
    if num_bytes != rest_bytes:
        raise BadRequestError(
            f"the inputs have {num_bytes} bytes by their {SIZE}, and {rest_bytes} bytes follow the "
            "JSON"
        )
    pieces = [views[1]] if len(sizes) == 1 else cut(views[1], [size or 0 for size in sizes])
    inputs = [
        _with_json(each, limits) if size is None else _with_bytes(each, piece, limits)
        for each, size, piece in zip(given, sizes, pieces, strict=True)
    ]
    return InferRequest(inputs, asked.id, asked.parameters, asked.outputs)


def header_length(headers: Mapping[bytes, bytes]) -> int | None:
    """Return the number of bytes of JSON before the tensors; None if all is JSON.

    Raises:
        BadRequestError: The header is no number.
    """
    header = headers.get(HEADER_LENGTH)
    if header is None:
        return None
    if not header.isdigit() or len(header) > _MAX_DIGITS:
        raise BadRequestError("Inference-Header-Content-Length: is not a number of bytes")
    return int(header)


def wants_binary(request: InferRequest, index: int | None) -> bool:
    """Return whether a requested output is to be binary; None asks for those without a wish.

    Raises:
        BadRequestError: The wish is neither true nor false.
    """
    value = request.parameters.get(BINARY_OUTPUT, False)
    if index is not None:
        value = request.outputs[index].parameters.get(BINARY, value)
    if not isinstance(value, bool):
        name = BINARY_OUTPUT if index is None else f"outputs[{index}].{BINARY}"
        raise BadRequestError(f"parameters, {name}: must be true or false")
    return value


def read_raw(chunks: Sequence[Buffer], entry: ModelEntry) -> InferInput:
    """Return a body as the only input of a model: a batch of one, without any description.

    Raises:
        InvalidInputError: The model has several inputs, or more than one free dimension, or the
            body has another size.
    """
    inputs = entry.inputs
    if entry.interface.accepts or not inputs:
        return InferInput(
            BYTES_INPUT, BYTES, (1,), [chunks[0] if len(chunks) == 1 else b"".join(chunks)]
        )
    if len(inputs) > 1:
        names = ", ".join(repr(each.name) for each in inputs)
        raise InvalidInputError(
            f"a body without JSON must be the only input of a model, and this one has {names}"
        )
    spec = inputs[0]
    return InferInput(spec.name, DATATYPES[spec.dtype], _raw_shape(chunks, spec), chunks)


def _raw_shape(chunks: Sequence[Buffer], spec: TensorSpec) -> tuple[int, ...]:
    num_bytes = sum(map(len, chunks))
    shape = list(spec.instance_shape) if spec.shape else [-1]
    num_fixed = prod(size for size in shape if size >= 0) * DTYPE_BYTES[spec.dtype]
    if shape.count(-1) == 1 and num_fixed:
        shape[shape.index(-1)] = num_bytes // num_fixed
    if -1 in shape or prod(shape) * DTYPE_BYTES[spec.dtype] != num_bytes:
        raise InvalidInputError(
            f"input {spec.name!r}: the {num_bytes} bytes of the body do not tell a shape: one "
            f"instance of {DATATYPES[spec.dtype]} {list(spec.shape)[1:]} is needed, with one free "
            "dimension at most"
        )
    return (1, *shape)


def _read(text: bytes) -> tuple[InferRequest, Sequence[_Input], Sequence[int | None]]:
    """Return a request without its inputs, these, and the binary size of each, if it has one."""
    body = _decode(text)
    outputs = [RequestedOutput(each.name, each.parameters or {}) for each in body.outputs]
    asked = InferRequest((), body.id, body.parameters or {}, outputs)
    for index in (None, *range(len(outputs))):
        wants_binary(asked, index)
    return asked, body.inputs, [_size_of(each) for each in body.inputs]


def _decode(text: bytes) -> _Body:
    text = text.removeprefix(BYTE_ORDER_MARK)
    if not text:
        raise BadRequestError("the body is empty, and JSON is expected")
    if is_too_deep(text):
        raise BadRequestError(f"the JSON is nested more than {MAX_DEPTH} deep")
    try:
        if not text.isascii():
            text.decode()  # msgspec skips over strings without looking for errors in their UTF-8
        if len(text) > _MAX_BESIDES:
            data = [len(memoryview(each.data)) for each in _all_data.decode(text).inputs]
            if len(text) - sum(data) > _MAX_BESIDES:
                raise TooLargeError(
                    f"the JSON has more than {_MAX_BESIDES} bytes besides the data of its inputs"
                )
        return _body.decode(text)
    except msgspec.ValidationError as error:
        form = 'the JSON must be {"inputs": [{"name", "shape", "datatype", "data"}, ...], ...}'
        raise BadRequestError(f"{form}: {str(error).replace('`$.', '`')}") from None
    except JsonErrors as error:
        raise BadRequestError(f"the JSON: {json_message(error, text)}") from None


_read_short = lru_cache(maxsize=256)(_read)


def _size_of(given: _Input) -> int | None:
    """Return how many bytes an input has behind the JSON; None if it has its data in it."""
    place, options = f"input {given.name[:80]!r}", given.parameters or {}
    refuse_shared_memory(options, place)
    has_data = bytes(memoryview(given.data)[:4]) != b"null" if given.data else False
    if SIZE not in options:
        if not has_data:
            raise BadRequestError(f"{place}: has neither data nor the parameter {SIZE}")
        return None
    if has_data:
        raise BadRequestError(f"{place}: has both data and the parameter {SIZE}")
    try:
        return whole_number(options, SIZE)
    except BadRequestError as error:
        raise BadRequestError(f"{place}: {error.message}") from None


def _with_bytes(given: _Input, chunks: Sequence[Buffer], limits: Limits) -> InferInput:
    if given.datatype == BYTES:
        chunks = read_elements(chunks, f"input {given.name[:80]!r}", limits.max_instances)
    return InferInput(given.name, given.datatype, given.shape, chunks, given.parameters or {})


def _with_json(given: _Input, limits: Limits) -> InferInput:
    from inferpool.service.parts.open_inference.json_data import read_data

    place = f"input {given.name[:80]!r}"
    check_shape(given.shape, place)
    chunks = read_data(given.data, given.datatype, given.shape, place, limits.max_instances)
    return InferInput(given.name, given.datatype, given.shape, chunks, given.parameters or {})
