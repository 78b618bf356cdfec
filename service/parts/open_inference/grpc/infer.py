"""Calls of `ModelInfer`: from messages to instances, and back. Event loop.

Tensors stay where they came: the arena gets views of the message, and the answer is joined once.
"""

import asyncio
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from inferpool.service.api.codecs.answers import Outcome
from inferpool.service.api.codecs.body import Decoded, Limits
from inferpool.service.api.errors import Answer, kind_of
from inferpool.service.api.exchange import Call, CallProtocol, Exchange, ModelEntry, Predict, Reply
from inferpool.service.errors import (
    BadRequestError,
    InvalidInputError,
    ServiceError,
    TooLargeError,
)
from inferpool.service.parts.open_inference.grpc.schema import INFERENCE, schema
from inferpool.service.parts.open_inference.grpc.statuses import Headers
from inferpool.service.parts.open_inference.tensors import (
    decode_request,
    outputs_of,
    refuse_shared_memory,
)
from inferpool.service.parts.open_inference.values import (
    BYTES,
    DTYPES,
    InferInput,
    InferOutput,
    InferRequest,
    RequestedOutput,
)
from inferpool.service.queue.instance import Buffer

_Request = schema().message(INFERENCE, "ModelInferRequest")
_Response = schema().message(INFERENCE, "ModelInferResponse")
_RAW_INPUT = _Request.DESCRIPTOR.fields_by_name["raw_input_contents"].number
_RAW_OUTPUT_TAG = bytes(
    [_Response.DESCRIPTOR.fields_by_name["raw_output_contents"].number << 3 | 2]
)
_MAX_FIELDS = 4096
"""Most fields at the top of a message."""
_TYPED: Mapping[str, tuple[str, str]] = {
    "BOOL": ("bool_contents", "B"),
    "INT8": ("int_contents", "b"),
    "INT16": ("int_contents", "h"),
    "INT32": ("int_contents", "i"),
    "INT64": ("int64_contents", "q"),
    "UINT8": ("uint_contents", "B"),
    "UINT16": ("uint_contents", "H"),
    "UINT32": ("uint_contents", "I"),
    "UINT64": ("uint64_contents", "Q"),
    "FP32": ("fp32_contents", "f"),
    "FP64": ("fp64_contents", "d"),
}
"""The field of `InferTensorContents` for each datatype, and its code in `array`."""
_MAX_RANK = 16
_MAX_PARAMETERS = 1024
_LONGEST_S = 1e9
"""A longer deadline is none."""


class Arrived(NamedTuple):
    """A message of a client: all but its raw contents, and those."""

    head: Any
    raw: Sequence[memoryview]


def read_request(message: Buffer, limits: Limits) -> Arrived:
    """Read a `ModelInferRequest`. Raw contents are views of the message.

    Raises:
        BadRequestError: It is none.
        TooLargeError: It has too much besides raw contents, which the event loop would read.
    """
    try:
        pieces, raw = _cut(memoryview(message))
        if sum(map(len, pieces)) > limits.max_json_bytes:
            raise TooLargeError(
                f"the message has more than {limits.max_json_bytes} bytes besides "
                "raw_input_contents (the setting max_json_bytes); send tensors there"
            )
        return Arrived(_Request.FromString(b"".join(pieces)), raw)
    except (DecodeError, IndexError):
        raise BadRequestError("the message is no ModelInferRequest") from None


def _cut(message: memoryview) -> tuple[list[memoryview], list[memoryview]]:
    """Return the pieces of a message around its raw contents, and these.

    The encoding is that of protobuf (protobuf.dev/programming-guides/encoding).

    Raises:
        DecodeError: It is cut off, or has too many fields.
        IndexError: It is cut off.
    """
    pieces: list[memoryview] = []
    raw: list[memoryview] = []
    begin = position = 0
    end = len(message)
    for _ in range(_MAX_FIELDS):
        if position == end:
            return [*pieces, message[begin:]], raw
        start = position
        tag, position = _varint(message, position)
        match tag & 7:
            case 0:
                _, position = _varint(message, position)
            case 1:
                position += 8
            case 2:
                size, position = _varint(message, position)
                if tag >> 3 == _RAW_INPUT:
                    pieces.append(message[begin:start])
                    raw.append(message[position : position + size])
                    begin = position + size
                position += size
            case 5:
                position += 4
            case _:
                break
        if position > end:
            break
    raise DecodeError("cut off, or too many fields")


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    """Return a number and the position after it."""
    value = shift = 0
    while shift < 64:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise DecodeError("a number is too long")


