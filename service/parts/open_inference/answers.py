"""Answers to infer requests over HTTP: JSON, and binary outputs behind it."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from inferpool.service.queue.instance import Buffer

_MAX_VALUES = 1 << 18
"""Most numbers and texts of an answer in JSON: it is written in the event loop, in some 15 ms."""


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
    default = request.parameters.get(BINARY_OUTPUT, False)
    is_binary = {each.name: wants_binary(request, i) for i, each in enumerate(request.outputs)}
    pieces: list[Buffer] = [b""]
    shown, num_values = [], 0
    for output in outputs:
        if is_binary.get(output.name, default):
            pieces += output.pieces()
            shown.append(_with_size(output))
        elif (num_values := num_values + prod(output.shape)) > _MAX_VALUES:
            raise BadRequestError(
                f"the answer has more than {_MAX_VALUES} values, the most that JSON is for; ask "
                "for it as binary, by binary_data_output"
            )
        else:
            shown.append(_with_data(output))
    text = msgspec.json.encode(_Answer(entry.name, str(entry.version), shown, request.id))
    if len(pieces) == 1:
        return [(b"content-type", b"application/json")], text
    pieces[0] = text
    length = (HEADER_LENGTH, b"%d" % len(text))
    return [(b"content-type", b"application/octet-stream"), length], b"".join(pieces)


def _with_size(output: InferOutput) -> _Shown:
    parameters = {**output.parameters, SIZE: sum(map(len, output.pieces()))}
    return _Shown(output.name, output.datatype, output.shape, parameters)


def _with_data(output: InferOutput) -> _Shown:
    from inferpool.service.parts.open_inference.json_data import write_data

    data = Raw(write_data(output))
    return _Shown(output.name, output.datatype, output.shape, output.parameters, data)
