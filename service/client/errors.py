"""Errors of both clients.

InferpoolError
+-- UnsendableError             the input cannot be sent; the service was not asked
+-- ConnectError                no connection, or it broke before the answer
+-- ProtocolError               the answer is not one of inferpool's
+-- DeadlineExceededError       no answer in time, by the service's clock (504) or the client's
+-- AnswerError                 the service refused; `code` says why
    +-- BadRequestError         400: the service cannot read the request
    +-- UnauthorizedError       401: no key, or an unknown one
    +-- ForbiddenError          403: the key is not for this
    +-- NotFoundError           404: nothing is at this path
    |   +-- UnknownModelError   the service has no model of this name
    |   +-- UnknownJobError     it has no job of this id, or not for this key
    +-- NotAcceptableError      406: the outputs have no such format
    +-- SlowBodyError           408: the body did not arrive in time
    +-- ReaderTooSlowError      408: the parts of a stream were not read in time
    +-- ConflictError           409: something else must end first, such as the job itself
    +-- TooLargeError           413: the body, or a part of it, is over a limit
    +-- UnsupportedTypeError    415: the service does not read this content type
    +-- InvalidInputError       422: the model cannot take this input
    |   +-- QuarantinedError    the input has killed workers lately
    +-- IdempotencyError        422: another job was made with this idempotency key or id
    +-- OverloadedError         429: too busy now; see `retry_after_s`
    |   +-- OverShareError      this API key has its share of the queue, or of the memory
    |   +-- OverQuotaError      this API key has all the jobs, or bytes of them, that it may have
    +-- UnavailableError        502, 503: starting, draining, or no worker
    |   +-- GivenUpError        the model cannot be started; a retry does not help
    +-- ModelFailedError        500: the model raised an error on this input
    |   +-- NonFiniteOutputError  its output has NaN or an infinity
    +-- WorkerCrashedError      500: workers died of this input alone
    +-- StreamBrokenError       500: the worker died after the first part of a stream
    +-- StreamGapError          504: the next part of a stream did not come in time
    +-- StreamTooLongError      500: a stream was longer than it may be
    +-- StoreFullError          507: the service has no room for another job
    +-- JobCancelledError       the job was cancelled before it came to this input
    +-- InternalError           any other 5xx: a mistake of the service

The status decides the class of an unknown code.
"""

from collections.abc import Iterator, Sequence


