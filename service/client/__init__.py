"""Clients of a running service: `Client`, and `AsyncClient` for event loops.

They know the service by HTTP alone and import nothing of what serves; numpy, torch and Pillow are
imported only for who hands in or asks for theirs. `service.client.errors` draws the tree of errors.
"""

from inferpool.service.client.async_client import AsyncClient
from inferpool.service.client.errors import (
    AnswerError,
    ConnectError,
    DeadlineExceededError,
    InferpoolError,
    InvalidInputError,
    OverloadedError,
    ProtocolError,
    UnavailableError,
    UnsendableError,
)
from inferpool.service.client.health import Health, ModelInfo
from inferpool.service.client.options import Progress
from inferpool.service.client.results import Label, Prediction, Timing
from inferpool.service.client.retries import Retry
from inferpool.service.client.sync_client import Client

__all__ = [
    "AnswerError",
    "AsyncClient",
    "Client",
    "ConnectError",
    "DeadlineExceededError",
    "Health",
    "InferpoolError",
    "InvalidInputError",
    "Label",
    "ModelInfo",
    "OverloadedError",
    "Prediction",
    "Progress",
    "ProtocolError",
    "Retry",
    "Timing",
    "UnavailableError",
    "UnsendableError",
]