def _varint_of(value: int) -> bytes:
    """Return a number as protobuf encodes it."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def field_of(tag: bytes, pieces: Sequence[Buffer]) -> list[Buffer]:
    """Return the pieces of a field that has a length, with its tag and length first."""
    return [tag + _varint_of(sum(map(len, pieces))), *pieces]


def request_of(arrived: Arrived, limits: Limits) -> InferRequest:
    """Return a message as a request of the protocol.

    Raises:
        BadRequestError: It has contents in two places, or not for each input.
        InvalidInputError: The contents of an input do not fit it.
        TooLargeError: It has too many elements.
    """
    head, raw = arrived
    inputs = []
    for each in head.inputs:
        refuse_shared_memory(each.parameters, f"input {each.name[:80]!r}")
        if raw and each.HasField("contents"):
            raise BadRequestError(
                f"input {each.name[:80]!r}: has contents, and the message has raw_input_contents; "
                "all inputs must be in one place"
            )
    if raw and len(raw) != len(head.inputs):
        raise BadRequestError(
            f"raw_input_contents: has {len(raw)} entries, expected one for each of the "
            f"{len(head.inputs)} inputs"
        )
    for index, each in enumerate(head.inputs):
        place = f"input {each.name[:80]!r}"
        shape = tuple(each.shape[:_MAX_RANK])
        if len(each.shape) > _MAX_RANK or min(shape, default=0) < 0:
            raise InvalidInputError(f"{place}: the shape is not a list of up to 16 whole numbers")
        if each.datatype == BYTES and prod(shape) > limits.max_instances:
            raise TooLargeError(
                f"{place}: {prod(shape)} elements; the limit for one request is "
                f"{limits.max_instances} instances"
            )
        chunks: Sequence[Buffer]
        if not raw:
            chunks = _typed_contents(each, place)
        elif each.datatype == BYTES:
            chunks = list(_elements(raw[index], prod(shape), place))
        else:
            chunks = (raw[index],)
        inputs.append(
            InferInput(each.name, each.datatype, shape, chunks, values_of(each.parameters))
        )
    outputs = [RequestedOutput(each.name, values_of(each.parameters)) for each in head.outputs]
    return InferRequest(inputs, head.id, values_of(head.parameters), outputs)


def _typed_contents(given: Any, place: str) -> Sequence[Buffer]:
    """Return the contents of an input that has them as numbers or bytes of its own.

    Raises:
        BadRequestError: Its datatype has no such contents.
        InvalidInputError: They are not as many as its shape says, or a number is out of its range.
    """
    if given.datatype != BYTES and given.datatype not in _TYPED:
        if given.datatype in DTYPES:
            raise BadRequestError(
                f"{place}: {given.datatype} has no typed contents; send raw_input_contents"
            )
        return ()  # the datatype is refused later
    field, code = _TYPED.get(given.datatype, ("bytes_contents", ""))
    values, num = getattr(given.contents, field), prod(given.shape)
    if len(values) != num:  # before each of them costs time
        raise InvalidInputError(
            f"{place}: {list(given.shape)} has {num} elements, found {len(values)}"
        )
    if given.datatype == BYTES:
        return list(values)
    try:
        return (array(code, values).tobytes(),)
    except OverflowError:
        raise InvalidInputError(f"{place}: a number is no {given.datatype}") from None


def _elements(data: memoryview, num: int, place: str) -> Iterator[memoryview]:
    """Yield the elements of a BYTES tensor: each comes after its length, as a uint32.

    Raises:
        InvalidInputError: There are more or fewer, or one is cut off.
    """
    position = 0
    for index in range(num):
        start = position + 4
        position = start + int.from_bytes(data[position:start], "little")
        if position > len(data) or start > len(data):
            raise InvalidInputError(
                f"{place}: element {index} is cut off; each is its length in 4 bytes, "
                "little-endian, and then itself"
            )
        yield data[start:position]
    if position != len(data):
        raise InvalidInputError(f"{place}: has more than the {num} elements of its shape")


def values_of(parameters: Mapping[str, Any]) -> dict[str, object]:
    """Return parameters as values.

    Raises:
        BadRequestError: There are too many.
    """
    if len(parameters) > _MAX_PARAMETERS:
        raise BadRequestError(
            f"parameters: has {len(parameters)}; up to {_MAX_PARAMETERS} are possible"
        )
    found: dict[str, object] = {}
    for name, each in parameters.items():
        kind = each.WhichOneof("parameter_choice")
        found[name] = None if kind is None else getattr(each, kind)
    return found


def set_parameters(target: Any, values: Mapping[str, object]) -> None:
    """Set parameters of a message."""
    for name, value in values.items():
        if isinstance(value, bool):
            target[name].bool_param = value
        elif isinstance(value, int):
            target[name].int64_param = value
        else:
            target[name].string_param = str(value)


def response_pieces(
    entry: ModelEntry,
    request_id: str,
    outputs: Sequence[InferOutput],
    parameters: Mapping[str, object],
) -> list[Buffer]:
    """Return the pieces of a `ModelInferResponse`.

    Args:
        entry: The version that answers.
        request_id: The id that the client has given its request.
        outputs: The outputs, which go out as raw contents.
        parameters: Parameters of the whole answer.
    """
    head = _Response(model_name=entry.name, model_version=str(entry.version), id=request_id)
    set_parameters(head.parameters, parameters)
    contents: list[Buffer] = []
    for each in outputs:
        output = head.outputs.add(name=each.name, datatype=each.datatype, shape=each.shape)
        set_parameters(output.parameters, each.parameters)
        contents += field_of(_RAW_OUTPUT_TAG, each.pieces())
    return [head.SerializeToString(), *contents]


class InferCall(CallProtocol):
    """How one call is read and answered: a `CallProtocol`."""

    def __init__(self, message: Buffer, limits: Limits) -> None:
        """Read the message, or keep what is wrong with it for `decode`."""
        self._limits = limits
        self._arrived: Arrived | None = None
        self.failure: ServiceError | None = None
        """The error that the call ends with."""
        self.early: ServiceError | None = None
        """The message cannot be read."""
        self.request: InferRequest | None = None
        self.parameters: Mapping[str, object] = {}
        """Parameters of the answer."""
        self.id = self.key = ""
        """The id that the client has given its request, and what it asks for: see `name_in`."""
        try:
            self._arrived = read_request(message, limits)
        except ServiceError as error:
            self.early = error
            return
        head = self._arrived.head
        self.id = head.id
        name, version = head.model_name, head.model_version
        self.key = f"{name}/versions/{version}" if version else name

    def name_in(self, call: Call) -> str:
        """Return the key in `Predict.models` that a call asks for."""
        return self.key

    def decode(
        self, exchange: Exchange, entry: ModelEntry, chunks: Sequence[Buffer]
    ) -> Decoded | None:
        """Read the request, and complete the options in the call's `ref`.

        Raises:
            ServiceError: It cannot be read, or does not fit the model.
        """
        assert self._arrived is not None
        arrived, self._arrived = self._arrived, None
        request = request_of(arrived, self._limits)
        self.request = request._replace(inputs=())  # nobody needs the body any more
        return decode_request(request, entry, exchange.call, self._limits)

    def reply(self, call: Call, outcomes: Sequence[Outcome]) -> Answer:
        """Render the outcomes of all instances of a call."""
        assert call.entry is not None
        assert self.request is not None
        outputs = outputs_of(self.request, call.entry, outcomes)
        pieces = response_pieces(call.entry, self.id, outputs, self.parameters)
        return 200, [], self.render(pieces)

    def render(self, pieces: Sequence[Buffer]) -> bytes:
        """Return the message of an answer."""
        return b"".join(pieces)

    def problem(self, error: ServiceError, call: Call) -> Answer:
        """Keep an error, which is no message."""
        self.failure = error
        return kind_of(error).status, [], b""


class InferWire:
    """The wire of an exchange over gRPC: passes its answer on."""

    def __init__(
        self, predict: Predict, client: str | None, on_answer: Callable[[Exchange, Reply], object]
    ) -> None:
        """Expect the answer of a call from a client's address."""
        self._predict = predict
        self._client = client
        self._on_answer = on_answer

    def owner_of(self, call: Call) -> str:
        """Return the owner of the memory that a call takes."""
        return self._predict.owner_of(call.headers, self._client)

    def send_continue(self) -> None:
        """Do nothing: the message has come."""

    def send_answer(self, exchange: Exchange, reply: Reply) -> int | None:
        """Pass the answer on."""
        self._on_answer(exchange, reply)
        return reply[0]

    def open_stream(self, exchange: Exchange, lines: bytes, on_writable: Callable[[], None]) -> Any:
        """Do nothing: streams of gRPC send their parts otherwise."""
        raise AssertionError("not a stream of HTTP")


