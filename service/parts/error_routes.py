"""Routes of FastAPI whose errors have the form of a protocol, and not of a problem document."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from inferpool.service.api.errors import CALL_KEY, Answer
from inferpool.service.api.exchange import Call
from inferpool.service.errors import ServiceError


def routes_with(problem: Callable[[ServiceError, Call], Answer]) -> type[APIRoute]:
    """Return the class of routes whose errors a function renders, like `CallProtocol.problem`."""

    class ErrorRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            answer = super().get_route_handler()

            async def answer_or_refuse(request: Request) -> Response:
                try:
                    return await answer(request)
                except ServiceError as error:
                    status, headers, body = problem(error, request.scope[CALL_KEY])
                    refusal = Response(body, status)
                    refusal.raw_headers = headers
                    return refusal

            return answer_or_refuse

    return ErrorRoute
