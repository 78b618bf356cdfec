"""Reads the bodies of protocols about texts, and takes their answers apart. In the event loop.

Workers render all JSON; here it is only cut and joined, so that the loop stays free.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args

import msgspec
from msgspec import Raw

from inferpool.models.json_errors import BYTE_ORDER_MARK, JsonErrors, json_message
from inferpool.service.api.codecs.answers import Outcome
from inferpool.service.api.codecs.parameters import MAX_DEPTH, is_too_deep
from inferpool.service.api.codecs.requests import check_encoding
from inferpool.service.api.errors import Answer
from inferpool.service.api.exchange import (
    DEFAULT_MODEL,
    Call,
    CallProtocol,
    Exchange,
    ModelEntry,
    Predict,
)
from inferpool.service.errors import (
    BadRequestError,
    InvalidInputError,
    ModelFailedError,
    ServiceError,
    TooLargeError,
    UnknownModelError,
)
from inferpool.service.parts.texts.errors import ArgumentError, error_answer, error_of_input
from inferpool.service.queue.instance import Buffer

T = TypeVar("T")
_NOTHING = Raw()
Task = Literal["embedding", "reranking", "classification"]
_WORDS = {
    "embedding": "computes no vectors of texts",
    "reranking": "ranks no texts",
    "classification": "classifies no texts",
}
_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `(?P<place>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_MAX_SHOWN = 200
_COUNTED = re.compile(rb"\[(\d+),")


class NamedRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A body that may name its model."""

    model: str | None = None


R = TypeVar("R", bound=NamedRequest)


class BodyProtocol(CallProtocol, Generic[R]):
    """Base of protocols with the model's name in the body, whose errors have OpenAI's form.

    The object that stands in `models.attached.CALLS` only reads bodies; each call gets one of its
    own, which has its body.
    """

    submits_in_turn: ClassVar[bool] = True
    reader: ClassVar[msgspec.json.Decoder[Any]]
    """Decodes bodies."""

    def __init__(self, request: R | None = None, model: str | None = None) -> None:
        """Keep the body of one call, and the key of its model in `Predict.models`."""
        self._request = request
        self._model = model

    @property
    def request(self) -> R:
        """The body of the call."""
        assert self._request is not None
        return self._request

    def name_in(self, call: Call) -> str | None:
        """Return the key in `Predict.models` that a call asks for, once its body is read."""
        return self._model

    def opened(self, exchange: Exchange, chunks: Sequence[Buffer]) -> CallProtocol:
        """Read the body of a call, and return its protocol.

        Raises:
            ServiceError: It cannot be read, or names no model that there is.
        """
        request: R = read_json(exchange, chunks, self.reader)
        return type(self)(request, named_model(exchange.predict, request.model))

    def problem(self, error: ServiceError, call: Call) -> Answer:
        """Render an error."""
        return error_answer(error, call)


def read_json(exchange: Exchange, chunks: Sequence[Buffer], reader: "msgspec.json.Decoder[T]") -> T:
    """Read a whole body as JSON, whatever its content type is.

    Raises:
        ArgumentError: One of its arguments is wrong, missing or unknown.
        BadRequestError: It is not JSON.
        InvalidInputError: It is JSON of another form.
        TooLargeError: It is too long.
        UnsupportedTypeError: It is compressed.
    """
    check_encoding(exchange.call.headers)
    text = b"".join(chunks).removeprefix(BYTE_ORDER_MARK)
    most = exchange.predict.limits.max_json_bytes
    if len(text) > most:
        raise TooLargeError(
            f"the body is larger than {most} bytes, the limit for JSON (the setting "
            "max_json_bytes); send fewer texts at once"
        )
    if not text.strip():
        raise BadRequestError("the body is empty, and JSON is expected")
    if is_too_deep(text):
        raise InvalidInputError(f"the body is nested more than {MAX_DEPTH} deep")
    try:
        if not text.isascii():
            text.decode()  # msgspec skips over strings without looking for errors in their UTF-8
        return reader.decode(text)
    except msgspec.ValidationError as error:
        raise _misshapen(str(error), reader) from None
    except JsonErrors as error:
        raise BadRequestError(f"the body: {json_message(error, text)}") from None


def named_model(predict: Predict, name: str | None) -> str:
    """Return the key in `Predict.models` for the name in a body.

    Raises:
        UnknownModelError: It has none, and no model is the default; or it has one that no model
            can have.
    """
    if name is not None and name != DEFAULT_MODEL:
        return name
    there = ", ".join(predict.names) or "none"
    if name is not None:
        raise UnknownModelError(f"no model is called {name!r}; there are: {there}")
    if predict.default is None:
        raise UnknownModelError(f"the body names no model, and none is the default: {there}")
    return DEFAULT_MODEL


