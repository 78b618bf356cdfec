"""A running service, asked over HTTP with the project's own client."""

import asyncio
import json
import time
import warnings

from inferpool.service.batch.inputs import BatchAnswer, RunLostError
from inferpool.service.batch.reading import DecodedInput
from inferpool.service.batch.target import answered, refused
from inferpool.service.client import (
    AsyncClient,
    ConnectError,
    InferpoolError,
    OverloadedError,
    UnavailableError,
)
from inferpool.service.client.errors import ForbiddenError, NotFoundError, UnauthorizedError

_PATIENCE_S = 300.0
_PAUSE_S = 0.5


class RemoteTarget:
    """Computes inputs in a service."""

    decodes = False
    pins = False

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

    async def predict(self, given: DecodedInput) -> BatchAnswer:
        """See `BatchTarget`."""
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # a text is meant to be one
                    result = await self._client.predict(
                        _value(given), model=self._model, parameters=self._parameters
                    )
            except (OverloadedError, UnavailableError) as error:
                if time.monotonic() > until:
                    raise RunLostError(str(error)) from error
                await asyncio.sleep(_PAUSE_S)
            except (ConnectError, UnauthorizedError, ForbiddenError, NotFoundError) as error:
                raise RunLostError(str(error)) from error
            except InferpoolError as error:
                return refused(given, error.code, error.detail)
            else:
                break
        for failure in result.errors:
            return refused(given, failure.code, failure.detail)
        values = result.predictions
        return answered(given, values[0] if len(values) == 1 else list(values))


def _value(given: DecodedInput) -> object:
    if given.tensor is not None:
        return given.tensor[None]  # a batch of one instance
    data = given.input.data
    return json.loads(data) if given.input.kind == "json" else data
