"""What can go wrong with a prediction, one tree for both clients.

InferpoolError
+-- UnsendableError             this input cannot be sent; nothing was asked
+-- ConnectError                no connection, or it broke before there was an answer
+-- ProtocolError               what came back is not an answer of inferpool's
+-- DeadlineExceededError       no answer in time: the service says so (504), or our own clock
+-- AnswerError                 the service said no; `code` says why
    +-- BadRequestError         the request cannot be read: 400
    +-- UnauthorizedError       no key, or none that is known: 401
    +-- ForbiddenError          the key is for something else: 403
    +-- NotFoundError           nothing is at this path: 404
    |   +-- UnknownModelError   no model of that name
    +-- NotAcceptableError      these outputs have no such form: 406
    +-- SlowBodyError           the body did not arrive in time: 408
    +-- TooLargeError           a body, or a part of one, over its limit: 413
    +-- UnsupportedTypeError    a content type that the service does not read: 415
    +-- InvalidInputError       the model cannot take this input: 422
    |   +-- QuarantinedError    it has killed workers lately
    +-- OverloadedError         no room, or no time, for it now: 429, with `retry_after_s`
    +-- UnavailableError        starting, draining, no worker, or a proxy without one: 502, 503
    |   +-- GivenUpError        the model can never be served there, and another try is of no use
    +-- ModelFailedError        the model raised on this input: 500
    |   +-- NonFiniteOutputError  it yielded NaN or an infinity
    +-- WorkerCrashedError      workers died with this input alone: 500
    +-- InternalError           a mistake of the service: any other 5xx

Codes that are not known here are told by their status.
"""

from collections.abc import Iterator, Sequence


class InferpoolError(Exception):
    """There is no prediction.

    Attributes:
        detail: What was wrong, for a person.
        code: A stable name, the service's own where it has answered.
        status: Of the answer; None where there was none.
        request_id: What to look for in the service's log; None where nothing was asked.
        is_retryable: The same request may succeed later. The client has tried again already, as
            far as its settings and the deadline let it.
        retry_after_s: When another try makes sense, if the service said.
        errors: Of each instance, where there were several and all failed.
        index: Of the input in `predict_many`, or of the instance in `Prediction.errors`.
        num_attempts: How often it was asked.
    """

    code = "error"
    is_retryable = False

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
        """The detail, with what helps to find it."""
        facts = [str(self.status)] if self.status else []
        facts.append(self.code)
        if self.request_id:
            facts.append(f"request {self.request_id}")
        return f"{self.detail} [{', '.join(facts)}]"


class UnsendableError(InferpoolError):
    """This input cannot be sent; nothing was asked."""

    code = "input"


class ConnectError(InferpoolError):
    """There is no connection, or it broke before there was an answer."""

    code = "connect"
    is_retryable = True


class ProtocolError(InferpoolError):
    """What came back is not an answer of inferpool's."""

    code = "protocol"


class DeadlineExceededError(InferpoolError):
    """There was no answer in time. Without `status`, the client's own clock says so."""

    code = "deadline_exceeded"
    is_retryable = True


class AnswerError(InferpoolError):
    """The service said no."""


class BadRequestError(AnswerError):
    """The request cannot be read."""

    code = "bad_request"


class UnauthorizedError(AnswerError):
    """There is no key, or none that is known."""

    code = "unauthorized"


class ForbiddenError(AnswerError):
    """The key is for something else."""

    code = "forbidden"


class NotFoundError(AnswerError):
    """Nothing is at this path: is the URL that of the service?"""

    code = "not_found"


class UnknownModelError(NotFoundError):
    """No model of that name is served there."""

    code = "unknown_model"


class NotAcceptableError(AnswerError):
    """The outputs cannot be had in this form."""

    code = "not_acceptable"


class SlowBodyError(AnswerError):
    """The body did not arrive before the deadline."""

    code = "slow_body"
    is_retryable = True


class TooLargeError(AnswerError):
    """A body, or a part of one, is over its limit."""

    code = "too_large"


class UnsupportedTypeError(AnswerError):
    """The service does not read this content type."""

    code = "unsupported_type"


class InvalidInputError(AnswerError):
    """The input was read, and the model cannot take it."""

    code = "invalid_input"


class QuarantinedError(InvalidInputError):
    """Workers have died of this very input, so it is not tried again for a while."""

    code = "quarantined"


class OverloadedError(AnswerError):
    """There is no room, or no time, for this request now."""

    code = "overloaded"
    is_retryable = True


class UnavailableError(AnswerError):
    """Nobody there can take the request: the service starts, drains, or has lost its workers."""

    code = "unavailable"
    is_retryable = True


class GivenUpError(UnavailableError):
    """No worker of the model can be started there, and none will be tried again."""

    code = "given_up"
    is_retryable = False


class ModelFailedError(AnswerError):
    """The model raised an error on this input."""

    code = "model_error"


class NonFiniteOutputError(ModelFailedError):
    """The model's output for this input has NaN or an infinity in it."""

    code = "non_finite_output"


class WorkerCrashedError(AnswerError):
    """Each worker that worked on this input alone died of it."""

    code = "worker_crashed"


class InternalError(AnswerError):
    """A mistake of the service, or of what stands before it."""

    code = "internal_error"


def error_class(code: str, status: int) -> type[InferpoolError]:
    """The class for an answer: by its code, else by its status."""
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
    413: TooLargeError,
    415: UnsupportedTypeError,
    422: InvalidInputError,
    429: OverloadedError,
    502: UnavailableError,
    503: UnavailableError,
    504: DeadlineExceededError,
}
