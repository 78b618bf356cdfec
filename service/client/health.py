"""What a service says of itself."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from inferpool.service.client.errors import ProtocolError
from inferpool.service.client.results import Json, Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class InputInfo:
    """One tensor that a model takes."""

    name: str
    dtype: str
    shape: Sequence[int]
    """With the batch dimension first; -1 where any length will do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """One worker."""

    name: str
    state: str
    device: str
    reason: str
    """Why it is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """One model."""

    name: str
    is_ready: bool
    reason: str
    """Why it is not ready."""
    queue_depth: int
    """Instances that wait for a worker."""
    inputs: Sequence[InputInfo]
    """What it takes, if it says."""
    example: Json
    """An instance that it takes, or None."""
    workers: Sequence[WorkerInfo]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The whole service."""

    status: str
    """`starting`, `ready`, `degraded`, `unavailable` or `draining`."""
    is_ready: bool
    is_draining: bool
    models: Sequence[ModelInfo]
    document: Json = field(repr=False)
    """All of `GET /health`."""


def health_of(reply: Reply) -> Health:
    """Read the answer of `GET /health`.

    Raises:
        ProtocolError: It is none.
    """
    try:
        document = json.loads(reply.content)
        return Health(
            status=document["status"],
            is_ready=document["ready"],
            is_draining=document["draining"],
            models=[_model_of(each) for each in document["models"]],
            document=document,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(f"this is no /health of inferpool's: {error!r}") from None


def _model_of(model: Json) -> ModelInfo:
    inputs = [
        InputInfo(name=each["name"], dtype=each["dtype"], shape=tuple(each["shape"]))
        for each in model["inputs"]
    ]
    workers = [
        WorkerInfo(
            name=each["name"], state=each["state"], device=each["device"], reason=each["reason"]
        )
        for each in model["workers"]
    ]
    return ModelInfo(
        name=model["name"],
        is_ready=model["ready"],
        reason=model["reason"],
        queue_depth=model["queue_depth"],
        inputs=inputs,
        example=model["example"],
        workers=workers,
    )
