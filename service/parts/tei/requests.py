"""Bodies of Text Embeddings Inference, read into instances of our models. Runs in the event loop.

Members, their defaults and the words of errors are those of TEI's router (`router/src/http` and
`core/src/infer.rs` of huggingface/text-embeddings-inference, commit 0d124dc). As there, members
that nobody knows are ignored.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import Raw

from inferpool.models.json_errors import BYTE_ORDER_MARK, JsonErrors, json_message
from inferpool.models.spec import TextFacts
from inferpool.service.api.codecs.body import Payload
from inferpool.service.api.codecs.parameters import merge
from inferpool.service.api.exchange import Exchange, ModelEntry
from inferpool.service.errors import (
    BadRequestError,
    InvalidInputError,
    TooLargeError,
    UnavailableError,
)
from inferpool.service.parts.tei.answers import (
    ONLY_LABEL,
    EmptyInputsError,
    Render,
    WrongTaskError,
    cosines,
    first_of,
    list_of,
    predictions,
    ranks_of,
)
from inferpool.service.parts.texts.classify import MAX_SCORES
from inferpool.service.parts.texts.errors import ArgumentError
from inferpool.service.parts.texts.requests import items_of, read_json
from inferpool.service.queue.instance import Buffer

_NOTHING = Raw()
_EMPTY = "`inputs` cannot be empty"
_MOST_NUMBERS = 1 << 21
"""Numbers in an answer of /embed_all: 42 MB of JSON, and 50 ms of the event loop."""
_MOST_TOKENIZED = 1 << 18
"""Characters of a call to /tokenize: each may be a token, and so 70 bytes of JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeiRequest:
    """The body of a call."""

    payloads: list[Payload]
    """The instances for the model, which answers each."""
    parameters: Mapping[str, object]
    """The parameters of all instances; None leaves one out."""
    render: Render
    """Renders the body of the answer from those of the model."""
    num_characters: int | None = None
    """Characters of all texts; None if the answer does not tell them."""
    is_list: bool = True
    """The instances came as a list, and not as the only one."""
    place: str = "inputs"
    """The member that they came from, for messages."""
    first: str | None = None
    """The member that the first of them came from, if that is another one."""

    def place_of(self, index: int) -> tuple[str, int | None]:
        """Return the member that an instance came from, and its place there if it is a list."""
        if self.first is not None:
            return (self.place, index - 1) if index else (self.first, None)
        return self.place, index if self.is_list else None


class _Options(msgspec.Struct, gc=False):
    truncate: bool | None = None
    truncation_direction: Literal["Left", "left", "Right", "right"] = "Right"
    prompt_name: str | None = None


class _EmbedRequest(_Options, gc=False, kw_only=True):
    inputs: Raw
    normalize: bool | None = None
    dimensions: int | None = None


class _InputsRequest(_Options, gc=False, kw_only=True):
    inputs: Raw
    raw_scores: bool | None = None
    add_special_tokens: bool | None = None


class _RerankRequest(_Options, gc=False, kw_only=True):
    query: str
    texts: Raw
    raw_scores: bool | None = None
    return_text: bool | None = None


class _Sentences(msgspec.Struct, gc=False):
    source_sentence: str
    sentences: Raw


class _SimilarityRequest(msgspec.Struct, gc=False):
    inputs: _Sentences
    parameters: _Options | None = None


class _DecodeRequest(msgspec.Struct, gc=False):
    ids: Raw
    skip_special_tokens: bool | None = None


class _Keys(msgspec.Struct, gc=False):
    inputs: Raw = _NOTHING
    instances: Raw = _NOTHING


_OUR_START = re.compile(rb'\s*\{\s*"instances"')
"""The start of most bodies that are ours; they need not be searched."""
_SECOND = re.compile(rb".[ \t\r\n]*(.)", re.DOTALL)
_embed = msgspec.json.Decoder(_EmbedRequest)
_inputs = msgspec.json.Decoder(_InputsRequest)
_rerank = msgspec.json.Decoder(_RerankRequest)
_similarity = msgspec.json.Decoder(_SimilarityRequest)
_decode = msgspec.json.Decoder(_DecodeRequest)
_keys = msgspec.json.Decoder(_Keys)
_string = msgspec.json.Decoder(str)

Reader = Callable[[Exchange, ModelEntry, Sequence[Buffer]], TeiRequest]
"""Reads a whole body. It raises a `ServiceError` for one that cannot be read, or does not fit."""


def has_inputs(text: bytes) -> bool:
    """Return whether a body has the member `inputs`, and no `instances` beside it.

    A member whose name is written with escapes is not found.
    """
    text = text.removeprefix(BYTE_ORDER_MARK)
    if _OUR_START.match(text) or b'"inputs"' not in text:
        return False
    try:
        body = _keys.decode(text)
    except JsonErrors:
        return False
    return body.inputs != _NOTHING and body.instances == _NOTHING


