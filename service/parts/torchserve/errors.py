"""Errors as TorchServe renders them: {"code", "type", "message"}, by the names of its exceptions.

Statuses and names are those of `HttpRequestHandler.java`, `ApiUtils.java` and `ts/service.py` of
pytorch/serve (0.12), but for keys (401 and 403; it has 400) and deadlines (504; it has none).
"""

from http import HTTPStatus

from inferpool.service.api.errors import (
    Answer,
    ForbiddenError,
    Headers,
    MethodNotAllowedError,
    NotFoundError,
    UnauthorizedError,
    kind_of,
)
from inferpool.service.api.exchange import VERSION_HEADER, Call
from inferpool.service.errors import (
    ConflictError,
    ModelFailedError,
    OverloadedError,
    ServiceError,
    SlowBodyError,
    UnavailableError,
    UnknownModelError,
)
from inferpool.service.parts.json_answers import error_in, status_of
from inferpool.service.parts.torchserve.json import error_body
from inferpool.service.parts.torchserve.paths import asked_in, named_in

NO_RESOURCE = "Requested resource is not found, please refer to API document."
PREDICTION_FAILED = "Prediction failed"
"""Its message whatever a handler raised; the log has the rest."""
UNCACHED: Headers = [
    (b"pragma", b"no-cache"),
    (b"cache-control", b"no-cache; no-store, must-revalidate, private"),
    (b"expires", b"Thu, 01 Jan 1970 00:00:00 UTC"),
]
"""Headers of all its answers (`NettyUtils.sendHttpResponse`)."""
_TYPES: dict[type[ServiceError], str] = {
    UnauthorizedError: "InvalidKeyException",
    ForbiddenError: "InvalidKeyException",
    UnknownModelError: "ModelNotFoundException",
    NotFoundError: "ResourceNotFoundException",
    MethodNotAllowedError: "MethodNotAllowedException",
    SlowBodyError: "RequestTimeoutException",
    ConflictError: "ConflictStatusException",
    OverloadedError: "ServiceUnavailableException",
    UnavailableError: "ServiceUnavailableException",
}
_STATUSES: dict[type[ServiceError], int] = {OverloadedError: 503, ModelFailedError: 503}
"""Statuses that are not ours: its clients know these."""


def error_answer(error: ServiceError, call: Call, name: str = "") -> Answer:
    """Render an error; `name` is that of the model, if it is neither in the path nor the query."""
    bases = type(error).__mro__
    status = next((_STATUSES[each] for each in bases if each in _STATUSES), status_of(error))
    usual = "InternalServerException" if status >= 500 else "BadRequestException"
    if kind_of(error).status == HTTPStatus.SERVICE_UNAVAILABLE:
        usual = _TYPES[UnavailableError]
    kind = next((_TYPES[each] for each in bases if each in _TYPES), usual)
    message = error.message
    if isinstance(error, UnknownModelError):
        kind, message = _about_model(error, call, name)
    elif isinstance(error, ModelFailedError):
        message = PREDICTION_FAILED
    status, headers, body = error_in(error_body(status, kind, message), error, call, status)
    return status, [*headers, *UNCACHED], body


def _about_model(error: UnknownModelError, call: Call, name: str) -> tuple[str, str]:
    """Return the type and the message of an error about a model that is not there."""
    asked = asked_in(call.path)
    if asked is None:
        return _TYPES[NotFoundError], NO_RESOURCE
    name = name or named_in(call) or ""
    if error.is_version:
        version = asked.version or call.headers.get(VERSION_HEADER, b"").decode("latin-1")
        said = f"Model version: {version} does not exist for model: {name}"
        return "ModelVersionNotFoundException", said
    return _TYPES[UnknownModelError], f"Model not found: {name}"
