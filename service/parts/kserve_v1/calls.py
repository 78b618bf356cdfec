"""`POST /v1/models/{model}:predict`: how a call is read and answered. Runs in the event loop.

Sources: KServe's "V1 Inference Protocol" and TensorFlow Serving's "RESTful API", which it is a part
of. Their `instances`, `parameters` and `{"b64": "..."}` are those of our own JSON.
"""

from collections.abc import Sequence
from copy import copy
from functools import lru_cache

import msgspec
from msgspec import Raw

from inferpool.models.attached import attached
from inferpool.models.json_errors import BYTE_ORDER_MARK, JsonErrors, json_message
from inferpool.models.spec import Interface
from inferpool.service.api.codecs.answers import Outcome, encode_json
from inferpool.service.api.codecs.body import BodyContext, Decoded, Payload
from inferpool.service.api.codecs.json import decode_json
from inferpool.service.api.codecs.requests import check_encoding
from inferpool.service.api.errors import Answer
from inferpool.service.api.exchange import Call, CallProtocol, Exchange, ModelEntry
from inferpool.service.errors import BadRequestError, InvalidInputError, ServiceError
from inferpool.service.parts.json_answers import error_with, status_of
from inferpool.service.queue.instance import Buffer

_START, _END = "/v1/models/", ":predict"
_NOTHING = Raw()
_ONLY_SIGNATURE = "serving_default"


class _RowsAndMore(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A body with members that our own form does not have."""

    instances: Raw = _NOTHING
    parameters: Raw = _NOTHING
    inputs: Raw = _NOTHING
    signature_name: str | None = None


_rows_and_more = msgspec.json.Decoder(_RowsAndMore)


class PredictProtocolV1(CallProtocol):
    """Calls of version 1 of the protocol. Has no state."""

    def name_in(self, call: Call) -> str:
        """Return the key in `Predict.models` that a call asks for."""
        return call.path[len(_START) : -len(_END)]

    def decode(self, exchange: Exchange, entry: ModelEntry, chunks: Sequence[Buffer]) -> Decoded:
        """Read a whole body; as JSON whatever its type is, since clients send any or none.

        Raises:
            BadRequestError: It is not JSON.
            InvalidInputError: It is JSON of another form.
            TooLargeError: It is too long, or has too many instances or too long parameters.
            UnsupportedTypeError: It is compressed.
        """
        call, limits = exchange.call, exchange.predict.limits
        check_encoding(call.headers)
        call.ref.wants_tensors = False
        interface = entry.interface
        head = BodyContext(
            call.headers, call.query, entry.inputs, limits, _with_envelope(interface)
        )
        text = b"".join(chunks).removeprefix(BYTE_ORDER_MARK)
        decoded = decode_json([_as_ours(text, limits.max_json_bytes)], head)
        if interface.envelope:
            return decoded
        payloads = [_as_document(each) for each in decoded.payloads]
        return msgspec.structs.replace(decoded, payloads=payloads)

    def reply(self, call: Call, outcomes: Sequence[Outcome]) -> Answer:
        """Render the predictions, or the first error: their list has no place for one."""
        values = []
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, ServiceError):
                place = f"instances[{index}]"
                error = copy(outcome)  # the instances of other calls may have the same one
                if len(outcomes) > 1 and not error.message.startswith(place):
                    error.message = f"{place}: {error.message}"
                return error_answer(error, call)
            value = outcome.value
            values.append(value if isinstance(value, bytes) else attached("content in JSON")(value))
        return encode_json(values)

    def problem(self, error: ServiceError, call: Call) -> Answer:
        """Render an error."""
        return error_answer(error, call)


def error_answer(error: ServiceError, call: Call) -> Answer:
    """Render an error as KServe does, so that its client shows the message.

    The status is ours, but 400 for each input that does not fit.
    """
    document = {"error": error.message, "code": error.code, "request_id": call.request_id}
    return error_with(document, error, call, status_of(error))


@lru_cache(maxsize=64)
def _with_envelope(interface: Interface) -> Interface:
    return msgspec.structs.replace(interface, envelope=True)


def _as_document(payload: Payload) -> Payload:
    """Return an instance as a model without an envelope gets it."""
    is_json = payload.kind in ("json", "fields")
    return Payload("document", payload.chunks) if is_json else payload


def _as_ours(text: bytes, most_bytes: int) -> bytes:
    """Return a body without the members that our own form does not have.

    Raises:
        BadRequestError: It is not JSON.
        InvalidInputError: It is by column, or asks for a signature that there is not.
    """
    if len(text) > most_bytes or not (b'"signature_name"' in text or b'"inputs"' in text):
        return text
    try:
        body = _rows_and_more.decode(text)
    except msgspec.ValidationError:
        return text  # `decode_json` says what is wrong
    except JsonErrors as error:
        raise BadRequestError(f"the body: {json_message(error, text)}") from None
    if body.inputs != _NOTHING:
        raise InvalidInputError(
            'inputs: the form by column is not read here; send "instances": a list of rows'
        )
    if body.signature_name not in (None, _ONLY_SIGNATURE):
        raise InvalidInputError(
            f"signature_name: models here have the signature {_ONLY_SIGNATURE!r} alone"
        )
    members = [(b"instances", body.instances), (b"parameters", body.parameters)]
    return b"{%b}" % b",".join(
        b'"%b":%b' % (name, bytes(value)) for name, value in members if value != _NOTHING
    )
