"""The health service of gRPC (grpc/doc/health-checking.md): of the server, and of each model."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from google.protobuf.message import DecodeError

from inferpool.service.errors import BadRequestError, OverloadedError, UnknownModelError
from inferpool.service.parts.open_inference.grpc.reading import MessageReader
from inferpool.service.parts.open_inference.grpc.schema import HEALTH, INFERENCE, schema
from inferpool.service.parts.open_inference.grpc.server import Endpoint
from inferpool.service.parts.open_inference.grpc.statuses import headers_of

_SERVICE = f"{HEALTH}.Health"
_PATH = "/health/ready"
_OWN = ("", f"{INFERENCE}.GRPCInferenceService")
"""The names of the server itself."""
_LOOK_EVERY_S = 0.5
_MAX_WATCHES = 256
_NO_SUCH_SERVICE = 3
"""`SERVICE_UNKNOWN` of the protocol."""


class HealthService:
    """Answers whether the server, or a model by its name, is ready."""

    def __init__(
        self, is_ready: Callable[[str], bool | None], models: Iterable[str], reader: MessageReader
    ) -> None:
        """Ask `is_ready` for a model, or for the server by an empty name; None: there is none.

        Args:
            is_ready: Says whether it is ready.
            models: The names of all models, which may change.
            reader: Reads requests.
        """
        self._is_ready = is_ready
        self._models = models
        self._reader = reader
        self._draining = asyncio.Event()
        self._num_watches = 0
        messages = schema()
        self._request = messages.message(HEALTH, "HealthCheckRequest")
        self._response = messages.message(HEALTH, "HealthCheckResponse")
        self._list = messages.message(HEALTH, "HealthListResponse")

    def endpoints(self) -> Mapping[str, Endpoint]:
        """Return the endpoint of each method."""
        return {
            f"/{_SERVICE}/Check": Endpoint(_PATH, self._check),
            f"/{_SERVICE}/List": Endpoint("/health", self._list_all),
            f"/{_SERVICE}/Watch": Endpoint(_PATH, self._watch, is_streaming=True),
        }

    def begin_drain(self) -> None:
        """End all watches."""
        self._draining.set()

    async def _check(self, context: Any) -> bytes:
        status = self._status_of(name := await self._name_in(context))
        if status == _NO_SUCH_SERVICE:
            raise UnknownModelError(f"no model is called {name[:80]!r}")
        return bytes(self._response(status=status).SerializeToString())

    async def _list_all(self, context: Any) -> bytes:
        await self._reader.read(context, dict(headers_of(context.invocation_metadata())))
        response = self._list()
        for name in (*_OWN, *self._models):
            response.statuses[name].status = self._status_of(name)
        return bytes(response.SerializeToString())

    async def _watch(self, context: Any) -> None:
        """Send the status now, and each time that it changes."""
        name = await self._name_in(context)
        if self._num_watches >= _MAX_WATCHES:
            raise OverloadedError(f"there are {_MAX_WATCHES} watches of health", retry_after_s=60)
        self._num_watches += 1
        try:
            sent = None
            while True:
                status = self._status_of(name)
                if status != sent:
                    await context.write(self._response(status=status).SerializeToString())
                    sent = status
                if self._draining.is_set():
                    return
                try:
                    async with asyncio.timeout(_LOOK_EVERY_S):
                        await self._draining.wait()
                except TimeoutError:
                    continue
        finally:
            self._num_watches -= 1

    async def _name_in(self, context: Any) -> str:
        headers = dict(headers_of(context.invocation_metadata()))
        try:
            request = self._request.FromString(await self._reader.read(context, headers))
        except DecodeError:
            raise BadRequestError("the message is no HealthCheckRequest") from None
        return str(request.service)

    def _status_of(self, name: str) -> int:
        is_ready = self._is_ready("" if name in _OWN else name)
        if is_ready is None:
            return _NO_SUCH_SERVICE
        return 1 if is_ready else 2
