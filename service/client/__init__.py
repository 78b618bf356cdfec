"""Clients of a running service: `Client`, and `AsyncClient` for event loops.

They use only the service's HTTP and import none of its code: this folder is also a distribution of
its own, `inferpool-client`, with the package `inferpool_client`. So its files import each other by
relative names. numpy, torch and Pillow are imported only when the caller uses them.

Each name is imported when it is first used, since every command imports a part of this package.
`errors` draws the tree of errors.
"""

TYPE_CHECKING = False  # `typing` has it too, but its import takes longer than this page
if TYPE_CHECKING:
    from .async_client import AsyncClient
    from .errors import (
        AnswerError,
        BadRequestError,
        ConflictError,
        ConnectError,
        DeadlineExceededError,
        ForbiddenError,
        GivenUpError,
        IdempotencyError,
        InferpoolError,
        InternalError,
        InvalidInputError,
        JobCancelledError,
        ModelFailedError,
        NonFiniteOutputError,
        NotAcceptableError,
        NotFoundError,
        OverloadedError,
        OverQuotaError,
        OverShareError,
        ProtocolError,
        QuarantinedError,
        SlowBodyError,
        StoreFullError,
        TooLargeError,
        UnauthorizedError,
        UnavailableError,
        UnknownJobError,
        UnknownModelError,
        UnsendableError,
        UnsupportedTypeError,
        WorkerCrashedError,
    )
    from .jobs.documents import JobInfo
    from .jobs.handles import AsyncJob, Job
    from .options import Progress
    from .results import Health, Label, ModelInfo, Prediction, Timing
    from .retries import Retry
    from .sync_client import Client

_PLACES = {
    "AsyncClient": "async_client",
    "AsyncJob": "jobs.handles",
    "Client": "sync_client",
    "Health": "results",
    "Job": "jobs.handles",
    "JobInfo": "jobs.documents",
    "Label": "results",
    "ModelInfo": "results",
    "Prediction": "results",
    "Progress": "options",
    "Retry": "retries",
    "Timing": "results",
}
"""The modules of all names but those of errors."""

__all__ = [
    "AnswerError",
    "AsyncClient",
    "AsyncJob",
    "BadRequestError",
    "Client",
    "ConflictError",
    "ConnectError",
    "DeadlineExceededError",
    "ForbiddenError",
    "GivenUpError",
    "Health",
    "IdempotencyError",
    "InferpoolError",
    "InternalError",
    "InvalidInputError",
    "Job",
    "JobCancelledError",
    "JobInfo",
    "Label",
    "ModelFailedError",
    "ModelInfo",
    "NonFiniteOutputError",
    "NotAcceptableError",
    "NotFoundError",
    "OverQuotaError",
    "OverShareError",
    "OverloadedError",
    "Prediction",
    "Progress",
    "ProtocolError",
    "QuarantinedError",
    "ReaderTooSlowError",
    "Retry",
    "SlowBodyError",
    "StoreFullError",
    "Timing",
    "TooLargeError",
    "UnauthorizedError",
    "UnavailableError",
    "UnknownJobError",
    "UnknownModelError",
    "UnsendableError",
    "UnsupportedTypeError",
    "WorkerCrashedError",
]


if not TYPE_CHECKING:  # a type checker would believe that every name exists

    def __getattr__(name: str) -> object:
        """Import a public name when it is first used (PEP 562)."""
        from importlib import import_module

        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(f".{_PLACES.get(name, 'errors')}", __name__)
        found: object = getattr(module, name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
