"""Renders errors of FastAPI's routes: problem documents, or the form of a protocol's paths."""

from http import HTTPStatus
from pkgutil import resolve_name

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from inferpool.service.api.errors import (
    CALL_KEY,
    INTERNAL_MESSAGE,
    RETRY_STATUSES,
    Answer,
    MethodNotAllowedError,
    NotFoundError,
    problem,
    render_problem,
)
from inferpool.service.api.optional_calls import CALLS_BY_SETTING
from inferpool.service.api.trace import new_ids, request_id_of
from inferpool.service.errors import InternalError, InvalidInputError, ServiceError

FORM_KEY = "inferpool.form_of_errors"
"""The key in the scope of an ASGI call of the name of what renders its errors; without it they are
problem documents."""
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_STATUSES = frozenset(HTTPStatus)


def problem_response(request: Request, error: ServiceError) -> Response:
    """Render an error as an answer of a FastAPI route."""
    request_id = _request_id(request)
    form = request.scope.get(FORM_KEY)
    if form is not None:
        return _response(resolve_name(form)(error, request.scope[CALL_KEY]), request_id)
    return _response(problem(error, request_id, request.url.path), request_id)


def install_error_handlers(app: FastAPI) -> None:
    """Render every error of the app's other routes as well."""
    app.add_exception_handler(ServiceError, _on_service_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(Exception, _on_unexpected)


def _response(answer: Answer, request_id: str) -> Response:
    status, headers, body = answer
    response = Response(body, status)
    response.raw_headers = [*headers, (b"x-request-id", request_id.encode())]
    return response


def _request_id(request: Request) -> str:
    call = request.scope.get(CALL_KEY)
    if call is not None:
        return str(call.request_id)
    given = request.headers.get("x-request-id", "").encode("latin-1", "replace")
    return request_id_of(given) or new_ids()[0]  # in an application that is not ours


async def _on_service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return problem_response(request, error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Render Starlette's own refusals: an unknown route, a wrong method."""
    assert isinstance(error, HTTPException)
    path, headers = request.url.path, dict(error.headers or {})
    if error.status_code == HTTPStatus.NOT_FOUND:
        detail = str(error.detail)
        if detail == HTTPStatus.NOT_FOUND.phrase:
            off = [each for each, paths in CALLS_BY_SETTING.items() if path in paths]
            hint = f"the setting `{off[0]}` turns it on" if off else "/docs lists what there is"
            detail = f"there is nothing at {path[:200]}; {hint}"
        response = problem_response(request, NotFoundError(detail))
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED and "Allow" in headers:
        headers["Allow"] = allowed = _methods_at(request) or headers["Allow"]
        text = f"{path[:200]} takes {allowed}, not {request.method}"
        response = problem_response(request, MethodNotAllowedError(text))
    else:
        response = _other_response(request, error)
    for name, value in headers.items():
        response.headers[name] = value
    return response


def _other_response(request: Request, error: HTTPException) -> Response:
    status, request_id = error.status_code, _request_id(request)
    known = HTTPStatus(status) if status in _STATUSES else HTTPStatus.INTERNAL_SERVER_ERROR
    answer = render_problem(
        status,
        known.phrase,
        known.name.lower(),
        str(error.detail),
        path=request.url.path,
        request_id=request_id,
        is_retryable=status in RETRY_STATUSES,
    )
    return _response(answer, request_id)


def _methods_at(request: Request) -> str:
    """Return the methods of all routes of a path: Starlette names those of its first route only."""
    scopes = ({**request.scope, "method": method} for method in _METHODS)
    return ", ".join(
        scope["method"]
        for scope in scopes
        if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)
    )


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    places = "; ".join(
        f"{'.'.join(str(part) for part in each['loc'])}: {each['msg']}" for each in error.errors()
    )
    return problem_response(request, InvalidInputError(places))


async def _on_unexpected(request: Request, error: Exception) -> Response:
    """Only answer: Starlette raises the error again, and the server logs its traceback."""
    return problem_response(request, InternalError(INTERNAL_MESSAGE))
