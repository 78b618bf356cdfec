"""Calls of Text Embeddings Inference: how they are read and answered. Runs in the event loop.

Each stands at the root for the default model, and below `/tei/NAME` for any. At `/predict` the body
tells whose call it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from inferpool.service.api.codecs.answers import Outcome
from inferpool.service.api.codecs.body import Decoded, Limits
from inferpool.service.api.errors import Answer, problem
from inferpool.service.api.exchange import (
    DEFAULT_MODEL,
    Call,
    CallProtocol,
    Exchange,
    ModelEntry,
)
from inferpool.service.errors import ServiceError
from inferpool.service.parts.tei.answers import answer_of, error_answer
from inferpool.service.parts.tei.requests import (
    Reader,
    TeiRequest,
    has_inputs,
    parameters_of,
    read_any,
    read_decode,
    read_embed,
    read_embed_all,
    read_embed_sparse,
    read_predict,
    read_rerank,
    read_similarity,
    read_tokenize,
)
from inferpool.service.parts.texts.errors import error_of_input
from inferpool.service.queue.instance import Buffer, Result

_START = "/tei/"
_JSON_TYPES = (b"application/json", b"application/x-www-form-urlencoded", b"")
"""Content types of bodies of `/predict` that may be JSON; `curl -d` sends the second."""


class TeiProtocol(CallProtocol):
    """Calls to one of the paths. An object is shared by all calls whose body has not been read."""

    submits_in_turn = True

    def __init__(self, read: Reader) -> None:
        """Store what reads a body."""
        self._read = read

    def name_in(self, call: Call) -> str:
        """Return the key in `Predict.models` that a call asks for, or `DEFAULT_MODEL`."""
        if not call.path.startswith(_START):
            return DEFAULT_MODEL
        name = call.path.removeprefix(_START).rpartition("/")[0]
        return "" if name.startswith("/") else name

    def decode(
        self, exchange: Exchange, entry: ModelEntry, chunks: Sequence[Buffer]
    ) -> Decoded | None:
        """Read a whole body.

        Raises:
            ServiceError: It cannot be read, or does not fit the model.
        """
        asked = self._read(exchange, entry, chunks)
        kept = replace(asked, payloads=[])  # so that the call does not keep its body
        exchange.call.protocol = _ReadTeiProtocol(self._read, kept)
        return Decoded(asked.payloads, is_batch=True, parameters=parameters_of(asked))

    def reply(self, call: Call, outcomes: Sequence[Outcome]) -> Answer:
        """Never called: each call whose body has been read has a protocol of its own."""
        raise AssertionError("a call that has not been read cannot be answered")

    def problem(self, error: ServiceError, call: Call) -> Answer:
        """Render an error."""
        return error_answer(error, call)


class _ReadTeiProtocol(TeiProtocol):
    """A call whose body has been read."""

    def __init__(self, read: Reader, asked: TeiRequest) -> None:
        super().__init__(read)
        self._request = asked

    def reply(self, call: Call, outcomes: Sequence[Outcome]) -> Answer:
        """Render the outcomes of all instances of a call.

        Raises:
            ServiceError: One of them failed, or has another form than was asked for.
        """
        results: list[Result] = []
        asked = self._request
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, ServiceError):
                raise error_of_input(outcome, *asked.place_of(index))
            results.append(outcome)
        headers, body = answer_of(results, asked.render, asked.num_characters, call.started)
        return 200, headers, body


class SharedPredictProtocol(TeiProtocol):
    """Calls to `/predict`, which are ours unless their body has `inputs`."""

    def __init__(self) -> None:
        super().__init__(read_predict)

    def decode(
        self, exchange: Exchange, entry: ModelEntry, chunks: Sequence[Buffer]
    ) -> Decoded | None:
        """Read a whole body, as the one protocol has it or as the other.

        Raises:
            ServiceError: It cannot be read, or does not fit the model.
        """
        call = exchange.call
        if not _may_be_json(call.headers):
            return exchange.decode_as_own(entry, chunks, by_head=True)
        if not (entry.interface.envelope and _is_teis(chunks, exchange.predict.limits)):
            return exchange.decode_as_own(entry, chunks)
        call.protocol = _PREDICT
        return _PREDICT.decode(exchange, entry, chunks)

    def problem(self, error: ServiceError, call: Call) -> Answer:
        """Render an error of a call whose body has not been read, as without TEI."""
        return problem(error, call.request_id, call.path)


def _may_be_json(headers: Mapping[bytes, bytes]) -> bool:
    if b"x-tensor-dtype" in headers or b"x-tensor-shape" in headers:
        return False
    bare = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    return bare in _JSON_TYPES


def _is_teis(chunks: Sequence[Buffer], limits: Limits) -> bool:
    if sum(map(len, chunks)) > limits.max_json_bytes:
        return False  # ours says that it is too long
    return has_inputs(b"".join(chunks))


_PREDICT = TeiProtocol(read_predict)
embed = partial(TeiProtocol, read_embed)
embed_all = partial(TeiProtocol, read_embed_all)
embed_sparse = partial(TeiProtocol, read_embed_sparse)
similarity = partial(TeiProtocol, read_similarity)
rerank = partial(TeiProtocol, read_rerank)
predict = partial(TeiProtocol, read_predict)
tokenize = partial(TeiProtocol, read_tokenize)
decode = partial(TeiProtocol, read_decode)
any_task = partial(TeiProtocol, read_any)