def read_embed(exchange: Exchange, entry: ModelEntry, chunks: Sequence[Buffer]) -> TeiRequest:
    """Read a call to /embed: the vector of each text."""
    body = read_json(exchange, chunks, _embed)
    facts = _facts(entry, "embedding", "Model is not an embedding model")
    if body.dimensions is not None and body.dimensions < 1:
        raise InvalidInputError("Input validation error: `dimensions` should be positive")
    if body.dimensions is not None and body.dimensions > facts.num_dimensions:
        raise InvalidInputError(
            "Input validation error: `dimensions` should be smaller than the maximum embedding "
            f"dimension. It is {facts.num_dimensions}"
        )
    parameters = {"normalize": body.normalize is not False, "dimensions": body.dimensions}
    return _texts_or_ids(exchange, body, parameters)


def read_embed_all(exchange: Exchange, entry: ModelEntry, chunks: Sequence[Buffer]) -> TeiRequest:
    """Read a call to /embed_all: a vector of each token."""
    body = read_json(exchange, chunks, _inputs)
    facts = _facts(entry, "embedding", "Model is not an embedding model")
    asked = _texts_or_ids(exchange, body, {"as": "tokens"})
    num_bytes = [sum(map(len, each.chunks)) for each in asked.payloads]
    num_tokens = sum(min(each, facts.max_tokens) for each in num_bytes)  # at most
    if num_tokens * facts.num_dimensions > _MOST_NUMBERS:
        raise TooLargeError(
            f"inputs: they may have {num_tokens} tokens, and the vectors of these more than "
            f"{_MOST_NUMBERS} numbers; send fewer or shorter texts at once"
        )
    return asked


def read_embed_sparse(
    exchange: Exchange, entry: ModelEntry, chunks: Sequence[Buffer]
) -> TeiRequest:
    """Refuse a call to /embed_sparse: no model here has SPLADE."""
    body = read_json(exchange, chunks, _inputs)
    _texts_or_ids(exchange, body, {})
    raise WrongTaskError("Model is not an embedding model with SPLADE pooling")


def read_similarity(exchange: Exchange, entry: ModelEntry, chunks: Sequence[Buffer]) -> TeiRequest:
    """Read a call to /similarity: how alike one text and each of several are."""
    body, place = read_json(exchange, chunks, _similarity), "inputs.sentences"
    _facts(entry, "embedding", "Model is not an embedding model")
    sentences = _items(body.inputs.sentences, _most(exchange) - 1, place)
    source = memoryview(msgspec.json.encode(body.inputs.source_sentence))
    num_characters = _count(source, "inputs.source_sentence") + _count_all(sentences, place)
    return TeiRequest(
        payloads=[_payload(each) for each in (source, *sentences)],
        parameters={**_options(body.parameters or _Options()), "normalize": True, "as": "base64"},
        render=cosines,
        num_characters=num_characters,
        place=place,
        first="inputs.source_sentence",
    )


def read_rerank(exchange: Exchange, entry: ModelEntry, chunks: Sequence[Buffer]) -> TeiRequest:
    """Read a call to /rerank: how well each text answers a query, the best first."""
    body = read_json(exchange, chunks, _rerank)
    texts = _items(body.texts, _most(exchange), "texts")
    _facts(entry, "reranking", "model is not a re-ranker model")
    num_characters = _count_all(texts, "texts", may_be_empty=True)
    query = msgspec.json.encode(body.query)
    most_bytes = exchange.predict.limits.max_body_bytes
    if len(query) * len(texts) > most_bytes:
        raise TooLargeError(
            f"query: its {len(query)} bytes with each of {len(texts)} texts are more than "
            f"{most_bytes} bytes (the setting max_body_bytes); send fewer texts at once"
        )
    return TeiRequest(
        payloads=[_pair(b"query", query, b"text", each) for each in texts],
        parameters={**_options(body, has_prompts=False), "raw_scores": body.raw_scores},
        render=ranks_of(texts if body.return_text else None),
        num_characters=num_characters + len(body.query) * len(texts),
        place="texts",
    )


