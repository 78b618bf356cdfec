"""Errors as OpenAI's API renders them: {"error": {"message", "type", "param", "code"}}.

Its client reads `code`, `param` and `type` from there (openai-python, `openai/_exceptions.py`), and
whether to try again from the header `x-should-retry` (`openai/_base_client.py`).
"""

import re
from copy import copy

import msgspec

from inferpool.service.api.errors import Answer, UnauthorizedError, kind_of
from inferpool.service.api.exchange import Call
from inferpool.service.errors import InvalidInputError, ServiceError, UnknownModelError
from inferpool.service.parts.json_answers import error_with, status_of

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES: dict[type[ServiceError], str] = {
    UnauthorizedError: "invalid_api_key",
    UnknownModelError: "model_not_found",
}
"""Codes of OpenAI's API that clients decide by; the others are our own."""
_PARAMETER = re.compile(r"parameter '(\w+)'")
_PLACE = re.compile(r"instances?(?:\[\d+\])?(?:\.ids(?=\[))?(?=[:.\[ ])")
"""The place of an instance, as workers and `outcome_of` name it; clients send its `ids` alone."""


class _Error(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str
    request_id: str


class ArgumentError(InvalidInputError):
    """One argument of a call does not fit.

    Attributes:
        param: The argument's name in the body.
    """

    def __init__(self, param: str, message: str, *, place: str = "") -> None:
        """Say what is wrong with an argument, or with a place in it such as "input[3]"."""
        super().__init__(f"{place or param}: {message}")
        self.param = param


def error_answer(error: ServiceError, call: Call) -> Answer:
    """Render an error. The status is ours, but 400 for each input that does not fit."""
    status = status_of(error)
    document = _Error(
        message=error.message,
        type=_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error"),
        param=param_of(error),
        code=_CODES.get(type(error), error.code),
        request_id=call.request_id,
    )
    status, headers, body = error_with({"error": document}, error, call, status)
    if status >= 500 and not kind_of(error).is_retryable:
        headers.append((b"x-should-retry", b"false"))
    return status, headers, body


def param_of(error: ServiceError) -> str | None:
    """Return the argument that an error is about, if it is about one."""
    if isinstance(error, UnknownModelError):
        return "model"
    if not isinstance(error, InvalidInputError):
        return None
    found = _PARAMETER.search(error.message)
    return found[1] if found else getattr(error, "param", None)


def error_of_input(error: ServiceError, param: str, index: int | None = None) -> ServiceError:
    """Return the error of one instance, with its place as the client of a protocol knows it.

    Args:
        error: The error of an instance; other calls may have the same one, so that it stays as it
            is.
        param: The argument that the instance came from, such as "input".
        index: The place of the instance in it; None if the argument is the instance itself.
    """
    if kind_of(error).is_retryable:
        return error  # it is not about the instance
    error = copy(error)
    if isinstance(error, InvalidInputError) and _PARAMETER.match(error.message):
        return error  # it is about the whole call
    place = param if index is None else f"{param}[{index}]"
    rest = _PLACE.sub("", error.message, count=1) if _PLACE.match(error.message) else None
    if rest is None:
        rest = f": {error.message}"
    error.message = place + rest
    if isinstance(error, InvalidInputError):
        error.param = param  # type: ignore[attr-defined]  # see `param_of`
    return error
