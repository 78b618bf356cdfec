"""`POST /v1/classify`: labels of texts. Runs in the event loop.

A call has `input`, as Jina's, vLLM's and infinity's calls have, or else `inputs`, as Cohere's has;
the answer has the form that goes with it. That for `input` has the members of Jina
(https://api.jina.ai/openapi.json) and vLLM (`vllm/entrypoints/pooling/classify/protocol.py`) in one
object for each text; infinity's has a bare list in its place, which cannot be had besides. Sources
for `inputs`: Cohere's API reference, "Classify", and cohere-python 5.21,
`types/classify_response_classifications_item.py`.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType
from msgspec import Meta as Bounds

from inferpool.models.spec import Interface
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

MAX_TEXTS = 1024
"""Most texts of one call: "Maximum Inputs per Request" (https://jina.ai/classifier)."""
MAX_SCORES = 20_000
"""Most labels in one answer: rendering them takes some 10 ms of the event loop."""
_QUOTE, _BRACE, _BRACKET = b'"{['
_NULL = Raw(b"null")
_LIKELY = 0.5
_ZERO_SHOT = "a model has the labels that it was trained with"
_REFUSED = {
    "labels": _ZERO_SHOT,
    "classifier_id": "classifiers are not trained here; name one in model",
    "examples": _ZERO_SHOT,
    "preset": "there are no presets here",
}
"""Arguments that Jina's and Cohere's calls may have, and why they are refused."""


def _nothing() -> Raw:
    """Return the default of an argument: a function, since it cannot stand in a JSON schema."""
    return _NULL


class ClassifyRequest(NamedRequest, frozen=True, gc=False):
    """The body of a call: `input` or `inputs`."""

    input: Raw = msgspec.field(default_factory=_nothing)
    """A text or several, each a JSON string or {"text": ..., "pair": ...}."""
    inputs: Raw = msgspec.field(default_factory=_nothing)
    """The same, to be answered as Cohere does."""
    top_k: Annotated[int, Bounds(ge=1)] | None = None
    """Labels of each text, the best first; all by default."""
    raw_scores: bool | None = None
    """True: scores as the network computes them, of any size (infinity)."""
    truncate: Literal["NONE", "START", "END"] | bool | None = None
    """The end to cut if a text is too long (Cohere); NONE or false refuses such a text."""
    labels: Raw = msgspec.field(default_factory=_nothing)
    classifier_id: Raw = msgspec.field(default_factory=_nothing)
    examples: Raw = msgspec.field(default_factory=_nothing)
    preset: Raw = msgspec.field(default_factory=_nothing)
    user: str | None = None
    """Accepted, and not used."""

    def parameters(self, top_k: int | None) -> bytes:
        """Return the parameters for the model, as JSON."""
        given = {
            "top_k": top_k,
            "raw_scores": self.raw_scores,
            "truncate": None if self.truncate is None else self.truncate not in (False, "NONE"),
            "truncation_direction": "left" if self.truncate == "START" else None,
        }
        wanted = {name: value for name, value in given.items() if value is not None}
        return msgspec.json.encode({"count": True, **wanted})


class ScoredLabel(msgspec.Struct, frozen=True):
    """A label and its score, as our classifiers answer."""

    label: str
    index: int
    score: float


class JinaLabel(msgspec.Struct, frozen=True):
    """A label and its score."""

    label: str
    score: float


class ClassifiedText(msgspec.Struct, frozen=True, kw_only=True):
    """The labels of a text, as Jina and vLLM have them."""

    object: Literal["classification"] = "classification"
    index: int
    prediction: str
    """The best label (Jina)."""
    score: float
    predictions: list[JinaLabel]
    """The best first."""
    label: str
    """The same as `prediction` (vLLM)."""
    probs: list[float] | UnsetType = UNSET
    """The score of each label in the order of the model; only if the call asks for all of them."""
    num_classes: int | UnsetType = UNSET


class TextClasses(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a call with `input`."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassifiedText]
    usage: Usage


class Confidence(msgspec.Struct, frozen=True):
    """The score of a label, as Cohere has it."""

    confidence: float


class CohereClasses(msgspec.Struct, frozen=True, kw_only=True):
    """The labels of a text, as Cohere has them."""

    id: str
    input: Raw
    prediction: str | UnsetType = UNSET
    """The best label, of labels that exclude each other."""
    confidence: float | UnsetType = UNSET
    predictions: list[str]
    """The best label, or else all that are more likely than not."""
    confidences: list[float]
    labels: Mapping[str, Confidence]
    classification_type: Literal["single-label", "multi-label"]


class CohereAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a call with `inputs`."""

    id: str
    classifications: list[CohereClasses]
    meta: Meta


_labels = msgspec.json.Decoder(list[Annotated[list[ScoredLabel], Bounds(min_length=1)]])


class _Pair(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    text: Raw = _NULL
    pair: Raw = _NULL
    image: Raw = _NULL


_pair = msgspec.json.Decoder(_Pair)
_NO_PAIR = _Pair()


class ClassifyProtocol(BodyProtocol[ClassifyRequest]):
    """Calls for labels of texts."""

    reader = msgspec.json.Decoder(ClassifyRequest)
    _texts: Sequence[memoryview] = ()
    """Those to show in an answer of Cohere's form."""
    _is_cohere = False

    def decode(self, exchange: Exchange, entry: ModelEntry, chunks: Sequence[Buffer]) -> Decoded:
        """Find the texts of the body.

        Raises:
            ArgumentError: They have another form, or the model classifies no texts.
            TooLargeError: The answer would have too many labels.
        """
        check_task(exchange, entry, "classification")
        exchange.call.ref.wants_tensors = False
        request = self.request
        for name, why in _REFUSED.items():
            if getattr(request, name) not in (_NULL, Raw(b"[]")):
                raise ArgumentError(name, f"is not supported: {why}")
        self._is_cohere = request.input == _NULL
        param = "inputs" if self._is_cohere else "input"
        given = request.inputs if self._is_cohere else request.input
        if self._is_cohere and given == _NULL:
            raise ArgumentError("input", "is missing")
        if not self._is_cohere and request.inputs != _NULL:
            raise ArgumentError("inputs", "stands beside input; send one of them")
        is_list = memoryview(given)[0] == _BRACKET
        items = items_of(given, MAX_TEXTS, param) if is_list else [memoryview(given)]
        payloads = [
            Payload("json", (text,)) for text in _instances_of(items, param, is_list=is_list)
        ]
        top_k = _num_labels(request, entry.interface, len(items))
        if self._is_cohere:
            self._texts = items
        self._request = msgspec.structs.replace(request, input=_NULL, inputs=_NULL)
        return Decoded(payloads, is_list, request.parameters(top_k))

    def reply(self, call: Call, outcomes: Sequence[Outcome]) -> Answer:
        """Render the labels of each text.

        Raises:
            ServiceError: A text failed, and so the call does.
        """
        assert call.entry is not None
        param = "inputs" if self._is_cohere else "input"
        num_tokens, answers = counted(outcomes, param, is_list=call.is_batch)
        labels = answers_as(_labels, answers)
        if self._is_cohere:
            facts, likely = call.entry.interface.text, None
            if facts is not None and facts.is_multi_label:
                likely = 0.0 if self.request.raw_scores else _LIKELY
            cohere = CohereAnswer(
                id=call.request_id,
                classifications=[
                    _as_cohere(f"{call.request_id}-{index}", text, found, likely)
                    for index, (text, found) in enumerate(zip(self._texts, labels, strict=True))
                ],
                meta=meta_of(call, num_tokens, []),
            )
            return json_answer(msgspec.json.encode(cohere))
        num_classes = len(call.entry.interface.labels) or UNSET
        jina = TextClasses(
            id=call.request_id,
            created=int(time.time()),
            model=call.entry.name,
            data=[_as_jina(index, found, num_classes) for index, found in enumerate(labels)],
            usage=usage_of(num_tokens),
        )
        return json_answer(msgspec.json.encode(jina))

    def problem(self, error: ServiceError, call: Call) -> Answer:
        """Render an error."""
        return cohere_error(error, call)


def _num_labels(request: ClassifyRequest, interface: Interface, num_texts: int) -> int | None:
    """Return how many labels to ask for; None if the model's own number is all that is known.

    Raises:
        TooLargeError: They are too many.
    """
    num_labels = len(interface.labels)
    wanted = request.top_k or num_labels or None
    if wanted is not None and min(wanted, num_labels or wanted) * num_texts > MAX_SCORES:
        raise TooLargeError(
            f"top_k: {wanted} labels of {num_texts} texts are more than {MAX_SCORES}; ask for "
            "fewer labels with top_k, or send fewer texts at once"
        )
    return wanted


def _instances_of(
    items: Sequence[memoryview], param: str, *, is_list: bool
) -> Iterator[memoryview]:
    """Yield the instance of each text.

    Raises:
        ArgumentError: One is no text, or empty.
    """
    for index, item in enumerate(items):
        place = f"{param}[{index}]" if is_list else param
        first = item[0]
        if first == _QUOTE:
            if len(item) == 2:
                raise ArgumentError(param, "is an empty text", place=place)
        elif first != _BRACE:
            raise ArgumentError(param, 'must be a text, or {"text": ...}', place=place)
        else:
            try:
                pair = _pair.decode(item)
            except msgspec.ValidationError:
                pair = _NO_PAIR
            if pair.image != _NULL:
                raise ArgumentError(param, "is a picture; only texts are classified", place=place)
            if pair.text == _NULL:
                what = 'must have "text", and may have "pair"'
                raise ArgumentError(param, what, place=place)
        yield item


def _as_jina(
    index: int, found: Sequence[ScoredLabel], num_classes: int | UnsetType
) -> ClassifiedText:
    probs: list[float] | UnsetType = UNSET
    if len(found) == num_classes:
        probs = [each.score for each in sorted(found, key=lambda each: each.index)]
    best = found[0]
    return ClassifiedText(
        index=index,
        prediction=best.label,
        score=best.score,
        predictions=[JinaLabel(each.label, each.score) for each in found],
        label=best.label,
        probs=probs,
        num_classes=num_classes,
    )


def _as_cohere(
    id: str, text: memoryview, found: Sequence[ScoredLabel], likely: float | None
) -> CohereClasses:
    """Return the labels of a text; those above `likely` are predicted, or else the best alone."""
    is_multi_label = likely is not None
    best = [each for each in found if each.score > likely] if likely is not None else found[:1]
    return CohereClasses(
        id=id,
        input=Raw(text) if text[0] == _QUOTE else _pair.decode(text).text,
        prediction=UNSET if is_multi_label else best[0].label,
        confidence=UNSET if is_multi_label else best[0].score,
        predictions=[each.label for each in best],
        confidences=[each.score for each in best],
        labels={each.label: Confidence(each.score) for each in found},
        classification_type="multi-label" if is_multi_label else "single-label",
    )
