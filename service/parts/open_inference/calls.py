"""`POST /v2/models/{model}/infer`: how such a call is read and answered. Runs in the event loop."""

import asyncio
from collections.abc import Sequence

import msgspec

from inferpool.service.api.codecs.answers import Outcome
from inferpool.service.api.codecs.body import Decoded
from inferpool.service.api.errors import Answer, kind_of, problem
from inferpool.service.api.exchange import Call, CallProtocol, Exchange, ModelEntry
from inferpool.service.errors import BadRequestError, ServiceError
from inferpool.service.parts.open_inference.answers import encode_answer
from inferpool.service.parts.open_inference.known import KnownRequests
from inferpool.service.parts.open_inference.requests import (
    RAW_REQUEST,
    header_length,
    read_raw,
    read_request,
)
from inferpool.service.parts.open_inference.tensors import (
    decode_request,
    outputs_of,
    set_options,
    wants_tensors,
)
from inferpool.service.parts.open_inference.values import InferRequest
from inferpool.service.queue.instance import Buffer

_START, _END = "/v2/models/", "/infer"
_SHOWN_AS_400 = (406, 422)
"""Statuses that the protocol has no use for: it knows 400 alone for what a client sent."""

_HEADERS = {b"content-type": b"application/json", b"accept-encoding": b"gzip, deflate"}
"""Headers of a problem that differ from those of `/predict`."""


class InferProtocol(CallProtocol):
    """Calls of the Open Inference Protocol over HTTP.

    One object is shared by all calls whose body has not been read, or has no JSON; each other call
    gets one of its own, which knows the request.
    """

    _request = RAW_REQUEST

    def __init__(self, *, is_inflated: bool = False) -> None:
        """Know nothing of a call. `is_inflated`: its body has lost its encoding."""
        self._is_inflated = is_inflated
        self._known = KnownRequests()

    def name_in(self, call: Call) -> str:
        """Return the key in `Predict.models` that a call asks for: a name, maybe with a version."""
        name = call.path.removeprefix(_START).removesuffix(_END)
        return "" if name.startswith("/") else name

    def decode(
        self, exchange: Exchange, entry: ModelEntry, chunks: Sequence[Buffer]
    ) -> Decoded | None:
        """Read a whole body. None: it is inflated in a thread, and then comes again.

        Raises:
            ServiceError: It cannot be read, or does not fit the model.
        """
        call, limits = exchange.call, exchange.predict.limits
        is_encoded = b"content-encoding" in call.headers
        if is_encoded and not self._is_inflated:
            inflated = _inflate(exchange, chunks)
            if inflated is None:
                return None
            chunks = inflated
        text_bytes = header_length(call.headers)
        if known := self._known.find(text_bytes, chunks, entry):
            assert text_bytes is not None
            decoded, asked = known.decoded(text_bytes, chunks), known.asked
            set_options(asked.parameters, call, limits)
            call.ref.wants_tensors = wants_tensors(entry, is_bytes=False)
        elif text_bytes == 0:
            request = RAW_REQUEST._replace(inputs=[read_raw(chunks, entry)])
            decoded = decode_request(request, entry, call, limits)
            return _as_whole(decoded, entry, call, is_encoded=is_encoded)
        else:
            request = read_request(chunks, call.headers, limits)
            decoded = decode_request(request, entry, call, limits)
            self._known.remember(text_bytes, chunks, entry, request, decoded)
            asked = request._replace(inputs=())  # nobody needs the body any more
        call.protocol = _AskedFor(asked)
        return decoded

    def reply(self, call: Call, outcomes: Sequence[Outcome]) -> Answer:
        """Render the outcomes of all instances of a call.

        Raises:
            ServiceError: One of them failed, or the answer has no form that was asked for.
        """
        assert call.entry is not None
        outputs = outputs_of(self._request, call.entry, outcomes)
        headers, body = encode_answer(self._request, call.entry, outputs)
        accept = call.headers.get(b"accept-encoding")
        if accept is not None:
            from inferpool.service.parts.open_inference.encodings import deflated

            headers, body = deflated(headers, body, accept)
        return 200, [*headers, (b"content-length", b"%d" % len(body))], body

    def problem(self, error: ServiceError, call: Call) -> Answer:
        """Render an error."""
        return error_answer(error, call)


class _AskedFor(InferProtocol):
    """A call whose request is known."""

    def __init__(self, request: InferRequest) -> None:
        self._request = request


class _BrokenBody(InferProtocol):
    """A call whose body could not be inflated."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def decode(
        self, exchange: Exchange, entry: ModelEntry, chunks: Sequence[Buffer]
    ) -> Decoded | None:
        raise self._error


def error_answer(error: ServiceError, call: Call) -> Answer:
    """Render an error: a problem document, which has a string `error`, as all clients need.

    Its type is plain JSON: KServe's client shows the message of no other type.
    """
    shown = error
    if kind_of(error).status in _SHOWN_AS_400:
        shown = BadRequestError(error.message)
        shown.code = error.code
    status, headers, body = problem(shown, call.request_id, call.path)
    return status, [(name, _HEADERS.get(name, value)) for name, value in headers], body


def _as_whole(decoded: Decoded, entry: ModelEntry, call: Call, *, is_encoded: bool) -> Decoded:
    """Return a body without JSON so that another body like it need not be read."""
    (payload,) = decoded.payloads
    is_checked = any(header.dtype == "bool" for header in payload.headers)
    is_known = payload.kind == "tensors" or bool(entry.interface.accepts)
    is_whole = is_known and not (is_encoded or is_checked)
    if is_whole and call.earlier is not None:
        call.earlier.ref.wants_tensors = call.ref.wants_tensors
    return msgspec.structs.replace(decoded, is_whole=is_whole)


def _inflate(exchange: Exchange, chunks: Sequence[Buffer]) -> Sequence[Buffer] | None:
    """Inflate a small body. None: a thread does it, and submits the call again.

    Raises:
        ServiceError: It cannot be inflated, or there is no room for it.
    """
    from inferpool.service.parts.open_inference.encodings import (
        SMALL_BYTES,
        Inflation,
        encoding_of,
        inflaters,
    )

    call, limits = exchange.call, exchange.predict.limits
    encoding = encoding_of(call.headers)
    if not encoding:
        return chunks
    inflation = Inflation(encoding, chunks, limits.max_body_bytes)
    if exchange.num_bytes <= SMALL_BYTES and (body := inflation.run(SMALL_BYTES)) is not None:
        return body
    # Bodies that wait for a thread are bounded in sum by what they may become, so that none waits
    # long for those that a client has made small.
    exchange.num_bytes = inflation.expected_bytes
    exchange.count()
    if exchange.response_complete:
        return None
    loop = asyncio.get_running_loop()

    def resume(done: "asyncio.Future[list[bytes] | None]") -> None:
        if done.cancelled():
            inflation.stop()
            return
        error = done.exception()
        if exchange.response_complete:
            return
        call.outcomes.clear()
        if error is None:
            call.protocol = InferProtocol(is_inflated=True)
            exchange.submit(done.result() or (b"",))
        else:
            call.protocol = _BrokenBody(error)
            exchange.submit((b"",))

    future = loop.run_in_executor(inflaters(), inflation.run)
    future.add_done_callback(resume)
    call.outcomes.append(future)  # type: ignore[arg-type]  # so it is cancelled with the call
    return None
