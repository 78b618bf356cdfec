"""The reflection service of gRPC: clients such as grpcurl ask it for services and messages.

Its requests are those of `grpc/doc/server-reflection.md`.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from google.protobuf.message import DecodeError
from grpc import StatusCode, aio

from inferpool.service.errors import BadRequestError, OverloadedError
from inferpool.service.parts.open_inference.grpc.schema import REFLECTION, schema
from inferpool.service.parts.open_inference.grpc.server import Endpoint

_METHOD = "ServerReflection/ServerReflectionInfo"
_PATH = "/docs"
"""Like the documentation, it names no model and needs no key."""
_MAX_STREAMS = 32
_IDLE_S = 30.0
"""How long a client may take to its next question."""


class Reflection:
    """Describes the services of this server."""

    def __init__(self) -> None:
        """Describe all services of the schema."""
        self._schema = schema()
        self._request = self._schema.message(REFLECTION, "ServerReflectionRequest")
        self._response = self._schema.message(REFLECTION, "ServerReflectionResponse")
        self._num_streams = 0

    def endpoints(self) -> Mapping[str, Endpoint]:
        """Return the endpoint of each method; both versions of the protocol have the same."""
        endpoint = Endpoint(_PATH, self._answer_all, is_streaming=True)
        return {f"/{REFLECTION}{version}.{_METHOD}": endpoint for version in ("", "alpha")}

    def begin_drain(self) -> None:
        """Do nothing: streams end soon by themselves."""

    async def _answer_all(self, context: Any) -> None:
        if self._num_streams >= _MAX_STREAMS:
            raise OverloadedError(f"{_MAX_STREAMS} clients ask for descriptors", retry_after_s=1)
        self._num_streams += 1
        try:
            async with asyncio.timeout(_IDLE_S) as timeout:
                while (message := await context.read()) is not aio.EOF:
                    await context.write(self._answer(message))
                    timeout.reschedule(asyncio.get_running_loop().time() + _IDLE_S)
        except TimeoutError:
            await context.abort(StatusCode.DEADLINE_EXCEEDED, f"no question for {_IDLE_S:g} s")
        finally:
            self._num_streams -= 1

    def _answer(self, message: bytes) -> bytes:
        try:
            request = self._request.FromString(message)
        except DecodeError:
            raise BadRequestError("the message is no ServerReflectionRequest") from None
        response = self._response(valid_host=request.host, original_request=request)
        kind = request.WhichOneof("message_request")
        if kind == "list_services":
            for name in self._schema.services:
                response.list_services_response.service.add(name=name)
        elif kind in ("file_by_filename", "file_containing_symbol"):
            self._describe(getattr(request, kind), response, is_file=kind == "file_by_filename")
        else:  # nothing of proto3 has extensions
            response.error_response.error_code = StatusCode.NOT_FOUND.value[0]
            response.error_response.error_message = "there are no extensions"
        return bytes(response.SerializeToString())

    def _describe(self, name: str, response: Any, *, is_file: bool) -> None:
        pool = self._schema.pool
        try:
            found = pool.FindFileByName(name) if is_file else pool.FindFileContainingSymbol(name)
        except KeyError:
            response.error_response.error_code = StatusCode.NOT_FOUND.value[0]
            response.error_response.error_message = f"there is no {name[:80]!r}"
        else:
            response.file_descriptor_response.file_descriptor_proto.append(found.serialized_pb)
