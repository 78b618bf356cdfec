"""`POST /v1/embeddings`, as OpenAI's API has it. Runs in the event loop.

Source: OpenAI's API reference, "Create embeddings", and openai-python 3.57,
`openai/resources/embeddings.py`.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw

from inferpool.service.api.codecs.answers import Outcome
from inferpool.service.api.codecs.body import Decoded, Payload
from inferpool.service.api.errors import Answer
from inferpool.service.api.exchange import Call, Exchange, ModelEntry
from inferpool.service.parts.json_answers import json_answer
from inferpool.service.parts.texts.errors import ArgumentError
from inferpool.service.parts.texts.requests import (
    BodyProtocol,
    NamedRequest,
    check_task,
    counted,
    items_of,
)
from inferpool.service.queue.instance import Buffer

MAX_INPUTS = 2048
"""The most inputs of one call (OpenAI's API reference, "Create embeddings", `input`)."""
_INPUT = "input"
_FIRST_ITEM = re.compile(rb"\[[ \t\r\n]*(.)", re.DOTALL)
_NO_IDS = re.compile(rb"\[[ \t\r\n]*\]")
_DIGITS = b"-0123456789"
_QUOTE, _BRACKET = b'"['


class EmbeddingsRequest(NamedRequest, frozen=True, gc=False):
    """The body of a call."""

    input: Raw
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: str | None = None
    """Accepted, since clients send it, and not used."""
    truncate: bool | None = None
    truncation_direction: Literal["left", "right"] | None = None
    normalize: bool | None = None
    prompt_name: Annotated[str, Meta(max_length=256)] | None = None

    def parameters(self) -> bytes:
        """Return the parameters for the model, as JSON."""
        given = {
            "as": "base64" if self.encoding_format == "base64" else None,
            "dimensions": self.dimensions,
            "truncate": self.truncate,
            "truncation_direction": self.truncation_direction,
            "normalize": self.normalize,
            "prompt_name": self.prompt_name,
        }
        wanted = {name: value for name, value in given.items() if value is not None}
        return msgspec.json.encode({"count": True, **wanted})


class EmbeddingsProtocol(BodyProtocol[EmbeddingsRequest]):
    """Calls for vectors of texts."""

    reader = msgspec.json.Decoder(EmbeddingsRequest)

    def decode(self, exchange: Exchange, entry: ModelEntry, chunks: Sequence[Buffer]) -> Decoded:
        """Find the inputs of the body.

        Raises:
            ArgumentError: They have another form, or the model computes no vectors.
        """
        check_task(exchange, entry, "embedding")
        exchange.call.ref.wants_tensors = False
        request, self._request = self.request, None  # so that the call does not keep its body
        is_batch = is_list(request.input)
        payloads = payloads_of(request.input, is_batch=is_batch)
        return Decoded(payloads, is_batch, request.parameters())

    def reply(self, call: Call, outcomes: Sequence[Outcome]) -> Answer:
        """Render the vectors.

        Raises:
            ServiceError: An input failed, and so the call does.
        """
        assert call.entry is not None
        num_tokens, vectors = counted(outcomes, _INPUT, is_list=call.is_batch)
        pieces = list[Buffer]()
        for index, vector in enumerate(vectors):
            pieces += (b',{"object":"embedding","index":%d,"embedding":' % index, vector, b"}")
        pieces[0] = b'{"object":"list","data":[' + bytes(pieces[0][1:])
        name = msgspec.json.encode(call.entry.name)
        pieces.append(
            b'],"model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d}}'
            % (name, num_tokens, num_tokens)
        )
        return json_answer(b"".join(pieces))


def payloads_of(given: Raw, *, is_batch: bool) -> list[Payload]:
    """Return the instances in an `input`: a text or ids of tokens, or those in a list of either.

    Raises:
        ArgumentError: It is something else, is empty, or has too many of them.
    """
    if not is_batch:
        return [_payload(memoryview(given), _INPUT)]
    items = items_of(given, MAX_INPUTS, _INPUT)
    if len({item[0] for item in items}) > 1:
        raise ArgumentError(_INPUT, "must be either texts or lists of ids; send two calls")
    return [_payload(each, f"{_INPUT}[{index}]") for index, each in enumerate(items)]


def is_list(given: Raw) -> bool:
    """Return whether an `input` is a list of inputs, and not one: a list of numbers is one."""
    found = _FIRST_ITEM.match(memoryview(given))
    return found is not None and found[1] not in _DIGITS


def _payload(item: memoryview, place: str) -> Payload:
    first = item[0]
    if first == _QUOTE:
        if len(item) > 2:
            return Payload("json", (item,))
        what = "is an empty text"
    elif first == _BRACKET:
        if not _NO_IDS.fullmatch(item):
            return Payload("json", (b'{"ids":', item, b"}"))
        what = "is an empty list of ids"
    else:
        what = "must be a text, or a list of ids"
    raise ArgumentError(_INPUT, what, place=place)
