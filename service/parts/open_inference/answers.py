"""Answers to infer requests over HTTP: JSON, and binary outputs behind it."""

from collections.abc import Mapping, Sequence
from math import prod

import msgspec
from msgspec import Raw

from inferpool.service.api.errors import Headers
from inferpool.service.api.exchange import ModelEntry
from inferpool.service.errors import BadRequestError
from inferpool.service.parts.open_inference.requests import (
    BINARY_OUTPUT,
    HEADER_LENGTH,
    SIZE,
    wants_binary,
)
from inferpool.service.parts.open_inference.values import InferOutput, InferRequest

_MAX_VALUES = 1 << 18
"""Most numbers and texts of an answer in JSON: it is written in the event loop, in some 50 ms."""


class _Shown(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """An output in the JSON of an answer."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: Mapping[str, object] = {}
    data: Raw | msgspec.UnsetType = msgspec.UNSET


class _Answer(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The JSON of an answer; an empty id is none."""

    model_name: str
    model_version: str
    outputs: Sequence[_Shown]
    id: str = ""


def encode_answer(
    request: InferRequest, entry: ModelEntry, outputs: Sequence[InferOutput]
) -> tuple[Headers, bytes]:
    """Return the headers and the body of an answer, without an encoding.

    Raises:
        BadRequestError: An output has no form in JSON and was asked for in it, or is too long.
    """
    is_binary = {each.name: wants_binary(request, i) for i, each in enumerate(request.outputs)}
    default = request.parameters.get(BINARY_OUTPUT, False)
    binary = [each for each in outputs if is_binary.get(each.name, default)]
    texts = [each for each in outputs if not is_binary.get(each.name, default)]
    if texts and (num_values := sum(prod(each.shape) for each in texts)) > _MAX_VALUES:
        raise BadRequestError(
            f"the answer has {num_values} values, and JSON is for {_MAX_VALUES} at most; ask for "
            "it as binary, by binary_data_output"
        )
    shown = [
        _with_size(each) if is_binary.get(each.name, default) else _with_data(each)
        for each in outputs
    ]
    text = msgspec.json.encode(_Answer(entry.name, str(entry.version), shown, request.id))
    if not binary:
        return [(b"content-type", b"application/json")], text
    length = (HEADER_LENGTH, b"%d" % len(text))
    pieces = [piece for each in binary for piece in each.pieces()]
    return [(b"content-type", b"application/octet-stream"), length], b"".join([text, *pieces])


def _with_size(output: InferOutput) -> _Shown:
    parameters = {**output.parameters, SIZE: sum(map(len, output.pieces()))}
    return _Shown(output.name, output.datatype, output.shape, parameters)


def _with_data(output: InferOutput) -> _Shown:
    from inferpool.service.parts.open_inference.json_data import write_data

    data = Raw(write_data(output))
    return _Shown(output.name, output.datatype, output.shape, output.parameters, data)