def read_predict(exchange: Exchange, entry: ModelEntry, chunks: Sequence[Buffer]) -> TeiRequest:
    """Read a call to /predict: the labels of a text, or of a pair of texts, with their scores."""
    body = read_json(exchange, chunks, _inputs)
    facts = _facts(entry, None, "Model is not a classifier model")
    if facts.task == "embedding":
        raise _other_task(entry, "Model is not a classifier model")
    sequences, is_list = _sequences(exchange, body.inputs)
    # As with TEI, one text of a pair may be empty.
    num_characters = sum(
        _count_all(each, "inputs", may_be_empty=len(each) > 1) for each in sequences
    )
    labels = entry.interface.labels
    if facts.task == "classification":
        if len(labels) * len(sequences) > MAX_SCORES:
            raise TooLargeError(
                f"inputs: {len(labels)} labels of {len(sequences)} texts are more than "
                f"{MAX_SCORES}; send fewer texts at once"
            )
        payloads = [_text_or_pair(each) for each in sequences]
        top_k, render = len(labels) or None, predictions(None)
    else:
        payloads = [_query_and_text(each) for each in sequences]
        top_k, render = None, predictions(labels[0] if labels else ONLY_LABEL)
    return TeiRequest(
        payloads=payloads,
        parameters={
            **_options(body, has_prompts=False),
            "raw_scores": body.raw_scores,
            "top_k": top_k,
        },
        render=render if is_list else first_of(render),
        num_characters=num_characters,
        is_list=is_list,
    )


def read_tokenize(exchange: Exchange, entry: ModelEntry, chunks: Sequence[Buffer]) -> TeiRequest:
    """Read a call to /tokenize: the tokens of each text."""
    body = read_json(exchange, chunks, _inputs)
    _facts(entry, None, "model is not about texts")
    is_list = not _is_string(body.inputs)
    texts = [memoryview(body.inputs)]
    if is_list:
        texts = _items(body.inputs, _most(exchange), "inputs")
    if _count_all(texts, "inputs") > _MOST_TOKENIZED:
        raise TooLargeError(
            f"inputs: more than {_MOST_TOKENIZED} characters; send fewer or shorter texts at once"
        )
    return TeiRequest(
        payloads=[_payload(each) for each in texts],
        parameters={
            "tokenizer": "tokenize",
            "add_special_tokens": body.add_special_tokens,
            "prompt_name": body.prompt_name,
        },
        render=list_of,
        is_list=is_list,
    )


def read_decode(exchange: Exchange, entry: ModelEntry, chunks: Sequence[Buffer]) -> TeiRequest:
    """Read a call to /decode: the text of each list of ids."""
    body = read_json(exchange, chunks, _decode)
    _facts(entry, None, "model is not about texts")
    is_list = _second(body.ids) == b"["
    lists = [memoryview(body.ids)]
    if is_list:
        lists = _items(body.ids, _most(exchange), "ids")
    return TeiRequest(
        payloads=[_ids(each, "ids", "`input_ids` cannot be empty") for each in lists],
        parameters={"tokenizer": "decode", "skip_special_tokens": body.skip_special_tokens},
        render=list_of,
        is_list=is_list,
        place="ids",
    )


def read_any(exchange: Exchange, entry: ModelEntry, chunks: Sequence[Buffer]) -> TeiRequest:
    """Read a call to /, which is for the task of the model; clients of Hugging Face send these.

    Of an embedding model, TEI's setting TASK says whether it compares sentences; here it is the
    form of `inputs`.
    """
    facts = _facts(entry, None, "model is not about texts")
    if facts.task == "reranking":
        return read_rerank(exchange, entry, chunks)
    if facts.task == "classification":
        return read_predict(exchange, entry, chunks)
    body = read_json(exchange, chunks, _inputs)
    is_similarity = bytes(memoryview(body.inputs)[:1]) == b"{"
    return (read_similarity if is_similarity else read_embed)(exchange, entry, chunks)


def parameters_of(asked: TeiRequest) -> bytes:
    """Return the parameters of a call as JSON; those that are None are left out.

    Raises:
        TooLargeError: They are too long.
    """
    given = {name: value for name, value in asked.parameters.items() if value is not None}
    if asked.num_characters is not None:
        given["count"] = True
    return merge({}, msgspec.json.encode(given))


def _most(exchange: Exchange) -> int:
    """Return the most inputs of one call."""
    return exchange.predict.limits.max_instances


def _facts(entry: ModelEntry, task: str | None, refusal: str) -> TextFacts:
    """Return the facts about a model of texts.

    Raises:
        UnavailableError: It has not loaded yet.
        WrongTaskError: It does something else; the message is `refusal`.
    """
    interface = entry.interface
    if interface.media_types is None:
        raise UnavailableError(f"{entry.name} has not loaded yet", retry_after_s=1)
    if interface.text is None or task not in (None, interface.text.task):
        raise _other_task(entry, refusal)
    return interface.text


def _other_task(entry: ModelEntry, refusal: str) -> WrongTaskError:
    return WrongTaskError(f"{refusal} ({entry.name!r} was asked; /tei/NAME asks any model)")


def _options(body: Any, *, has_prompts: bool = True) -> dict[str, object]:
    """Return those parameters that all calls with a text may have.

    TEI cuts long texts unless its option auto_truncate is off; so do our models.
    """
    is_left = body.truncation_direction in ("Left", "left")
    return {
        "truncate": body.truncate,
        "truncation_direction": "left" if is_left else None,
        "prompt_name": body.prompt_name if has_prompts else None,
    }


