"""Clients of a running service: `Client`, and `AsyncClient` for event loops.

They know the service by HTTP alone and import none of its code. numpy, torch and Pillow are
imported only when the caller uses them. `service.client.errors` draws the tree of errors.
"""

from inferpool.service.client.async_client import AsyncClient
from inferpool.service.client.errors import (
    AnswerError,
    ConnectError,
    DeadlineExceededError,
    InferpoolError,
    InvalidInputError,
    ModelFailedError,
    OverloadedError,
    ProtocolError,
    UnavailableError,
    UnsendableError,
)
from inferpool.service.client.jobs.documents import JobInfo
from inferpool.service.client.jobs.handles import AsyncJob, Job
from inferpool.service.client.options import Progress
from inferpool.service.client.results import Health, Label, ModelInfo, Prediction, Timing
from inferpool.service.client.retries import Retry
from inferpool.service.client.sync_client import Client

__all__ = [
    "AnswerError",
    "AsyncClient",
    "AsyncJob",
    "Client",
    "ConnectError",
    "DeadlineExceededError",
    "Health",
    "InferpoolError",
    "InvalidInputError",
    "Job",
    "JobInfo",
    "Label",
    "ModelFailedError",
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
