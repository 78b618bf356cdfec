"""`/` for programs, such as KServe's client: the server is alive. Runs in the event loop."""

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.responses import JSONResponse
from starlette.routing import Match
from starlette.types import Scope


def alive_router() -> APIRouter:
    """Return the route, which must come before that of the page."""
    router = APIRouter(route_class=_ForPrograms)
    router.add_api_route("/", _alive, include_in_schema=False)
    return router


class _ForPrograms(APIRoute):
    """A route for programs: browsers, which ask for HTML, get that of another part there."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match calls that do not ask for HTML."""
        accepted = b",".join(value for name, value in scope["headers"] if name == b"accept")
        return (Match.NONE, {}) if b"text/html" in accepted else super().matches(scope)


async def _alive() -> JSONResponse:
    """Answer as KServe's server does (`DataPlane.live` in its Python package)."""
    headers = {"cache-control": "no-store", "vary": "accept"}
    return JSONResponse({"status": "alive"}, headers=headers)
