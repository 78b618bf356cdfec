"""TorchServe's envelopes of requests: they stand around a handler. Worker processes only.

Handlers may subclass them as `ts.torch_handler.request_envelope.*`.
"""

import json
from abc import ABC, abstractmethod
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from inferpool.models.errors import ModelError
from inferpool.models.torchserve.context import HandlerContext

Handle = Callable[[Any, HandlerContext], Any]
"""A handler's entry point: a list of requests to a list of answers."""


class BaseEnvelope(ABC):
    """Base of envelopes: changes what a handler gets, and what it returns."""

    def __init__(self, handle_fn: Handle) -> None:
        self._handle_fn = handle_fn
        self.context: HandlerContext | None = None

    def handle(self, data: Any, context: HandlerContext) -> Any:
        """Call the handler."""
        self.context = context
        results = self._handle_fn(self.parse_input(data) if data else data, context)
        return self.format_output(results) if results else results

    @abstractmethod
    def parse_input(self, data: Any) -> Any:
        """Return what the handler gets for a batch."""

    @abstractmethod
    def format_output(self, data: Any) -> Any:
        """Return the answers for what the handler returned."""


class BodyEnvelope(BaseEnvelope):
    """Gives a handler each request's `data` or `body` alone."""

    def parse_input(self, data: Sequence[Mapping[str, object]]) -> list[object]:
        """Return the bodies."""
        return [row.get("data") or row.get("body") for row in data]

    def format_output(self, data: Any) -> Any:
        """Return the answers as they are."""
        return data


class JSONEnvelope(BaseEnvelope):
    """Gives a handler the `instances` of all requests as one batch; answers `predictions`."""

    _lengths: Sequence[int] = ()

    def parse_input(self, data: Sequence[Mapping[str, Any]]) -> list[object]:
        """Return the instances of all requests, with base64 decoded."""
        found = [_instances_of(row) for row in data]
        self._lengths = [len(each) for each in found]
        return [instance for each in found for instance in each]

    def format_output(self, data: Sequence[object]) -> list[str]:
        """Return JSON with the predictions of each request."""
        rest = iter(data)
        return [json.dumps({"predictions": [*islice(rest, num)]}) for num in self._lengths]


_ENVELOPES: Mapping[str, type[BaseEnvelope]] = {"body": BodyEnvelope, "json": JSONEnvelope}


def enveloped(name: str, handle: Handle) -> Handle:
    """Return an entry point with an envelope around it.

    Raises:
        ModelError: There is no such envelope.
    """
    if name not in _ENVELOPES:
        raise ModelError(
            f"the service envelope {name!r} is not supported: it is one of "
            f"{', '.join(_ENVELOPES)}; for KServe's protocols leave it out and call /v1/models "
            "or /v2/models"
        )
    return _ENVELOPES[name](handle).handle


def _instances_of(row: Mapping[str, Any]) -> list[Any]:
    return [_decoded(each) for each in (row.get("data") or row.get("body") or row)["instances"]]


def _decoded(value: Any) -> Any:
    """Decode the base64 of an instance, or of the columns of one."""
    if not isinstance(value, dict):
        return value
    if value.keys() == {"b64"}:
        return b64decode(value["b64"])
    return {
        name: b64decode(each["b64"]) if isinstance(each, dict) and each.keys() == {"b64"} else each
        for name, each in value.items()
    }
