"""Errors of workers, for the front end to act on.

WorkerError
+-- WorkerStartError           an incarnation never became ready; `permanent` if none ever will
|   +-- FilesChangedError      its model files differ from those of the other workers
+-- WorkerLostError            an incarnation, or its whole host, ended while it held a batch
"""


class WorkerError(Exception):
    """A worker failed."""


class WorkerStartError(WorkerError):
    """An incarnation did not become ready.

    Attributes:
        permanent: True if no restart can help (a wrong model, bad weights).
        traceback: Traceback of the error that the model raised; empty for other errors.
    """

    def __init__(self, message: str, *, permanent: bool, traceback: str = "") -> None:
        super().__init__(message)
        self.permanent = permanent
        self.traceback = traceback


class FilesChangedError(WorkerStartError):
    """The model's files have changed since the other workers loaded them."""

    def __init__(self, message: str) -> None:
        super().__init__(message, permanent=False)


class WorkerLostError(WorkerError):
    """A worker has certainly ended, and a batch that it held has no answer.

    The end of a local worker is certain once its exit is confirmed, and that of a worker on another
    host once the connection is closed or its lease has run out.

    Attributes:
        started: True if it had begun the batch, which may have caused the end.
        with_host: True if its whole host was lost, which no input is blamed for.
    """

    def __init__(self, reason: str, *, started: bool, with_host: bool = False) -> None:
        super().__init__(reason)
        self.started = started
        self.with_host = with_host
