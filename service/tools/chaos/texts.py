"""Calls of `/predict` in the protocols of texts, for `inferpool chaos --protocol`."""

import struct
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from inferpool.service.tools.trial.connection import post_request

_JSON = "application/json"


class TextCall(NamedTuple):
    """A call of `/predict` that has texts."""

    model: str
    number: str
    headers: dict[str, str]
    instances: Sequence[Any]


class _Problem(msgspec.Struct):
    """An error of any of these protocols."""

    error: Any = None
    message: str = ""
    code: str = ""


class EmbeddingsForm:
    """OpenAI's `/v1/embeddings`; vectors come as numbers and in base64, by turns."""

    def request(self, call: TextCall) -> bytes:
        """Return the same call in this protocol."""
        form = "base64" if call.number[-1] in "02468" else "float"
        texts = [_text_in(each) for each in call.instances]
        body = {"model": call.model, "input": texts, "encoding_format": form}
        return post_request("/v1/embeddings", msgspec.json.encode(body), _JSON, call.headers)

    def predictions(self, call: TextCall, body: bytes) -> Sequence[object]:
        """Return the predictions in an answer."""
        answer = msgspec.json.decode(body)
        if answer["model"] != call.model:
            raise ValueError(f"the answer is of the model {answer['model']!r}")
        if [each["index"] for each in answer["data"]] != list(range(len(call.instances))):
            raise ValueError("the vectors are not those of the texts, in their order")
        return [_vector(each["embedding"]) for each in answer["data"]]


class RerankForm:
    """Cohere's `/v2/rerank`, with one query for all instances of a call."""

    def request(self, call: TextCall) -> bytes:
        """Return the same call in this protocol."""
        query = _text_in(call.instances[0], "query")
        documents = [_text_in(each) for each in call.instances]
        body = {"model": call.model, "query": query, "documents": documents}
        return post_request("/v2/rerank", msgspec.json.encode(body), _JSON, call.headers)

    def predictions(self, call: TextCall, body: bytes) -> Sequence[object]:
        """Return the predictions in an answer."""
        found = msgspec.json.decode(body)["results"]
        scores = {each["index"]: each["relevance_score"] for each in found}
        return [scores[place] for place in range(len(call.instances))]


class TeiForm:
    """Text Embeddings Inference's `/embed`."""

    def request(self, call: TextCall) -> bytes:
        """Return the same call in this protocol."""
        texts = [_text_in(each) for each in call.instances]
        body = {"inputs": texts, "truncate": True, "normalize": False}
        path = f"/tei/{call.model}/embed"
        return post_request(path, msgspec.json.encode(body), _JSON, call.headers)

    def predictions(self, call: TextCall, body: bytes) -> Sequence[object]:
        """Return the predictions in an answer."""
        found: list[object] = msgspec.json.decode(body)
        return found


TextForm: TypeAlias = EmbeddingsForm | RerankForm | TeiForm
TEXT_FORMS: Mapping[str, Callable[[], TextForm]] = {
    "embeddings": EmbeddingsForm,
    "rerank": RerankForm,
    "tei": TeiForm,
}
"""Forms by the name of their protocol."""


def problem_of(body: bytes) -> tuple[str, str]:
    """Return the code of an error, which may be empty, and its message."""
    try:
        found = msgspec.json.decode(body, type=_Problem)
        if isinstance(found.error, dict):
            found = msgspec.convert(found.error, _Problem)
    except msgspec.DecodeError:
        return "", body[:200].decode(errors="replace")
    return found.code, found.message or str(found.error)


def _text_in(instance: Any, name: str = "text") -> object:
    """Return a text of an instance; another kind of model may have none, which it is to say."""
    return instance.get(name) if isinstance(instance, dict) else instance


def _vector(value: Any) -> Sequence[float]:
    if isinstance(value, str):
        data = b64decode(value, validate=True)
        return struct.unpack(f"<{len(data) // 4}f", data)
    numbers: Sequence[float] = value
    return numbers