class InferpoolError(Exception):
    """Base class of all errors of the clients.

    Attributes:
        detail: Description for a person.
        code: Stable name of the error; the service's own code if it answered.
        status: HTTP status of the answer; None if there was none.
        request_id: ID to look for in the service's log; None if the service was not asked.
        is_retryable: True if the same request may succeed later. The client has already retried
            it, as far as its settings and the deadline allow.
        retry_after_s: Seconds to wait before a retry, if the service said so.
        errors: Errors of all instances, if there were several and all failed.
        index: Index of the input in `predict_many`, or of the instance in `Prediction.errors`.
        num_attempts: Number of times the service was asked.
        parts: Parts of a stream that came before it, if `predict` asked for a stream.
    """

    code = "error"
    is_retryable = False
    parts: Sequence[object] = ()

    def __init__(
        self,
        detail: str,
        *,
        code: str | None = None,
        status: int | None = None,
        request_id: str | None = None,
        is_retryable: bool | None = None,
        retry_after_s: float | None = None,
        errors: Sequence["InferpoolError"] = (),
        index: int = 0,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.code = code or self.code
        self.status = status
        self.request_id = request_id
        if is_retryable is not None:
            self.is_retryable = is_retryable
        self.retry_after_s = retry_after_s
        self.errors = tuple(errors)
        self.index = index
        self.num_attempts = 0

    def __str__(self) -> str:
        """Return the detail with status, code and request ID."""
        facts = [str(self.status)] if self.status else []
        facts.append(self.code)
        if self.request_id:
            facts.append(f"request {self.request_id}")
        return f"{self.detail} [{', '.join(facts)}]"


class UnsendableError(InferpoolError):
    """The input cannot be sent; the service was not asked."""

    code = "input"


class ConnectError(InferpoolError):
    """There is no connection, or it broke before the answer."""

    code = "connect"
    is_retryable = True


class ProtocolError(InferpoolError):
    """The answer is not one of inferpool's."""

    code = "protocol"


class DeadlineExceededError(InferpoolError):
    """There was no answer in time; without a `status`, by the client's own clock."""

    code = "deadline_exceeded"
    is_retryable = True


class AnswerError(InferpoolError):
    """The service refused."""


class BadRequestError(AnswerError):
    """The service cannot read the request."""

    code = "bad_request"


class UnauthorizedError(AnswerError):
    """There is no key, or an unknown one."""

    code = "unauthorized"


class ForbiddenError(AnswerError):
    """The key is not for this kind of request."""

    code = "forbidden"


class NotFoundError(AnswerError):
    """Nothing is at this path; the URL may not be that of the service."""

    code = "not_found"


class UnknownModelError(NotFoundError):
    """The service has no model of this name."""

    code = "unknown_model"


class UnknownJobError(NotFoundError):
    """The service has no job of this id: it has expired, was deleted, or belongs to another key."""

    code = "unknown_job"


class NotAcceptableError(AnswerError):
    """The outputs have no such format."""

    code = "not_acceptable"


class SlowBodyError(AnswerError):
    """The body did not arrive before the deadline."""

    code = "slow_body"
    is_retryable = True


class ReaderTooSlowError(AnswerError):
    """The parts of a stream were not read as fast as they came."""

    code = "reader_too_slow"
    is_retryable = True


class ConflictError(AnswerError):
    """Something else must end first, such as the job whose whole result was asked for."""

    code = "conflict"
    is_retryable = True


class TooLargeError(AnswerError):
    """The body, or a part of it, is over a limit."""

    code = "too_large"


class UnsupportedTypeError(AnswerError):
    """The service does not read this content type."""

    code = "unsupported_type"


class InvalidInputError(AnswerError):
    """The model cannot take this input."""

    code = "invalid_input"


class QuarantinedError(InvalidInputError):
    """The input has killed workers, so the service refuses it for a while."""

    code = "quarantined"


class IdempotencyError(AnswerError):
    """This idempotency key, or this id, belongs to a job with another body or other options."""

    code = "idempotency_mismatch"


class OverloadedError(AnswerError):
    """The service is too busy for this request now."""

    code = "overloaded"
    is_retryable = True


class OverShareError(OverloadedError):
    """This API key has its share of what the service can hold; others still get some."""

    code = "over_share"


class OverQuotaError(OverloadedError):
    """This API key has all the jobs, or bytes of jobs, that a key may have; delete some."""

    code = "over_quota"


class UnavailableError(AnswerError):
    """The service is starting or draining, or has lost its workers."""

    code = "unavailable"
    is_retryable = True


class GivenUpError(UnavailableError):
    """The service cannot start a worker of the model, and does not try again."""

    code = "given_up"
    is_retryable = False


class ModelFailedError(AnswerError):
    """The model raised an error on this input."""

    code = "model_error"


class NonFiniteOutputError(ModelFailedError):
    """The model's output for this input has NaN or an infinity."""

    code = "non_finite_output"


class WorkerCrashedError(AnswerError):
    """Workers died while they computed this input alone."""

    code = "worker_crashed"


class StreamBrokenError(AnswerError):
    """The worker of a stream died after the first part."""

    code = "stream_broken"
    is_retryable = True


class StreamGapError(AnswerError):
    """The next part of a stream did not come in time."""

    code = "stream_gap"
    is_retryable = True


class StreamTooLongError(AnswerError):
    """A stream went on for longer, or had more parts, than the service allows."""

    code = "stream_too_long"


class StoreFullError(AnswerError):
    """The service has no room for another job, such as on a full disk."""

    code = "store_full"
    is_retryable = True


class JobCancelledError(AnswerError):
    """The job was cancelled before it came to this input."""

    code = "cancelled"


class InternalError(AnswerError):
    """The service, or a proxy before it, made a mistake."""

    code = "internal_error"


def error_class(code: str, status: int) -> type[InferpoolError]:
    """Return the class for an answer: by its code, else by its status."""
    return (
        _BY_CODE.get(code)
        or _BY_STATUS.get(status)
        or (InternalError if status >= 500 else AnswerError)
    )


def _answers(cls: type[InferpoolError]) -> Iterator[type[InferpoolError]]:
    yield cls
    for each in cls.__subclasses__():
        yield from _answers(each)


_BY_CODE = {each.code: each for each in _answers(AnswerError) if each is not AnswerError}
_BY_CODE[DeadlineExceededError.code] = DeadlineExceededError
_BY_STATUS: dict[int, type[InferpoolError]] = {
    400: BadRequestError,
    401: UnauthorizedError,
    403: ForbiddenError,
    404: NotFoundError,
    406: NotAcceptableError,
    408: SlowBodyError,
    409: ConflictError,
    413: TooLargeError,
    415: UnsupportedTypeError,
    422: InvalidInputError,
    429: OverloadedError,
    502: UnavailableError,
    503: UnavailableError,
    504: DeadlineExceededError,
    507: StoreFullError,
}
