"""What can go wrong with a worker, as values that the front end acts on.

WorkerError
+-- WorkerStartError           an incarnation never became ready; `permanent` if none ever will
|   +-- FilesChangedError      it would answer differently from the others
+-- WorkerLostError            an incarnation ended while it held a batch
"""


class WorkerError(Exception):
    """A worker failed."""


class WorkerStartError(WorkerError):
    """An incarnation did not become ready.

    Attributes:
        permanent: No restart can mend it (a wrong model, bad weights).
        traceback: Of what the model raised; empty where it was something else.
    """

    def __init__(self, message: str, *, permanent: bool, traceback: str = "") -> None:
        super().__init__(message)
        self.permanent = permanent
        self.traceback = traceback


class FilesChangedError(WorkerStartError):
    """The model's files have changed since it was loaded for the other workers."""

    def __init__(self, message: str) -> None:
        super().__init__(message, permanent=False)


class WorkerLostError(WorkerError):
    """An incarnation is gone, its exit is confirmed, and a batch that it held has no answer.

    Attributes:
        started: It had begun to work on the batch, so the batch may be what ended it.
    """

    def __init__(self, reason: str, *, started: bool) -> None:
        super().__init__(reason)
        self.started = started
