"""One HTTP call to `/predict` as a value, and the model that it asks, as calls see it."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from models.spec import TensorSpec
from service.api.answers import AnswerFormat
from service.errors import ServiceError
from service.request import CallOptions, Payload, Result
from workers.messages import Kind

UNKNOWN_MODEL = "unknown"
"""The label of calls for models that are not there: any other would let clients make up labels."""

DEFAULT_PRIORITY = 5


class ModelEntry(Protocol):
    """A model, as calls see it."""

    @property
    def name(self) -> str:
        """As it stands in the path."""

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """What it takes; empty where that is not known."""

    def submit(
        self, payload: Payload, options: CallOptions, request_id: str
    ) -> asyncio.Future[Result]:
        """Admit an instance. Cancelling the future gives the instance up.

        Raises:
            ServiceError: It is refused.
        """


class WholeBody(msgspec.Struct, frozen=True):
    """How a body is read that is the payload of one instance as it is."""

    kind: Kind
    parameters: bytes
    inputs: Sequence[TensorSpec]
    """Of the model as it was then."""


class Call(msgspec.Struct):
    """One HTTP call on its way through: a struct, because that fills its defaults in C."""

    method: str
    path: str
    query: bytes
    headers: dict[bytes, bytes]
    """Names in lower case; those that came several times joined by commas."""
    started: float
    """CLOCK_MONOTONIC seconds."""
    entry: ModelEntry | None
    request_id: str
    trace_id: str
    span_id: str
    flags: str = "00"
    trace_state: bytes = b""
    deadline: float = 0.0
    priority: int = DEFAULT_PRIORITY
    chosen: AnswerFormat = "json"
    is_read: bool = False
    """The whole body has arrived."""
    is_batch: bool = False
    num_instances: int = 0
    outcomes: list[asyncio.Future[Result] | ServiceError] = []
    """Of each instance: a future, or why it was refused."""
    earlier: "Call | None" = None
    """One with the same head."""
    form: WholeBody | None = None
    """How the body is read, if that is known from an earlier call with the same head."""

    @property
    def label(self) -> str:
        """The model, for metrics."""
        return UNKNOWN_MODEL if self.entry is None else self.entry.name


OnDone = Callable[[str, int, float], None]
"""Told the model, the status and the seconds of each call."""
OnAccess = Callable[[Call, int, float], None]
"""Told each call with its status and seconds, for the access log."""
