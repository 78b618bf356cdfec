"""Calls of other protocols than `/predict`, for `inferpool chaos --protocol`.

Each question is a request of `/predict`, and is judged by an answer of it. A connection of this
module sends the same input by another protocol, and returns the answer in the form of `/predict`.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol
from urllib.parse import parse_qsl

import msgspec
import numpy as np
from msgspec import Raw

from inferpool.service.client.health import ServiceHealth
from inferpool.service.client.reaching import problem_in
from inferpool.service.client.safetensors import read_safetensors
from inferpool.service.tools.chaos.plan import CallKind
from inferpool.service.tools.chaos.servers import SERVER_FORMS, ServerForm
from inferpool.service.tools.chaos.texts import TEXT_FORMS, TextCall, TextForm, problem_of
from inferpool.service.tools.trial.connection import (
    Address,
    NoAnswerError,
    TrialAnswer,
    TrialConnection,
    TrialError,
    connect,
    post_request,
)
from inferpool.service.tools.trial.inputs import specs_of

_LENGTH = b"inference-header-content-length"
_DTYPES = {
    "bool": "BOOL", "uint8": "UINT8", "int8": "INT8", "uint16": "UINT16", "int16": "INT16",
    "uint32": "UINT32", "int32": "INT32", "uint64": "UINT64", "int64": "INT64", "float16": "FP16",
    "bfloat16": "BF16", "float32": "FP32", "float64": "FP64",
}  # fmt: skip
"""Datatypes of the Open Inference Protocol, version 2, by our names."""
_NUMPY = {theirs: np.dtype(ours) for ours, theirs in _DTYPES.items() if theirs != "BF16"}
_GRPC_STATUSES = {
    "RESOURCE_EXHAUSTED": 429, "INTERNAL": 500, "UNAVAILABLE": 503, "DEADLINE_EXCEEDED": 504,
}  # fmt: skip
"""Statuses of HTTP for the same errors; 400 for any other."""
_GRPC_CODES = {
    r"workers have died while they computed this very input": "quarantined",
    r"\d+ (workers died|hosts were lost) while they": "worker_crashed",
    r"the worker died after part \d+ of this stream": "stream_broken",
}
"""Codes of errors by how their messages begin: gRPC has no codes."""
_PASSED = ("X-Request-ID", "X-API-Key")
_QUARANTINED, _STREAM_BROKEN = "quarantined", "stream_broken"


class ChaosConnection(Protocol):
    """A connection that is asked one question at a time."""

    @property
    def is_open(self) -> bool:
        """It can be asked."""
        ...

    async def ask(self, request: bytes, timeout_s: float, request_id: bytes = b"") -> TrialAnswer:
        """Send a whole request of `/predict`, and await its answer.

        Raises:
            NoAnswerError: There was none. The connection cannot be used any more.
        """
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


Open = Callable[[Address, Callable[[], None]], Awaitable[ChaosConnection]]
"""Opens a connection to a service; the second argument is called for each stray answer."""


def opener(
    protocol: CallKind, health: ServiceHealth, grpc_port: int, archives: Collection[str] = ()
) -> Open:
    """Return what opens connections of a protocol to a service with these models.

    `archives` are the names of those that are archives of TorchServe's.
    """
    if protocol == "predict":
        return connect
    ranks = {
        model.name: {spec.name: len(spec.instance_shape) for spec in specs_of(model)}
        for model in health.models
    }

    async def open_http(address: Address, on_stray: Callable[[], None]) -> ChaosConnection:
        connection = await connect(address, on_stray)
        if protocol in TEXT_FORMS:
            return _TextCalls(connection, TEXT_FORMS[protocol]())
        if protocol in SERVER_FORMS:
            return _ServerCalls(
                connection, SERVER_FORMS[protocol], archives if protocol == "torchserve" else ()
            )
        return _HttpCalls(connection, _V1() if protocol == "v1" else _V2(ranks))

    async def open_grpc(address: Address, on_stray: Callable[[], None]) -> ChaosConnection:
        return _GrpcCalls((address[0], grpc_port), ranks)

    return open_grpc if protocol == "grpc" else open_http


class _Asked(NamedTuple):
    """A request of `/predict`."""

    model: str
    parameters: Mapping[str, str]
    number: str
    headers: Mapping[str, str]
    content_type: str
    body: bytes


class _InferTensor(NamedTuple):
    """An input or output of version 2, with the batch first."""

    name: str
    datatype: str
    shape: Sequence[int]
    data: bytes
    content_type: str = ""


Ranks = Mapping[str, Mapping[str, int]]
"""The number of dimensions of each input of each model, without the batch."""


class _V1:
    """KServe's version 1: `/v1/models/NAME:predict`."""

    def request(self, asked: _Asked) -> bytes:
        """Return the same call in this protocol."""
        document = {"instances": _json_instances(asked), "parameters": asked.parameters}
        body = msgspec.json.encode(document)
        path = f"/v1/models/{asked.model}:predict"
        return post_request(path, body, "application/json", asked.headers)

    def predictions(self, asked: _Asked, answer: TrialAnswer) -> bytes:
        """Return the body of a success as `/predict` has it."""
        return answer.body


