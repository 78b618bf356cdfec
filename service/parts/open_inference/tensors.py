"""From requests to instances, and from their outcomes to outputs. REST and gRPC share this.

The first dimension of each shape is the batch. Runs in the event loop.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from math import prod

import msgspec

from inferpool.models.spec import DTYPE_BYTES, TensorSpec, matches
from inferpool.service.api.codecs import parameters as codec_parameters
from inferpool.service.api.codecs.answers import Outcome
from inferpool.service.api.codecs.body import BodyContext, Decoded, Limits
from inferpool.service.api.codecs.tensors import BodyTensor, check_shape, instances_of
from inferpool.service.api.exchange import Call, ModelEntry
from inferpool.service.errors import BadRequestError, InvalidInputError, ServiceError
from inferpool.service.parts.open_inference.elements import payloads_of
from inferpool.service.parts.open_inference.values import (
    BYTES,
    BYTES_OUTPUT,
    DATATYPES,
    DTYPES,
    InferInput,
    InferOutput,
    InferRequest,
    RequestedOutput,
)
from inferpool.workers.shared.messages import ContentBlob, TensorBlob

LOWEST_PRIORITY = 9
_MAX_TENSORS = 256
_text = msgspec.json.Decoder(str)
_RESERVED = ("priority", "timeout", "headers", "classification")
_RESERVED_STARTS = ("sequence_", "triton_", "binary_", "shared_memory_")


def decode_request(request: InferRequest, entry: ModelEntry, call: Call, limits: Limits) -> Decoded:
    """Return the instances of a request, and set the options in the call's `ref`.

    Raises:
        BadRequestError: It cannot be read.
        InvalidInputError: It does not fit the model.
        TooLargeError: It has too many instances, or too long parameters.
    """
    _check_inputs(request.inputs)
    is_bytes = request.inputs[0].datatype == BYTES
    set_options(request.parameters, call, limits)
    call.ref.wants_tensors = wants_tensors(entry, is_bytes=is_bytes)
    _check_outputs(request.outputs, entry, has_tensors=call.ref.wants_tensors)
    rest = _rest_of(request.parameters)
    if is_bytes:
        payloads = payloads_of(request.inputs[0], entry.interface, limits)
        return Decoded(payloads, True, rest)
    inputs = [_spec_for(each, entry) for each in request.inputs]
    _check_names(request.inputs, entry.inputs)
    tensors = [
        BodyTensor(each.name, DTYPES[each.datatype], each.shape, each.chunks)
        for each in request.inputs
    ]
    return instances_of(tensors, BodyContext({}, b"", inputs, limits), rest)


def wants_tensors(entry: ModelEntry, *, is_bytes: bool) -> bool:
    """Return whether a model answers with tensors rather than with JSON or content.

    A model that declares no outputs answers tensors with tensors, and `is_bytes` inputs with JSON.
    """
    if entry.interface.streams:
        return False
    return bool(entry.outputs) or not (is_bytes or entry.interface.media_types)


def set_options(given: Mapping[str, object], call: Call, limits: Limits) -> None:
    """Set the priority and the deadline that a request asks for.

    A `priority` of 0 is the usual one, 1 the first; all from 9 on are the last. A `timeout` is in
    microseconds, and 0 the usual one. Triton's extension "schedule_policy" has both.

    Raises:
        BadRequestError: They are no whole numbers.
    """
    if not given:
        return
    if priority := whole_number(given, "priority"):
        call.ref.priority = min(priority, LOWEST_PRIORITY)
    if timeout_us := whole_number(given, "timeout"):
        timeout_s = min(timeout_us / 1e6, limits.max_timeout_s)
        deadline = call.started + timeout_s
        is_set = b"x-timeout-ms" in call.headers
        call.ref.deadline = min(deadline, call.ref.deadline) if is_set else deadline


def whole_number(given: Mapping[str, object], name: str) -> int:
    """Return a parameter that must be a whole number; 0 if it is not there.

    Raises:
        BadRequestError: It is something else.
    """
    value = given.get(name, 0)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 64:
        raise BadRequestError(f"parameters.{name}: must be a whole number from 0")
    return value


def outputs_of(
    request: InferRequest, entry: ModelEntry, outcomes: Sequence[Outcome]
) -> list[InferOutput]:
    """Return the outputs that a request asks for, in the model's order, with the batch first.

    Raises:
        ServiceError: An instance failed, or the model has no such outputs.
    """
    values = []
    for index, outcome in enumerate(outcomes):
        if isinstance(outcome, ServiceError):
            if len(outcomes) == 1 or outcome.message.startswith("instances["):
                raise outcome
            error = copy(outcome)  # the instances of other calls may have the same one
            error.message = f"instance {index} of the batch: {outcome.message}"
            raise error
        values.append(outcome.value)
    rows = [value for value in values if isinstance(value, list)]
    found = _columns(rows) if len(rows) == len(values) else {BYTES_OUTPUT: _texts_of(values)}
    declared = [each.name for each in entry.outputs if each.name in found]
    names = list(dict.fromkeys([*declared, *found])) if len(found) > 1 else list(found)
    if not request.outputs:
        return [found[name] for name in names]
    wishes = {each.name: each for each in request.outputs}
    if unknown := [name for name in wishes if name not in found]:
        raise _no_output(unknown[0], names)
    return [_as_wished(found[name], wishes[name], entry) for name in names if name in wishes]


def _as_wished(output: InferOutput, wish: RequestedOutput, entry: ModelEntry) -> InferOutput:
    if count := whole_number(wish.parameters, "classification"):
        from inferpool.service.parts.open_inference.classification import classified

        return classified(output, count, entry.interface.labels)
    return output


def _check_inputs(inputs: Sequence[InferInput]) -> None:
    """Check what holds for each model."""
    if not 0 < len(inputs) <= _MAX_TENSORS:
        raise BadRequestError(f"inputs: has {len(inputs)}; from 1 to {_MAX_TENSORS} are possible")
    if len(inputs) > 1:
        _check_several(inputs)
    for each in inputs:
        place = f"input {each.name[:80]!r}"
        refuse_shared_memory(each.parameters, place)
        if not each.shape:
            raise BadRequestError(f"{place}: the shape is empty; it must begin with the batch")
        check_shape(each.shape, place)
        if each.datatype == BYTES:
            continue
        if each.datatype not in DTYPES:
            raise BadRequestError(
                f"{place}: {each.datatype[:40]!r} is not one of {', '.join(DTYPES)}, {BYTES}"
            )
        expected = prod(each.shape) * DTYPE_BYTES[DTYPES[each.datatype]]
        if (num_bytes := sum(map(len, each.chunks))) != expected:
            raise InvalidInputError(
                f"{place}: {each.datatype} {list(each.shape)} takes {expected} bytes, found "
                f"{num_bytes}"
            )


def _check_several(inputs: Sequence[InferInput]) -> None:
    names = set()
    for each in inputs:
        if each.name in names:
            raise BadRequestError(f"input {each.name[:80]!r}: is there twice")
        names.add(each.name)
        if each.datatype == BYTES:
            raise InvalidInputError(
                f"input {each.name[:80]!r}: a BYTES input must be the only one; send several "
                'values as one JSON object, with the parameter "content_type": "application/json"'
            )


def refuse_shared_memory(given: Mapping[str, object], place: str) -> None:
    """Refuse a tensor in shared memory: the name of a region would open a file of this host.

    Raises:
        BadRequestError: The parameters name a region.
    """
    if given and "shared_memory_region" in given:
        raise BadRequestError(f"{place}: shared memory is not supported; send the tensor itself")


def _spec_for(given: InferInput, entry: ModelEntry) -> TensorSpec:
    """Return the declaration of an input, or one that is made of its shape.

    Raises:
        InvalidInputError: It is declared otherwise.
    """
    dtype, rank = DTYPES[given.datatype], len(given.shape)
    spec = next((each for each in entry.inputs if each.name == given.name), None)
    if spec is None or not spec.shape:
        if spec is not None and spec.dtype != dtype:
            raise _wrong_datatype(given, spec)
        return TensorSpec(name=given.name, dtype=dtype, shape=(-1,) * rank)
    if rank != len(spec.shape):
        raise InvalidInputError(
            f"input {given.name!r}: expected shape {list(spec.shape)}, found {list(given.shape)}; "
            "the first dimension is the batch, and must be there"
        )
    if entry.interface.accepts:  # it reads its inputs itself, in more than one form
        return spec
    if spec.dtype != dtype:
        raise _wrong_datatype(given, spec)
    if not matches(given.shape, spec.shape):
        raise InvalidInputError(
            f"input {given.name!r}: expected shape {list(spec.shape)}, found {list(given.shape)}"
        )
    return spec


def _wrong_datatype(given: InferInput, spec: TensorSpec) -> InvalidInputError:
    return InvalidInputError(
        f"input {given.name!r}: expected {DATATYPES.get(spec.dtype, spec.dtype)}, found "
        f"{given.datatype}"
    )


def _check_names(given: Sequence[InferInput], inputs: Sequence[TensorSpec]) -> None:
    names = [each.name for each in given]
    expected = [each.name for each in inputs]
    if not expected or sorted(names) == sorted(expected):
        return
    listed = ", ".join(map(repr, expected))
    for name in names:
        if name not in expected:
            raise InvalidInputError(
                f"input {name[:80]!r}: the model has no such input; it has {listed}"
            )
    missing = ", ".join(repr(name) for name in expected if name not in names)
    raise InvalidInputError(f"inputs: {missing} missing; the model has {listed}")


def _check_outputs(
    outputs: Sequence[RequestedOutput], entry: ModelEntry, *, has_tensors: bool
) -> None:
    """Check requested outputs before anything is computed, as far as they are declared."""
    names = [each.name for each in entry.outputs] if has_tensors else [BYTES_OUTPUT]
    for each in outputs:
        refuse_shared_memory(each.parameters, f"output {each.name[:80]!r}")
        whole_number(each.parameters, "classification")
        if names and each.name not in names:
            raise _no_output(each.name, names)


def _no_output(name: str, names: Sequence[str]) -> InvalidInputError:
    listed = ", ".join(map(repr, names)) or "none"
    return InvalidInputError(f"output {name[:80]!r}: the model has no such output; it has {listed}")


def _rest_of(given: Mapping[str, object]) -> bytes:
    """Return the JSON of the parameters that are for the model."""
    if not given:
        return b""
    rest = {}
    for name, value in given.items():
        if not isinstance(value, str | int | float):
            raise BadRequestError(
                f"parameters.{name[:80]}: must be a text, a number, true or false"
            )
        if name not in _RESERVED and not name.startswith(_RESERVED_STARTS):
            rest[name] = value
    return codec_parameters.merge({}, msgspec.json.encode(rest)) if rest else b""


def _columns(rows: Sequence[Sequence[TensorBlob]]) -> dict[str, InferOutput]:
    """Return each output of all instances, by name; lists too, if all are of one shape."""
    if len(rows) == 1:
        return {blob.name: _column(blob.name, [blob]) for blob in rows[0]}
    by_name = [{blob.name: blob for blob in row} for row in rows]
    return {
        name: _column(name, [row[name] for row in by_name if name in row], len(rows))
        for name in by_name[0]
    }


def _column(name: str, blobs: Sequence[TensorBlob], num: int = 1) -> InferOutput:
    first = blobs[0]
    if len(blobs) < num:
        raise InvalidInputError(f"output {name!r}: not every instance has it; send them one by one")
    if any(blob.shape != first.shape or blob.dtype != first.dtype for blob in blobs):
        raise InvalidInputError(
            f"output {name!r} differs in shape between the instances, so one tensor cannot hold "
            "it: send them one by one"
        )
    datatype = DATATYPES.get(first.dtype)
    if datatype is None:
        raise InvalidInputError(
            f"output {name!r}: the protocol has no {first.dtype}; ask for others"
        )
    return InferOutput(name, datatype, (num, *first.shape), [blob.buffer for blob in blobs])


def _texts_of(values: Sequence[object]) -> InferOutput:
    """Return answers in JSON, or content, as elements.

    Texts, which are JSON strings, stand as they are if all are texts. The parameter `content_type`
    says what they are, if all are of one type.
    """
    types: set[str] = set()
    elements = []
    texts = [value for value in values if isinstance(value, bytes) and value[:1] == b'"']
    if len(texts) == len(values):
        types.add("text/plain")
        elements += [_text.decode(value).encode() for value in texts]
    for value in values if not elements else ():
        if isinstance(value, ContentBlob):
            types.add(value.media_type)
            elements.append(value.buffer)
        else:
            assert isinstance(value, bytes), "tensors came beside JSON"
            types.add("application/json")
            elements.append(value)
    parameters = {"content_type": types.pop()} if len(types) == 1 else {}
    return InferOutput(BYTES_OUTPUT, BYTES, (len(elements), 1), elements, parameters)