def _texts_or_ids(exchange: Exchange, body: Any, parameters: Mapping[str, object]) -> TeiRequest:
    """Read a text, ids of tokens, or a list of texts and lists of ids."""
    given, is_list = body.inputs, False
    second = _second(given)
    inputs = [memoryview(given)]
    if not _is_string(given) and second != b"]" and second in (b'"', b"["):
        is_list, inputs = True, _items(given, _most(exchange), "inputs")
    payloads, num_characters = [], 0
    for index, each in enumerate(inputs):
        place = f"inputs[{index}]" if is_list else "inputs"
        if _is_string(each):
            num_characters += _count(each, place)
            payloads.append(_payload(each))
        else:
            payloads.append(_ids(each, place, _EMPTY))
            num_characters += bytes(each).count(b",") + 1
    return TeiRequest(
        payloads=payloads,
        parameters={**_options(body), **parameters},
        render=list_of,
        num_characters=num_characters,
        is_list=is_list,
    )


def _sequences(exchange: Exchange, given: Raw) -> tuple[list[list[memoryview]], bool]:
    """Read texts and pairs of texts, each as a list; and whether they came as a list."""
    if _is_string(given):
        return [[memoryview(given)]], False
    if _second(given) != b"[":
        return [_sequence(given, "inputs")], False
    elements = enumerate(_items(given, _most(exchange), "inputs"))
    return [_sequence(each, f"inputs[{index}]") for index, each in elements], True


def _sequence(given: Raw | memoryview, place: str) -> list[memoryview]:
    """Read a list with a text or a pair of texts."""
    try:
        return _items(given, 2, place)
    except ArgumentError:
        raise ArgumentError(
            place, 'must have one or two texts; several of these are such as [["a"], ["b", "c"]]'
        ) from None


def _items(given: Raw | memoryview, most: int, place: str) -> list[memoryview]:
    """Return the elements of a list.

    Raises:
        ArgumentError: It is no list, or too long.
        EmptyInputsError: It is empty.
    """
    if _second(given) == b"]":
        raise EmptyInputsError(f"`{place}` cannot be empty")
    return items_of(Raw(given), most, place)


def _count_all(texts: Sequence[memoryview], place: str, *, may_be_empty: bool = False) -> int:
    each_place = enumerate(texts)
    return sum(
        _count(each, f"{place}[{index}]", may_be_empty=may_be_empty) for index, each in each_place
    )


def _count(text: memoryview, place: str, *, may_be_empty: bool = False) -> int:
    """Return the number of characters of a text.

    Raises:
        ArgumentError: It is no text.
        EmptyInputsError: It is empty.
    """
    try:
        num_characters = len(_string.decode(text))
    except msgspec.ValidationError:
        raise ArgumentError(place, "must be a text") from None
    except JsonErrors as error:
        raise BadRequestError(f"{place}: {json_message(error, text)}") from None
    if not num_characters and not may_be_empty:
        raise EmptyInputsError(f"Input validation error: {_EMPTY}")
    return num_characters


def _is_string(given: Raw | memoryview) -> bool:
    return bytes(memoryview(given)[:1]) == b'"'


def _second(given: Raw | memoryview) -> bytes:
    """Return the first character in a list that is no space."""
    found = _SECOND.match(memoryview(given))
    return b"" if found is None else found[1]


def _ids(given: memoryview, place: str, if_empty: str) -> Payload:
    """Return ids of tokens as an instance; a worker checks that they are ids."""
    second = _second(given)
    if bytes(given[:1]) != b"[" or second in (b'"', b"[", b"{"):
        raise ArgumentError(place, "must be a text or a list of ids of tokens")
    if second == b"]":
        raise EmptyInputsError(f"Input validation error: {if_empty}")
    return Payload("json", (b'{"ids":', given, b"}"))


def _payload(text: memoryview) -> Payload:
    return Payload("json", (text,))


def _pair(first: bytes, one: Buffer, second: bytes, other: Buffer) -> Payload:
    """Return an instance of two texts, which shares their bytes with others."""
    return Payload("json", (b'{"%b":' % first, one, b',"%b":' % second, other, b"}"))


def _text_or_pair(sequence: Sequence[memoryview]) -> Payload:
    if len(sequence) == 1:
        return _payload(sequence[0])
    return _pair(b"text", sequence[0], b"pair", sequence[1])


def _query_and_text(sequence: Sequence[memoryview]) -> Payload:
    if len(sequence) == 1:
        raise InvalidInputError("inputs: this model compares two texts; send pairs of texts")
    return _pair(b"query", sequence[0], b"text", sequence[1])
