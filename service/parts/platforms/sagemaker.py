"""Calls as SageMaker makes them of a container: how they are read and answered. In the event loop.

Sources: AWS, "Use Your Own Inference Code with Hosting Services" and "Custom Containers Contract
for Multi-Model Endpoints"; errors are those of multi-model-server.
"""

import hashlib
from collections.abc import Mapping, Sequence
from copy import copy
from functools import lru_cache
from typing import Literal

import msgspec

from inferpool.models.attached import attached, protocol_at
from inferpool.service.api.codecs.answers import (
    JSON_TYPE,
    Outcome,
    encode_json,
    negotiate,
)
from inferpool.service.api.codecs.body import BodyContext, Decoded
from inferpool.service.api.codecs.requests import check_encoding, decode
from inferpool.service.api.errors import Answer
from inferpool.service.api.exchange import (
    DEFAULT_MODEL,
    Call,
    CallProtocol,
    Exchange,
    ModelEntry,
)
from inferpool.service.api.optional_calls import CALLS_BY_SETTING
from inferpool.service.errors import (
    NotAcceptableError,
    ServiceError,
    UnknownModelError,
    UnsupportedTypeError,
    VersionRefusedError,
)
from inferpool.service.parts.json_answers import error_with, status_of
from inferpool.service.parts.platforms.rows import (
    csv_of,
    decode_any_json,
    decode_csv,
    decode_lines,
)
from inferpool.service.queue.instance import Buffer, Result
from inferpool.service.settings.model import MODEL_NAME
from inferpool.workers.shared.messages import ContentBlob

_Form = Literal["json", "lines", "csv", "npy"]
_FORMS: Mapping[bytes, _Form] = {
    JSON_TYPE: "json",
    b"text/csv": "csv",
    b"application/jsonlines": "lines",
    b"application/x-jsonlines": "lines",
    b"application/x-ndjson": "lines",
    b"application/x-npy": "npy",
}
"""Types of answers, in our order of preference."""
_LINES = frozenset(each for each, form in _FORMS.items() if form == "lines")
_UNTYPED = (b"", b"application/x-www-form-urlencoded")
"""Types of bodies for which no client has chosen one; `curl -d` sends the second."""
_START, _END = "/models/", "/invoke"
_OF_HANDLERS = "/predictions/*"
"""A path of the protocol for archives of TorchServe's."""
_TARGET = b"x-amzn-sagemaker-target-model"
_ATTRIBUTES = b"x-amzn-sagemaker-custom-attributes"
_MAX_ATTRIBUTES = 1024
"""The most characters (AWS, "InvokeEndpoint")."""
_ERROR_TYPES = {
    400: "BadRequestException",
    404: "ResourceNotFoundException",
    405: "MethodNotAllowedException",
    409: "ConflictStatusException",
    500: "InternalServerException",
    503: "ServiceUnavailableException",
    507: "InsufficientStorageException",
}
_MOST_SHOWN = 80
"""Characters of a model's name in an error."""
_NO_ROOM = 507
"""SageMaker unloads other models then, and tries again."""


class InvocationProtocol(CallProtocol):
    """Calls whose body has not been read. Has no state."""

    submits_in_turn = True

    def has_path(self, path: str) -> bool:
        """Return whether a path is one of SageMaker's, where a model is a single segment."""
        return "/" not in path[len(_START) : -len(_END)]

    def name_in(self, call: Call) -> str:
        """Return the key in `Predict.models` that a call asks for."""
        asked = _asked_by(call)
        return DEFAULT_MODEL if asked is None else served_name(asked)

    def decode(
        self, exchange: Exchange, entry: ModelEntry, chunks: Sequence[Buffer]
    ) -> Decoded | None:
        """Read a whole body.

        Raises:
            ServiceError: It cannot be read, or does not fit the model.
        """
        call = exchange.call
        call.earlier = None  # bodies under the same head may be of other forms
        if entry.interface.archive is not None:
            return _decode_for_handler(exchange, entry, chunks)
        check_encoding(call.headers)
        content_type = call.headers.get(b"content-type", b"")
        bare = content_type.partition(b";")[0].strip().lower()
        form = _form_of(call, entry, "lines" if bare in _LINES else "json")
        call.ref.wants_tensors = form == "npy"
        call.ref.wants_content = form == "content"
        limits = exchange.predict.limits
        head = BodyContext(call.headers, call.query, entry.inputs, limits, entry.interface)
        pieces = list(map(bytes, chunks))
        has_envelope = False
        if bare in _LINES:
            decoded = decode_lines(pieces, head)
        elif bare == b"text/csv":
            decoded = decode_csv(content_type, pieces, head)
        elif bare == JSON_TYPE or (bare in _UNTYPED and pieces[0].lstrip()[:1] in (b"[", b"{")):
            decoded, has_envelope = decode_any_json(pieces, head)
        else:
            decoded = decode(content_type, pieces, head)
        call.protocol = _ReadInvocation(form, decoded.is_batch, has_envelope)
        return msgspec.structs.replace(decoded, is_whole=False)

    def reply(self, call: Call, outcomes: Sequence[Outcome]) -> Answer:
        """Never called: each call whose body has been read has a protocol of its own."""
        raise AssertionError("a call that has not been read cannot be answered")

    def problem(self, error: ServiceError, call: Call) -> Answer:
        """Render an error."""
        return error_answer(error, call)


