"""The error tree of the service. Status codes live in `service.api.errors`, nowhere else.

ServiceError
+-- BadRequestError            the request cannot be read: 400
+-- UnknownModelError          no model of that name: 404
+-- UnknownJobError            no job of that id, or it is another key's: 404
+-- SlowBodyError              the body did not arrive in time: 408
+-- ConflictError              something else is being done: 409
+-- TooLargeError              a body, or a part of one, over its limit: 413
+-- NotAcceptableError         no answer in any form that `Accept` allows: 406
+-- UnsupportedTypeError       a content type that no codec reads: 415
+-- InvalidInputError          it was read, and does not fit the model: 422
+-- VersionRefusedError        a version of a model may not serve: 422
+-- IdempotencyError           this idempotency key belongs to another job: 422
+-- QuarantinedError           this very input has killed workers lately: 422
+-- OverloadedError            the queue or the arena is full, or the deadline cannot be met: 429
|   +-- OverShareError         its key or address has its share of what clients share: 429
|   +-- OverQuotaError         its API key has as many jobs, or bytes of them, as it may: 429
+-- ReaderTooSlowError         the client does not read a stream as fast as it comes: 408
+-- ModelFailedError           the model raised on this input: 500
|   +-- NonFiniteOutputError   its output has NaN or an infinity in it: 500
+-- WorkerCrashedError         the workers that computed this input died: 500
+-- StreamBrokenError          the worker died after the first part of a stream: 500
+-- RestartFailedError         a worker could not be replaced: 500
+-- NotSavedError              a change could not be kept for the next start: 507
+-- StoreFullError             the store of jobs has no room: 507
+-- UnavailableError           starting, draining, or no healthy replica: 503
+-- GivenUpError               the model can never be served here: 503, and no use in another try
+-- DeadlineExceededError      the deadline passed first: 504
+-- StreamGapError             the next part of a stream did not come in time: 504
+-- StreamTooLongError         a stream went on for too long, or had too many parts: 500
+-- InternalError              a mistake of this service: 500
CancelledByClientError         the client hung up; nobody is left to be told
StartError                     the service cannot start, or did not come up
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class StartError(Exception):
    """The service cannot start, or did not come up; the message says why and what to do."""


class ServiceError(Exception):
    """The base of errors that a caller gets instead of a prediction.

    Attributes:
        code: A stable, machine-readable name.
        message: One or two sentences for a person: what was wrong, where, and what to do.
        retry_after_s: Whole seconds after which another try makes sense, or None.
        figures: Figures that show what was wrong, if there are any.
        parts: The parts of a stream that came before it, as JSON, if nobody has read them.
        num_parts: The number of parts that came before it.
    """

    code = "error"
    figures: "Mapping[str, object] | None" = None
    parts: "Sequence[bytes]" = ()
    num_parts = 0

    def __init__(self, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class BadRequestError(ServiceError):
    """The request cannot be read."""

    code = "bad_request"


class UnknownModelError(ServiceError):
    """No model of that name is served here."""

    code = "unknown_model"
    is_version = False
    """The model is served, but not the version that the call asks for."""


class UnknownJobError(ServiceError):
    """There is no job of that id, or it belongs to another key."""

    code = "unknown_job"


class SlowBodyError(ServiceError):
    """The body did not arrive before the deadline."""

    code = "slow_body"


class ConflictError(ServiceError):
    """Another operation is running, and must end first."""

    code = "conflict"


class TooLargeError(ServiceError):
    """A body, or a part of one, is too large."""

    code = "too_large"


class NotAcceptableError(ServiceError):
    """No form that `Accept` allows can carry the answer."""

    code = "not_acceptable"


class UnsupportedTypeError(ServiceError):
    """No codec reads this content type, or this encoding."""

    code = "unsupported_type"
    is_encoding = False
    """It is the `Content-Encoding`."""


class InvalidInputError(ServiceError):
    """The input was read, but the model cannot take it."""

    code = "invalid_input"


class VersionRefusedError(ServiceError):
    """A version of a model cannot be loaded, or is not good enough to serve."""

    code = "version_refused"


class IdempotencyError(ServiceError):
    """The call has the idempotency key or the id of a job that another call has made."""

    code = "idempotency_mismatch"


class QuarantinedError(ServiceError):
    """Workers have died of this very input, so it is not tried for a while."""

    code = "quarantined"


class OverloadedError(ServiceError):
    """There is no room or no time for this request now."""

    code = "overloaded"


class OverShareError(OverloadedError):
    """The key or the address of this request has its share, and others may need the rest."""

    code = "over_share"


class OverQuotaError(OverloadedError):
    """The key of this request has all the jobs, or bytes of jobs, that a key may have."""

    code = "over_quota"


class ReaderTooSlowError(ServiceError):
    """The client reads a stream more slowly than the model makes it."""

    code = "reader_too_slow"


class ModelFailedError(ServiceError):
    """The model raised an error on this input."""

    code = "model_error"


class NonFiniteOutputError(ModelFailedError):
    """The model's output for this input has NaN or infinity in it, against its promise."""

    code = "non_finite_output"


class WorkerCrashedError(ServiceError):
    """Each worker that computed this input alone died of it."""

    code = "worker_crashed"


class StreamBrokenError(ServiceError):
    """The worker of a stream died after the first part: those before are all there is."""

    code = "stream_broken"


class StreamGapError(ServiceError):
    """The next part of a stream did not come in time."""

    code = "stream_gap"


class StreamTooLongError(ServiceError):
    """A stream went on for longer, or had more parts, than it may."""

    code = "stream_too_long"


class RestartFailedError(ServiceError):
    """A requested restart failed; the message says why, and which workers serve on."""

    code = "restart_failed"


class NotSavedError(ServiceError):
    """A change of a model was not made, since it could not be written to the state file."""

    code = "not_saved"


class StoreFullError(ServiceError):
    """The store of jobs has no room left, such as on a full disk; nothing was accepted."""

    code = "store_full"


class UnavailableError(ServiceError):
    """No replica can take the request: the service is starting or draining, or lost its workers."""

    code = "unavailable"


class GivenUpError(ServiceError):
    """No worker of the model can be started, and none will be tried again."""

    code = "given_up"


class DeadlineExceededError(ServiceError):
    """The deadline passed before there was an answer."""

    code = "deadline_exceeded"


class InternalError(ServiceError):
    """A mistake of this service. Its log explains it under the id of the request."""

    code = "internal_error"


class CancelledByClientError(ServiceError):
    """The client hung up before there was an answer."""

    code = "cancelled"
