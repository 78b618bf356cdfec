"""A running service, called over HTTP with the project's own client."""

import asyncio
import contextlib
import json
import time

import numpy as np

from inferpool.service.batch.inputs import BatchAnswer, RunLostError
from inferpool.service.batch.reading import DecodedInput
from inferpool.service.client import (
    AsyncClient,
    ConnectError,
    InferpoolError,
    OverloadedError,
    ProtocolError,
    UnavailableError,
)
from inferpool.service.client.errors import ForbiddenError, NotFoundError, UnauthorizedError

_LOST = (ConnectError, ProtocolError, UnauthorizedError, ForbiddenError, NotFoundError)
"""Errors that every later input would have, too."""
_PATIENCE_S = 300.0
_PAUSE_S = 0.5


class RemoteTarget:
    """Computes inputs in a service."""

    max_pixels: int | None = None

    def __init__(
        self,
        client: AsyncClient,
        *,
        room: int,
        model: str | None = None,
        parameters: dict[str, object] | None = None,
    ) -> None:
        self.room = room
        self._client = client
        self._model = model
        self._parameters = parameters or None
        self._envelope: bool | None = None
        """The model's bodies have one; None before it is known."""

    async def _has_envelope(self) -> bool:
        """Return whether the model has one, as /health says; if its key is another one, it has."""
        if self._envelope is None:
            self._envelope = True
            with contextlib.suppress(ForbiddenError, UnauthorizedError):
                models = await self._client.models()
                named = [each for each in models if each.name == self._model] or models[:1]
                self._envelope = all(each.envelope for each in named)
        return self._envelope

    async def predict(self, given: DecodedInput) -> BatchAnswer:
        """Compute an input in the service."""
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                result = await self._client.predict(
                    _value(given, envelope=await self._has_envelope()),
                    model=self._model,
                    parameters=self._parameters,
                    envelope=await self._has_envelope(),
                )
            except (OverloadedError, UnavailableError) as error:
                if not error.is_retryable or time.monotonic() > until:
                    raise RunLostError(str(error)) from error
                await asyncio.sleep(_PAUSE_S)
            except _LOST as error:
                raise RunLostError(str(error)) from error
            except InferpoolError as error:
                return given.refused(error.code, error.detail)
            else:
                break
        for failure in result.errors:
            return given.refused(failure.code, failure.detail)
        if len(result.predictions) != 1:
            num = len(result.predictions)
            return given.refused("invalid_input", f"holds {num} instances; each file must be one")
        return given.answered(result.value)


def _value(given: DecodedInput, *, envelope: bool) -> object:
    if given.input.text and not envelope:
        return json.loads(given.input.text)
    if given.header is not None:
        return np.frombuffer(given.data, given.header.dtype).reshape(given.header.shape)
    return json.loads(bytes(given.data)) if given.input.kind == "json" else given.data
