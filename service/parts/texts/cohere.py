"""Shared by calls in Cohere's and Jina's forms: errors and figures. Runs in the event loop.

Cohere's client shows the whole body of an error (cohere-python 5.21, `core/api_error.py`), where
its API has `message` and `id`; readers of Jina's API show `detail`, as that of
`llama-index-postprocessor-jinaai-rerank` does. Cohere's client tries again at 408, 409, 429 and
from 500 on, after the seconds in `Retry-After` (`core/http_client.py`).
"""

import msgspec

from inferpool.service.api.errors import Answer
from inferpool.service.api.exchange import Call
from inferpool.service.errors import ServiceError
from inferpool.service.parts.json_answers import error_with, status_of


class CallError(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an error."""

    id: str
    """The same as in `X-Request-ID`."""
    message: str
    """For a person: what was wrong, where, and what to do."""
    detail: str
    """The same as `message`."""
    code: str
    """A stable name, as for `/predict`."""


class ApiVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The version of Cohere's API."""

    version: str


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens were computed."""

    input_tokens: int


class Meta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts about a call, as Cohere has them."""

    api_version: ApiVersion
    tokens: TokenCounts
    warnings: list[str] = []
    """Options of the call that had no effect, and why."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a call, as Jina has them; two names for one figure."""

    prompt_tokens: int
    total_tokens: int


def meta_of(call: Call, num_tokens: int, warnings: list[str]) -> Meta:
    """Return the facts about a call that computed some tokens."""
    return Meta(
        api_version=ApiVersion(version=call.path[2:3]),
        tokens=TokenCounts(input_tokens=num_tokens),
        warnings=warnings,
    )


def usage_of(num_tokens: int) -> Usage:
    """Return the same facts for Jina's readers."""
    return Usage(prompt_tokens=num_tokens, total_tokens=num_tokens)


def cohere_error(error: ServiceError, call: Call) -> Answer:
    """Render an error. The status is ours, but 400 for each input that does not fit."""
    document = CallError(
        id=call.request_id, message=error.message, detail=error.message, code=error.code
    )
    return error_with(document, error, call, status_of(error))