class _ReadInvocation(InvocationProtocol):
    """A call whose body has been read."""

    def __init__(self, form: str, is_batch: bool, has_envelope: bool) -> None:
        self._form = form
        self._is_batch = is_batch
        self._has_envelope = has_envelope

    def reply(self, call: Call, outcomes: Sequence[Outcome]) -> Answer:
        """Render the outcomes of all instances of a call, or the first error.

        Raises:
            ServiceError: An instance failed, or the form cannot hold the answer.
        """
        results: list[Result] = []
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, ServiceError):
                raise outcome if len(outcomes) == 1 else _of_instance(outcome, index)
            results.append(outcome)
        status, headers, body = self._rendered(results)
        return status, [*headers, *_attributes_of(call)], body

    def _rendered(self, results: Sequence[Result]) -> Answer:
        if self._form == "npy":
            headers, body = attached("answers of tensors")("npy", results, self._is_batch, None)
            return 200, [*headers, _length_of(body)], body
        first = results[0].value
        if isinstance(first, ContentBlob) and not self._is_batch and self._form != "lines":
            body = bytes(first.buffer)
            return 200, [(b"content-type", first.media_type.encode()), _length_of(body)], body
        values = [attached("content in JSON")(each.value) for each in results]
        if self._form in ("json", "content"):
            return encode_json(values, envelope=self._has_envelope, is_batch=self._is_batch)
        if self._form == "lines":
            media_type, body = b"application/jsonlines", b"".join(b"%b\n" % each for each in values)
        else:
            media_type, body = b"text/csv", csv_of(values, is_batch=self._is_batch)
        return 200, [(b"content-type", media_type), _length_of(body)], body


class _HandlerInvocation(InvocationProtocol):
    """A call to an archive of TorchServe's, which is as in TorchServe but for its errors."""

    def __init__(self, theirs: CallProtocol) -> None:
        self._theirs = theirs

    def reply(self, call: Call, outcomes: Sequence[Outcome]) -> Answer:
        """Render the answer of the handler."""
        status, headers, body = self._theirs.reply(call, outcomes)
        there = {name.lower() for name, _ in headers}
        more = [each for each in _attributes_of(call) if each[0] not in there]
        return status, [*headers, *more], body

    def first_piece(self, part: bytes) -> Answer:
        """Return status, headers and first bytes of an answer in parts."""
        return self._theirs.first_piece(part)

    def next_piece(self, part: bytes) -> bytes:
        """Return the bytes of a later part."""
        return self._theirs.next_piece(part)


@lru_cache(maxsize=1024)
def served_name(name: str) -> str:
    """Return our name of a model; SageMaker's may be of any form."""
    if MODEL_NAME.fullmatch(name):
        return name
    return f"m-{hashlib.sha256(name.encode()).hexdigest()[:24]}"


def error_answer(error: ServiceError, call: Call) -> Answer:
    """Render an error. The status is ours, but 400 for each input that does not fit."""
    status = status_of(error)
    if isinstance(error, VersionRefusedError) and "free_bytes" in (error.figures or {}):
        status = _NO_ROOM
    kind = _ERROR_TYPES.get(status, _ERROR_TYPES[500 if status >= 500 else 400])
    message = error.message
    if isinstance(error, UnknownModelError):
        kind = "ModelNotFoundException"
        if (asked := _asked_by(call)) is not None:
            message = message.replace(served_name(asked), asked[:_MOST_SHOWN])
    if isinstance(error, UnsupportedTypeError):
        kind = "UnsupportedMediaTypeException"
    document = {"code": status, "type": kind, "message": message}
    return error_with(document, error, call, status)


def _asked_by(call: Call) -> str | None:
    """Return SageMaker's name of the model that a call asks for; None if it names none."""
    if call.path.startswith(_START) and call.path.endswith(_END):
        return call.path[len(_START) : -len(_END)]
    target = call.headers.get(_TARGET)
    if target is None:
        return None
    return target.decode("latin-1").strip().strip("/").removesuffix(".tar.gz")


def _form_of(call: Call, entry: ModelEntry, default: _Form) -> str:
    """Return the form of the answer that a call asks for.

    Raises:
        NotAcceptableError: The model has none of those that it allows.
    """
    accept = call.headers.get(b"accept", b"").strip() or b"*/*"
    if accept == b"*/*":
        return default
    try:
        return _negotiated(accept)
    except NotAcceptableError:
        if entry.interface.media_types == ():
            raise
    return attached("choice of content")(accept, entry.interface.media_types)  # type: ignore[no-any-return]


@lru_cache(maxsize=256)
def _negotiated(accept: bytes) -> _Form:
    return negotiate(accept, _FORMS)


def _decode_for_handler(
    exchange: Exchange, entry: ModelEntry, chunks: Sequence[Buffer]
) -> Decoded | None:
    """Read a body as TorchServe does, whose containers answer so on SageMaker."""
    call = exchange.call
    theirs: CallProtocol | None = protocol_at(_OF_HANDLERS, [CALLS_BY_SETTING["torchserve"]])
    assert theirs is not None
    call.protocol = theirs
    decoded = theirs.decode(exchange, entry, chunks)
    call.protocol = _HandlerInvocation(call.protocol)
    return decoded


def _of_instance(error: ServiceError, index: int) -> ServiceError:
    place = f"instances[{index}]"
    if not error.message.startswith(place):
        error = copy(error)  # the instances of other calls may have the same one
        error.message = f"{place}: {error.message}"
    return error


def _attributes_of(call: Call) -> list[tuple[bytes, bytes]]:
    """Return the header that a client may give a call to find its answer by."""
    value = call.headers.get(_ATTRIBUTES, b"")
    is_fit = len(value) <= _MAX_ATTRIBUTES and value.isascii() and value.decode().isprintable()
    return [(_ATTRIBUTES, value)] if value and is_fit else []


def _length_of(body: bytes) -> tuple[bytes, bytes]:
    return b"content-length", b"%d" % len(body)
