"""A queue-based parallel inference server for PyTorch models: the names to import.

Write a model with these:
    Model, Features, Item, Upload, TensorSpec, Placement, Content, InputError, END
Serve it from Python, mount it in your application, and test it:
    serve, RunningService; asgi_app, MountedApp; testing.predict, testing.client
    These raise: SettingsError, SourceError, StartError
Ask a running service with these:
    Client, AsyncClient, Prediction, Label, Timing, Retry, Health, ModelInfo, Progress; Job,
    AsyncJob, JobInfo
    These raise InferpoolError: AnswerError, BadRequestError, ConflictError, ConnectError,
    DeadlineExceededError, ForbiddenError, GivenUpError, IdempotencyError, InternalError,
    InvalidInputError, JobCancelledError, ModelFailedError, NonFiniteOutputError,
    NotAcceptableError, NotFoundError, OverQuotaError, OverShareError, OverloadedError,
    ProtocolError, QuarantinedError, ReaderTooSlowError, SlowBodyError, StoreFullError,
    StreamBrokenError, StreamGapError, StreamTooLongError, TooLargeError, UnauthorizedError,
    UnavailableError, UnknownJobError, UnknownModelError, UnsendableError,
    UnsupportedTypeError, WorkerCrashedError. `inferpool.service.client.errors` draws their tree.

Each name is imported when it is first used, so a client needs neither torch nor the server.
"""

TYPE_CHECKING = False  # `typing` has it too, but its import takes longer than this page
if TYPE_CHECKING:
    from inferpool import testing
    from inferpool.models.base import Model
    from inferpool.models.content import Content
    from inferpool.models.errors import InputError, SourceError
    from inferpool.models.item import Features, Item
    from inferpool.models.spec import Placement, TensorSpec
    from inferpool.models.streams import END
    from inferpool.models.upload import Upload
    from inferpool.service.client import (
        AsyncClient,
        AsyncJob,
        Client,
        Health,
        Job,
        JobInfo,
        Label,
        ModelInfo,
        Prediction,
        Progress,
        Retry,
        Timing,
    )
    from inferpool.service.client.errors import (
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
        ReaderTooSlowError,
        SlowBodyError,
        StoreFullError,
        StreamBrokenError,
        StreamGapError,
        StreamTooLongError,
        TooLargeError,
        UnauthorizedError,
        UnavailableError,
        UnknownJobError,
        UnknownModelError,
        UnsendableError,
        UnsupportedTypeError,
        WorkerCrashedError,
    )
    from inferpool.service.embedded.mounted import MountedApp, asgi_app
    from inferpool.service.embedded.serve import RunningService, serve
    from inferpool.service.errors import StartError
    from inferpool.service.settings.names import SettingsError

    __version__: str

_PLACES = {
    "models.base": "Model",
    "models.content": "Content",
    "models.errors": "InputError SourceError",
    "models.item": "Features Item",
    "models.spec": "Placement TensorSpec",
    "models.streams": "END",
    "models.upload": "Upload",
    "service.client": (
        "AsyncClient AsyncJob Client Health Job JobInfo Label ModelInfo Prediction Progress "
        "Retry Timing"
    ),
    "service.client.errors": (
        "AnswerError BadRequestError ConflictError ConnectError DeadlineExceededError "
        "ForbiddenError GivenUpError IdempotencyError InferpoolError InternalError "
        "InvalidInputError JobCancelledError ModelFailedError NonFiniteOutputError "
        "NotAcceptableError NotFoundError OverQuotaError OverShareError OverloadedError "
        "ProtocolError QuarantinedError ReaderTooSlowError SlowBodyError StoreFullError "
        "StreamBrokenError StreamGapError StreamTooLongError TooLargeError "
        "UnauthorizedError UnavailableError UnknownJobError UnknownModelError UnsendableError "
        "UnsupportedTypeError WorkerCrashedError"
    ),
    "service.embedded.mounted": "MountedApp asgi_app",
    "service.embedded.serve": "RunningService serve",
    "service.errors": "StartError",
    "service.settings.names": "SettingsError",
}
_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names.split()}

__all__ = [
    "END",
    "AnswerError",
    "AsyncClient",
    "AsyncJob",
    "BadRequestError",
    "Client",
    "ConflictError",
    "ConnectError",
    "Content",
    "DeadlineExceededError",
    "Features",
    "ForbiddenError",
    "GivenUpError",
    "Health",
    "IdempotencyError",
    "InferpoolError",
    "InputError",
    "InternalError",
    "InvalidInputError",
    "Item",
    "Job",
    "JobCancelledError",
    "JobInfo",
    "Label",
    "Model",
    "ModelFailedError",
    "ModelInfo",
    "MountedApp",
    "NonFiniteOutputError",
    "NotAcceptableError",
    "NotFoundError",
    "OverQuotaError",
    "OverShareError",
    "OverloadedError",
    "Placement",
    "Prediction",
    "Progress",
    "ProtocolError",
    "QuarantinedError",
    "ReaderTooSlowError",
    "Retry",
    "RunningService",
    "SettingsError",
    "SlowBodyError",
    "SourceError",
    "StartError",
    "StoreFullError",
    "StreamBrokenError",
    "StreamGapError",
    "StreamTooLongError",
    "TensorSpec",
    "Timing",
    "TooLargeError",
    "UnauthorizedError",
    "UnavailableError",
    "UnknownJobError",
    "UnknownModelError",
    "UnsendableError",
    "UnsupportedTypeError",
    "Upload",
    "WorkerCrashedError",
    "asgi_app",
    "serve",
    "testing",
]


if not TYPE_CHECKING:  # a type checker would believe that every name exists

    def __getattr__(name: str) -> object:
        """Import a public name when it is first used (PEP 562)."""
        from importlib import import_module

        if name == "__version__":
            return import_module(f"{__name__}.service.telemetry.versions").version_of()
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            if name == "testing":
                return import_module(f"{__name__}.testing")
            found: object = getattr(import_module(f"{__name__}.{_PLACE_OF[name]}"), name)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(_why_missing(error, name), name=error.name) from error
        globals()[name] = found
        return found


def _why_missing(error: ModuleNotFoundError, wish: str) -> str:
    """Return why a public name cannot be imported, and what to do."""
    missing = error.name or ""
    if missing in (f"{__name__}.service", f"{__name__}.workers", f"{__name__}.models"):
        folder = missing.partition(".")[2]
        return (
            f"inferpool/{folder} is missing. In a checkout it is a symbolic link, and some tools "
            "write a text file instead: clone again with `git clone -c core.symlinks=true`, or "
            "install from the source distribution"
        )
    package = missing.partition(".")[0]
    if package in ("", __name__):
        return str(error)
    return (
        f"{wish} needs {package}, which is not installed. The names of the client work without "
        "it; `pip install .` in the clone installs the rest"
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