class _V2:
    """The Open Inference Protocol over HTTP, with binary tensors both ways."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def request(self, asked: _Asked) -> bytes:
        """Return the same call in this protocol."""
        tensors = _tensors_of(asked, self._ranks)
        inputs = [
            {
                "name": each.name,
                "datatype": each.datatype,
                "shape": each.shape,
                "parameters": {"binary_data_size": len(each.data)}
                | ({"content_type": each.content_type} if each.content_type else {}),
            }
            for each in tensors
        ]
        parameters = {**asked.parameters, "binary_data_output": True}
        document = {"id": asked.number, "inputs": inputs, "parameters": parameters}
        head = msgspec.json.encode(document)
        headers = {**asked.headers, _LENGTH.decode(): str(len(head))}
        body = b"".join((head, *(each.data for each in tensors)))
        path = f"/v2/models/{asked.model}/infer"
        return post_request(path, body, "application/octet-stream", headers)

    def predictions(self, asked: _Asked, answer: TrialAnswer) -> bytes:
        """Return the body of a success as `/predict` has it."""
        place = int(answer.header(_LENGTH))
        document = msgspec.json.decode(answer.body[:place])
        tensors = []
        for each in document["outputs"]:
            parameters = each["parameters"]
            end = place + parameters["binary_data_size"]
            content_type = parameters.get("content_type", "")
            data = answer.body[place:end]
            place = end
            tensors.append(
                _InferTensor(each["name"], each["datatype"], each["shape"], data, content_type)
            )
        if place != len(answer.body):
            raise ValueError(f"{len(answer.body) - place} bytes are left over")
        return _predictions(asked, document["id"], tensors)


class _OneConnection:
    """A connection to the service that calls of another protocol go over."""

    def __init__(self, connection: TrialConnection) -> None:
        self._connection = connection

    @property
    def is_open(self) -> bool:
        """It can be asked."""
        return self._connection.is_open

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class _HttpCalls(_OneConnection):
    """A connection for calls of another protocol over HTTP."""

    def __init__(self, connection: TrialConnection, form: _V1 | _V2) -> None:
        super().__init__(connection)
        self._form = form

    async def ask(self, request: bytes, timeout_s: float, request_id: bytes = b"") -> TrialAnswer:
        """Send the same call in the protocol, and return the answer as `/predict` has it."""
        asked = _asked_in(request)
        answer = await self._connection.ask(self._form.request(asked), timeout_s, request_id)
        if answer.status != 200:
            return _problem(asked, answer, str(problem_in(answer.body).get("code", "")))
        return _success(answer, lambda: self._form.predictions(asked, answer))


class _TextCalls(_OneConnection):
    """A connection for calls of a protocol of texts. Those with parameters go to `/predict`."""

    def __init__(self, connection: TrialConnection, form: TextForm) -> None:
        super().__init__(connection)
        self._form = form

    async def ask(self, request: bytes, timeout_s: float, request_id: bytes = b"") -> TrialAnswer:
        """Send the same call in the protocol, and return the answer as `/predict` has it."""
        asked = _asked_in(request)
        if asked.parameters:
            return await self._connection.ask(request, timeout_s, request_id)
        is_json = asked.content_type == "application/json"
        raw = _raw_instances(asked.body) if is_json else [msgspec.json.encode(asked.body.decode())]
        values = [msgspec.json.decode(bytes(each)) for each in raw]
        call = TextCall(asked.model, asked.number, dict(asked.headers), values)
        answer = await self._connection.ask(self._form.request(call), timeout_s, request_id)
        if answer.status == 200:
            return _success(
                answer,
                lambda: msgspec.json.encode(
                    {"predictions": self._form.predictions(call, answer.body)}
                ),
            )
        code, message = problem_of(answer.body)
        answer.body = msgspec.json.encode({"code": code, "detail": message})
        return _problem(asked, answer, code)


class _ServerCalls(_OneConnection):
    """A connection for calls of another server. Those with parameters go to `/predict`.

    The only instance of a call to one of the archives is sent without an envelope.
    """

    def __init__(
        self, connection: TrialConnection, form: ServerForm, archives: Collection[str]
    ) -> None:
        super().__init__(connection)
        self._form = form
        self._archives = archives

    async def ask(self, request: bytes, timeout_s: float, request_id: bytes = b"") -> TrialAnswer:
        """Send the same body as the server has it, and return the answer as `/predict` has it."""
        asked = _asked_in(request)
        body = asked.body
        if asked.model in self._archives and asked.content_type == "application/json":
            raw = _raw_instances(body)
            body = bytes(raw[0]) if len(raw) == 1 else b""
        if asked.parameters or not body:
            return await self._connection.ask(request, timeout_s, request_id)
        form = self._form
        headers = {**asked.headers, **form.headers_for(asked.model)}
        path = form.path.format(asked.model)
        whole = post_request(path, body, asked.content_type, headers)
        answer = await self._connection.ask(whole, timeout_s, request_id)
        if answer.status == 200:
            is_json = b"json" in answer.header(b"content-type")
            return _success(answer, lambda: form.predictions(answer.body, is_json=is_json))
        answer.status, code, message = form.problem(answer.status, answer.body)
        answer.body = msgspec.json.encode({"code": code, "detail": message})
        return _problem(asked, answer, code)


class _GrpcCalls:
    """A connection for `ModelInfer` over gRPC. Lives in the event loop."""

    def __init__(self, address: Address, ranks: Ranks) -> None:
        try:
            import grpc.aio
        except ImportError as error:
            raise TrialError(
                f"--protocol grpc: {error.name} is not installed: pip install 'inferpool[grpc]'"
            ) from None
        from inferpool.service.parts.open_inference.grpc.schema import INFERENCE, schema

        self.is_open = True
        self._ranks = ranks
        self._error = grpc.aio.AioRpcError
        self._request = schema().message(INFERENCE, "ModelInferRequest")
        options = [
            ("grpc.use_local_subchannel_pool", 1),  # a connection of its own
            ("grpc.enable_retries", 0),
            ("grpc.max_receive_message_length", -1),
        ]
        self._channel = grpc.aio.insecure_channel(f"{address[0]}:{address[1]}", options)
        self._call = self._channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            self._request.SerializeToString,
            schema().message(INFERENCE, "ModelInferResponse").FromString,
        )

    async def ask(self, request: bytes, timeout_s: float, request_id: bytes = b"") -> TrialAnswer:
        """Send the same call by gRPC, and return the answer as `/predict` has it.

        Raises:
            NoAnswerError: There was none. The connection cannot be used any more.
        """
        asked = _asked_in(request)
        metadata = [(name.lower(), value) for name, value in asked.headers.items()]
        call = self._call(self._message(asked), metadata=metadata)
        try:
            async with asyncio.timeout(timeout_s):
                response = await call
                trailing = await call.trailing_metadata()
        except TimeoutError:
            call.cancel()
            raise NoAnswerError(f"no answer in {timeout_s:.3g} s") from None
        except self._error as error:
            return self._failure(asked, error)
        tensors = [
            _InferTensor(
                each.name, each.datatype, each.shape, data,
                each.parameters["content_type"].string_param,
            )
            for each, data in zip(response.outputs, response.raw_output_contents, strict=True)
        ]  # fmt: skip
        answer = TrialAnswer(200, _head_of(trailing), b"")
        return _success(answer, lambda: _predictions(asked, response.id, tensors))

    def close(self) -> None:
        """Close the connection."""
        if self.is_open:
            self.is_open = False
            self._closing = asyncio.ensure_future(self._channel.close())

    def _message(self, asked: _Asked) -> Any:
        message = self._request(model_name=asked.model, id=asked.number)
        for name, value in asked.parameters.items():
            message.parameters[name].string_param = value
        for each in _tensors_of(asked, self._ranks):
            tensor = message.inputs.add(name=each.name, datatype=each.datatype, shape=each.shape)
            if each.content_type:
                tensor.parameters["content_type"].string_param = each.content_type
            message.raw_input_contents.append(each.data)
        return message

    def _failure(self, asked: _Asked, error: Any) -> TrialAnswer:
        head, message = _head_of(error.trailing_metadata()), error.details() or ""
        answer = TrialAnswer(_GRPC_STATUSES.get(error.code().name, 400), head, b"")
        if not answer.request_id:  # it is not of the service
            raise NoAnswerError(f"{error.code().name}: {message}")
        codes = (code for begin, code in _GRPC_CODES.items() if re.match(begin, message))
        code = next(codes, "model_error" if answer.status == 500 else "")
        if answer.status == 503 and not answer.header(b"retry-after"):
            code = "given_up"
        answer.body = msgspec.json.encode({"code": code, "detail": message})
        return _problem(asked, answer, code)


def _asked_in(request: bytes) -> _Asked:
    """Return what a whole request of `/predict` asks."""
    head, _, body = request.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    path, _, query = first.split(" ")[1].partition("?")
    number = headers["X-Request-ID"]
    passed = {name: value for name, value in headers.items() if name in _PASSED}
    model = path.removeprefix("/predict/")
    return _Asked(model, dict(parse_qsl(query)), number, passed, headers["Content-Type"], body)


def _raw_instances(body: bytes) -> Sequence[Raw]:
    """Return the instances of a body of JSON; one that has no such list is an instance itself."""
    try:
        return msgspec.json.decode(body, type=dict[str, list[Raw]])["instances"]
    except (msgspec.ValidationError, KeyError):
        return [Raw(body)]


def _json_instances(asked: _Asked) -> Sequence[object]:
    """Return the instances of a request as JSON has them."""
    if asked.content_type == "application/json":
        return _raw_instances(asked.body)
    if asked.content_type != "application/safetensors":
        return [{"b64": asked.body}]
    rows = {
        name: _values(_InferTensor(name, _DTYPES[each.dtype], each.shape, bytes(each.data)))
        for name, each in read_safetensors(asked.body).items()
    }
    return [next(iter(rows.values())) if len(rows) == 1 else rows]


def _tensors_of(asked: _Asked, ranks: Ranks) -> Sequence[_InferTensor]:
    """Return the inputs of a request in version 2."""
    if asked.content_type == "application/safetensors":
        own = ranks[asked.model]
        return [
            _InferTensor(
                name,
                _DTYPES[each.dtype],
                [1] * (len(each.shape) == own.get(name)) + list(each.shape),
                bytes(each.data),
            )
            for name, each in read_safetensors(asked.body).items()
        ]
    is_json = asked.content_type == "application/json"
    elements = [bytes(raw) for raw in _raw_instances(asked.body)] if is_json else [asked.body]
    data = b"".join(len(each).to_bytes(4, "little") + each for each in elements)
    return [_InferTensor("input", "BYTES", [len(elements), 1], data, asked.content_type)]


def _success(answer: TrialAnswer, predictions: Callable[[], bytes]) -> TrialAnswer:
    """Return an answer with its predictions; one that cannot be read says why, and is wrong."""
    try:
        body = predictions()
    except (ValueError, KeyError, TypeError) as error:
        body = msgspec.json.encode({"unreadable": repr(error)})
    return TrialAnswer(200, answer.head, body)


def _problem(asked: _Asked, answer: TrialAnswer, code: str) -> TrialAnswer:
    """Return an error as `/predict` has it."""
    if code == _QUARANTINED:
        answer.status = 422
    elif code == _STREAM_BROKEN:  # the parts before it are not shown
        broken = {"error": {"code": code}, "parts": []}
        is_json = asked.content_type == "application/json"
        num = len(_raw_instances(asked.body)) if is_json else 1
        body = msgspec.json.encode({"predictions": [broken] * num})
        return TrialAnswer(200, answer.head, body)
    return answer


def _head_of(metadata: Sequence[tuple[str, str]]) -> bytes:
    """Return metadata of gRPC as the head of an answer."""
    lines = (f"\r\n{name}: {value}" for name, value in metadata or ())
    return f"HTTP/2{''.join(lines)}".encode("latin-1")


def _predictions(asked: _Asked, id: str, tensors: Sequence[_InferTensor]) -> bytes:
    """Return the body that `/predict` would have: an entry for each row of the batch.

    Raises:
        ValueError: The answer has another id than its request, or cannot be read.
    """
    if id != asked.number:
        raise ValueError(f"the answer has the id {id!r}, not {asked.number!r}")
    values = {each.name: _values(each) for each in tensors}
    first = next(iter(values.values()))
    if len(tensors) == 1 and tensors[0].datatype == "BYTES":
        return msgspec.json.encode({"predictions": first})
    rows = [{name: value[row] for name, value in values.items()} for row in range(len(first))]
    return msgspec.json.encode({"predictions": rows})


def _values(tensor: _InferTensor) -> Any:
    """Return the values of a tensor in nested lists; for BYTES, a list of them.

    Raises:
        ValueError: Its bytes do not fit its shape.
    """
    if tensor.datatype == "BYTES":
        return _elements(tensor)
    if tensor.datatype == "BF16":  # the upper half of a float32
        array = (np.frombuffer(tensor.data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        array = np.frombuffer(tensor.data, _NUMPY[tensor.datatype])
    return array.reshape(tensor.shape).tolist()


def _elements(tensor: _InferTensor) -> list[object]:
    found: list[object] = []
    place = 0
    while place < len(tensor.data):
        begin = place + 4
        place = begin + int.from_bytes(tensor.data[place:begin], "little")
        element = tensor.data[begin:place]
        is_json = tensor.content_type == "application/json"
        is_text = tensor.content_type == "text/plain" or not tensor.content_type
        found.append(Raw(element) if is_json else element.decode() if is_text else element)
    if place != len(tensor.data) or len(found) != np.prod(tensor.shape):
        raise ValueError(f"{len(found)} elements for the shape {list(tensor.shape)}")
    return found