def begin_infer(
    wire: InferWire, predict: Predict, infer: InferCall, num_bytes: int, headers: Headers
) -> Exchange:
    """Begin a call; the wire gets its answer, maybe at once.

    Args:
        wire: Passes the answer on.
        predict: What the calls share.
        infer: The call.
        num_bytes: The length of its message.
        headers: The metadata of the call.
    """
    path = f"/v2/models/{infer.key}/infer"
    exchange = Exchange.open(wire, predict, "POST", path, b"", headers)
    exchange.call.protocol = infer
    exchange.call.choose(predict.find(exchange.call))
    if infer.early is not None:
        exchange.fail(infer.early)
    exchange.num_bytes = num_bytes
    exchange.is_complete = True
    exchange.start()
    return exchange


def with_deadline(headers: Headers, remaining_s: float | None) -> Headers:
    """Return the metadata of a call with its deadline as the header that means the same.

    Args:
        headers: The metadata of the call.
        remaining_s: Seconds until its deadline; None if it has none.
    """
    if remaining_s is None or remaining_s > _LONGEST_S:
        return headers
    name = b"x-timeout-ms"
    left_ms = max(1, int(remaining_s * 1e3))
    given = dict(headers).get(name, b"")
    if given.isdigit():
        left_ms = min(left_ms, max(1, int(given[:12])))
    elif given:
        return headers  # it is refused later
    return [*(each for each in headers if each[0] != name), (name, b"%d" % left_ms)]


class UnaryInfer:
    """Answers calls of `ModelInfer`."""

    def __init__(self, predict: Predict) -> None:
        """Submit to the models of an endpoint."""
        self._predict = predict

    async def answer(
        self, message: Buffer, headers: Headers, client: str | None
    ) -> tuple[str, bytes | ServiceError]:
        """Return the id of a call, and the message of its answer or an error.

        Args:
            message: The request.
            headers: The metadata of the call.
            client: The address that it comes from.
        """
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def on_answer(_: Exchange, reply: Reply) -> None:
            if not answered.done():
                answered.set_result(reply[2])

        infer = InferCall(message, self._predict.limits)
        wire = InferWire(self._predict, client, on_answer)
        exchange = begin_infer(wire, self._predict, infer, len(message), headers)
        del message  # the arena has it
        try:
            body = await answered
        finally:
            exchange.abandon()  # does nothing once it has its answer
        return exchange.call.request_id, infer.failure or body
