"""`POST /v1/rerank` and `/v2/rerank`, as Cohere's and Jina's APIs have them. In the event loop.

Sources: Cohere's API reference, "Rerank", versions 1 and 2, with the models of cohere-python 5.21
(`types/rerank_response.py`, `v2/types/v2rerank_response.py`); https://api.jina.ai/openapi.json. One
answer has the members of both; a client ignores those that it does not know.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Raw, UnsetType
from msgspec import Meta as Bounds

from inferpool.service.api.codecs.answers import Outcome
from inferpool.service.api.codecs.body import Decoded, Payload
from inferpool.service.api.errors import Answer
from inferpool.service.api.exchange import Call, Exchange, ModelEntry
from inferpool.service.errors import ServiceError, TooLargeError
from inferpool.service.parts.json_answers import json_answer
from inferpool.service.parts.texts.cohere import (
    Meta,
    Usage,
    cohere_error,
    meta_of,
    usage_of,
)
from inferpool.service.parts.texts.errors import ArgumentError
from inferpool.service.parts.texts.requests import (
    BodyProtocol,
    NamedRequest,
    answers_as,
    check_task,
    counted,
    items_of,
)
from inferpool.service.queue.instance import Buffer

MAX_DOCUMENTS = 1000
"""Most documents of one call: "we recommend a maximum of 1,000" (Cohere's API reference)."""
MAX_FIELDS = 16
"""Most members of documents to compare: those of 1,000 documents take 30 ms of the event loop."""
_MAX_NAME_BYTES = 256
"""Names of members are kept for later calls."""
_DOCUMENTS, _FIELDS = "documents", "rank_fields"
_QUOTE, _BRACE = 0x22, 0x7B
_NESTED = b"[{"
_NOTHING = Raw()
_NULL = Raw(b"null")
_scores = msgspec.json.Decoder(list[float])
_text = msgspec.json.Decoder(str)


class RerankRequest(NamedRequest, frozen=True, gc=False):
    """The body of a call."""

    query: Raw
    documents: Raw
    top_n: Annotated[int, Bounds(ge=0)] | None = None
    """The most results; 0 is all, as in vLLM: clients in Go send it if none is set."""
    return_documents: bool | None = None
    rank_fields: Raw = msgspec.field(default_factory=lambda: _NULL)  # no default in the schema
    """Members of documents that are objects; the text to compare has one line for each."""
    max_chunks_per_doc: Annotated[int, Bounds(ge=1)] | None = None
    """Accepted, and not used: a document is cut, and not split."""
    max_tokens_per_doc: Annotated[int, Bounds(ge=1)] | None = None
    """Accepted, and not used: a document is cut where the model has to."""
    truncation: bool | None = None
    """False refuses what is longer than the model can read (Jina)."""
    return_embeddings: bool | None = None
    """True is refused: there are only scores (Jina)."""
    raw_scores: bool | None = None
    """True: scores as the network computes them, of any size (infinity)."""
    user: str | None = None
    """Accepted, and not used."""
    priority: int | None = None
    """Accepted, and not used: `X-Priority` sets one."""

    def parameters(self) -> bytes:
        """Return the parameters for the model, as JSON."""
        given = {"truncate": self.truncation, "raw_scores": self.raw_scores}
        wanted = {name: value for name, value in given.items() if value is not None}
        return msgspec.json.encode({"count": True, **wanted})


class _UsualMembers(msgspec.Struct, frozen=True, gc=False):
    """The members of a document that are read if a call names no others."""

    text: Raw = _NULL
    image: Raw = _NULL


_usual = msgspec.json.Decoder(_UsualMembers)


class TextOfDocument(msgspec.Struct, frozen=True):
    """A document that came as a text."""

    text: Raw


class RankedDocument(msgspec.Struct, frozen=True):
    """A document's place in the call, and its score."""

    index: int
    relevance_score: float
    document: Raw | TextOfDocument | UnsetType = UNSET


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a call."""

    id: str
    model: str
    results: list[RankedDocument]
    """The best first; of equals, that which came first."""
    meta: Meta
    usage: Usage


class RerankProtocol(BodyProtocol[RerankRequest]):
    """Calls to order documents by how well they answer a query."""

    reader = msgspec.json.Decoder(RerankRequest)
    _documents: Sequence[memoryview] = ()
    """Those to show in the answer."""

    def decode(self, exchange: Exchange, entry: ModelEntry, chunks: Sequence[Buffer]) -> Decoded:
        """Make an instance of each document and the query.

        Raises:
            ArgumentError: An argument has another form, or the model ranks nothing.
            TooLargeError: There are too many documents for a query of this length.
        """
        check_task(exchange, entry, "reranking")
        exchange.call.ref.wants_tensors = False
        request = self.request
        if request.return_embeddings:
            raise ArgumentError("return_embeddings", "must be false: rerankers have only scores")
        query = _query_in(request.query)
        documents = items_of(request.documents, MAX_DOCUMENTS, _DOCUMENTS)
        most = exchange.predict.limits.max_body_bytes
        if len(query) * len(documents) > most:
            raise TooLargeError(
                f"query: its {len(query)} bytes with each of {len(documents)} documents are more "
                f"than {most} bytes (the setting max_body_bytes); send fewer documents at once"
            )
        start = b'{"query":%b,"text":' % query
        payloads = [
            Payload("json", (start, text, b"}"))
            for text in _texts_of(documents, _names_in(request.rank_fields))
        ]
        # Jina's API returns documents unless a call says no; those of Cohere and of infinity, only
        # if a call says yes. Readers of the latter two ignore them, and of the first need them.
        wants_documents = request.return_documents
        if wants_documents is None:
            wants_documents = exchange.call.path.startswith("/v1")
        self._documents = documents if wants_documents else ()
        self._request = msgspec.structs.replace(request, query=_NOTHING, documents=_NOTHING)
        return Decoded(payloads, True, request.parameters())

    def reply(self, call: Call, outcomes: Sequence[Outcome]) -> Answer:
        """Render the documents, the best first.

        Raises:
            ServiceError: A document failed, and so the call does.
        """
        assert call.entry is not None
        num_tokens, answers = counted(outcomes, _DOCUMENTS, is_list=True)
        scores = answers_as(_scores, answers)
        num_wanted = self.request.top_n or len(scores)
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[:num_wanted]
        documents = self._documents
        ranking = Ranking(
            id=call.request_id,
            model=call.entry.name,
            results=[
                RankedDocument(
                    index, scores[index], _shown(documents[index]) if documents else UNSET
                )
                for index in best
            ],
            meta=meta_of(call, num_tokens, _warnings(self.request, call.entry)),
            usage=usage_of(num_tokens),
        )
        return json_answer(msgspec.json.encode(ranking))

    def problem(self, error: ServiceError, call: Call) -> Answer:
        """Render an error."""
        return cohere_error(error, call)


def _query_in(given: Raw) -> bytes:
    """Return the query as JSON.

    Raises:
        ArgumentError: It is no text, or empty.
    """
    query = bytes(given)
    if query[0] != _QUOTE:
        raise ArgumentError("query", "must be a text")
    if len(query) == 2:
        raise ArgumentError("query", "is an empty text")
    return query


def _names_in(given: Raw) -> tuple[str, ...]:
    """Return the members of documents that make their text; empty for the usual one.

    Raises:
        ArgumentError: They are no list of names, or too many.
    """
    if given == _NULL:
        return ()
    names: dict[str, None] = {}  # a text has a member once, however often it is named
    for index, item in enumerate(items_of(given, MAX_FIELDS, _FIELDS)):
        place = f"{_FIELDS}[{index}]"
        if item[0] != _QUOTE:
            raise ArgumentError(_FIELDS, "must be the name of a member", place=place)
        if len(item) > _MAX_NAME_BYTES:
            what = f"has more than {_MAX_NAME_BYTES} bytes"
            raise ArgumentError(_FIELDS, what, place=place)
        if b"\\" in bytes(item):
            raise ArgumentError(_FIELDS, "must have no backslash", place=place)
        names[_text.decode(item)] = None
    return tuple(names)


def _texts_of(documents: Sequence[memoryview], names: tuple[str, ...]) -> Iterator[Buffer]:
    """Yield the text of each document, as JSON.

    Raises:
        ArgumentError: A document has none.
    """
    for index, document in enumerate(documents):
        place = f"{_DOCUMENTS}[{index}]"
        if document[0] == _QUOTE:
            yield document
        elif document[0] != _BRACE:
            raise ArgumentError(_DOCUMENTS, 'must be a text, or an object with "text"', place=place)
        elif names:
            yield _lines_of(document, names, place)
        else:
            yield _text_of(document, place)


def _text_of(document: memoryview, place: str) -> Buffer:
    members = _usual.decode(document)
    text = memoryview(members.text)
    if text[0] == _QUOTE:
        return text
    what = 'has no "text"; give it one, or name other members in rank_fields'
    if members.image != _NULL:
        what = "is a picture; only texts are ranked here"
    raise ArgumentError(_DOCUMENTS, what, place=place)


def _lines_of(document: memoryview, names: tuple[str, ...], place: str) -> Buffer:
    """Return a line "name: value" for each member that is there (as YAML, in Cohere's words)."""
    lines = []
    values = msgspec.structs.astuple(_named(names).decode(document))
    for name, value in zip(names, values, strict=True):
        if value == _NULL:
            continue
        raw = memoryview(value)
        if raw[0] in _NESTED:
            what = "must be a text or a number"
            raise ArgumentError(_DOCUMENTS, what, place=f"{place}.{name[:80]}")
        shown = _text.decode(raw) if raw[0] == _QUOTE else bytes(raw).decode()
        lines.append(f"{name}: {shown}")
    if not lines:
        raise ArgumentError(_DOCUMENTS, "has none of the members in rank_fields", place=place)
    return msgspec.json.encode("\n".join(lines))


@lru_cache(maxsize=16)
def _named(names: tuple[str, ...]) -> "msgspec.json.Decoder[Any]":
    """Return a decoder for some members of an object: a client may send a million others."""
    fields = [(f"m{index}", Raw, _NULL) for index in range(len(names))]
    places = {f"m{index}": name for index, name in enumerate(names)}
    return msgspec.json.Decoder(msgspec.defstruct("Named", fields, rename=places))


def _shown(document: memoryview) -> Raw | TextOfDocument:
    """Return a document as it came; a text becomes an object."""
    raw = Raw(document)
    return TextOfDocument(raw) if document[0] == _QUOTE else raw


def _warnings(request: RerankRequest, entry: ModelEntry) -> list[str]:
    """Return what the call asked for and did not get."""
    warnings, facts = [], entry.interface.text
    if (request.max_chunks_per_doc or 1) > 1:
        warnings.append("max_chunks_per_doc: long documents are cut, and not split")
    most = request.max_tokens_per_doc
    if most is not None and facts is not None and most < facts.max_tokens:
        warnings.append(
            f"max_tokens_per_doc: documents are cut where they and the query have "
            f"{facts.max_tokens} tokens"
        )
    return warnings