def items_of(given: Raw, most: int, param: str) -> list[memoryview]:
    """Return the JSON of each item of a list that is an argument.

    Args:
        given: The argument's JSON, without space around it.
        most: More items are refused.
        param: The name of the argument.

    Raises:
        ArgumentError: It is no list, is empty, or has too many items.
    """
    try:
        fields = msgspec.structs.astuple(_list_of(most).decode(given))
    except msgspec.ValidationError as error:
        if "at most length" not in str(error):
            raise ArgumentError(param, "must be a list") from None
        raise ArgumentError(
            param, f"has more than {most} items; send them in several calls"
        ) from None
    items = [memoryview(each) for each in fields if each is not _NOTHING]
    if not items:
        raise ArgumentError(param, "is an empty list; it needs one item at least")
    return items


def check_task(exchange: Exchange, entry: ModelEntry, task: Task) -> None:
    """Check that a model is for a protocol's task, as far as that is known.

    Raises:
        ArgumentError: It is for something else.
    """
    if is_for(entry, task) or entry.interface.media_types is None:
        return  # until a worker is ready, nothing is known
    models = exchange.predict.models
    there = [name for name in exchange.predict.names if is_for(models[name], task)]
    which = f"those that do: {', '.join(there)}" if there else "none here does"
    raise ArgumentError("model", f"{entry.name!r} {_WORDS[task]}; {which}")


def is_for(entry: ModelEntry, task: Task) -> bool:
    """Return whether a model is for a task."""
    facts = entry.interface.text
    return facts is not None and facts.task == task


def counted(
    outcomes: Sequence[Outcome], param: str, *, is_list: bool
) -> tuple[int, list[memoryview]]:
    """Return the number of tokens of all instances, and the answer of each as JSON.

    The call must have had the parameter `count`. The answers are not copied: new memory for 2,048
    vectors takes 7 ms in base64, and 20 ms as numbers.

    Args:
        outcomes: Those of all instances of a call.
        param: The argument that has the instances, for messages.
        is_list: The argument is a list of instances, and not the only one.

    Raises:
        ServiceError: An instance failed; it is the error of the first.
    """
    num_tokens, answers = 0, list[memoryview]()
    for index, outcome in enumerate(outcomes):
        if isinstance(outcome, ServiceError):
            raise error_of_input(outcome, param, index if is_list else None)
        value = outcome.value
        found = _COUNTED.match(value) if isinstance(value, bytes) else None
        if found is None or not isinstance(value, bytes):
            raise ModelFailedError("the model does not count tokens, as its parameter says")
        num_tokens += int(found[1])
        answers.append(memoryview(value)[found.end() : -1])
    return num_tokens, answers


def answers_as(reader: "msgspec.json.Decoder[list[T]]", answers: Sequence[memoryview]) -> list[T]:
    """Decode the answers that `counted` returns, together.

    Raises:
        ModelFailedError: The model answers in another form.
    """
    try:
        return reader.decode(b"[%b]" % b",".join(answers))
    except msgspec.DecodeError as error:
        raise ModelFailedError(f"the model's answers have another form: {error}") from None


@lru_cache
def _list_of(most: int) -> "msgspec.json.Decoder[Any]":
    """Return a decoder for a list of limited length: an array of optional fields.

    So that a body of millions of items makes no list of millions.
    """
    fields = [(f"i{index}", Raw, _NOTHING) for index in range(most)]
    array = msgspec.defstruct("Items", fields, array_like=True, forbid_unknown_fields=True)
    return msgspec.json.Decoder(array)


def _misshapen(
    message: str, reader: "msgspec.json.Decoder[Any]"
) -> ArgumentError | InvalidInputError:
    """Return what is wrong with a body of another form, from msgspec's message."""
    if len(message) > 2 * _MAX_SHOWN:  # it repeats names and values, and ends with the place
        message = f"{message[:_MAX_SHOWN]}...{message[-_MAX_SHOWN:]}"
    parts = _PLACE.match(message)
    assert parts is not None
    what, place = parts["what"], (parts["place"] or "$").removeprefix("$").removeprefix(".")
    what = what[:1].lower() + what[1:]
    if not place:
        if found := _MISSING.search(message):
            return ArgumentError(found[1], "is missing")
        if found := _UNKNOWN.search(message):
            known = ", ".join(_known(reader))
            return ArgumentError(found[1][:80], f"is unknown; this call takes {known}")
        return InvalidInputError(f"the body must be an object: {what}")
    name = re.split(r"[.\[]", place)[0]
    if what.startswith("invalid enum value") and (allowed := _choices(reader, name)):
        what += f"; use {' or '.join(map(repr, allowed))}"
    return ArgumentError(name, what, place=place)


def _known(reader: "msgspec.json.Decoder[Any]") -> list[str]:
    return [each.encode_name for each in msgspec.structs.fields(reader.type)]


def _choices(reader: "msgspec.json.Decoder[Any]", name: str) -> list[object]:
    """Return the values that an argument may have, if they are few."""
    for field in msgspec.structs.fields(reader.type):
        if field.encode_name == name:
            return [value for each in get_args(field.type) for value in get_args(each)]
    return []
