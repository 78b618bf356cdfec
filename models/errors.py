"""Errors of a model, and of an input to it.

    ModelError
    +-- SourceError
    +-- CheckpointError
    +-- BadReturnError
    +-- DataError
    InputError
    Answered
    RankError
    PassesThrough
    +-- OutOfStepError

Imported by the front end too, so nothing here imports torch.
"""


class ModelError(Exception):
    """The model cannot be loaded, and trying again will not help."""


class SourceError(ModelError):
    """The source names nothing that can be loaded: no such module, class, file or network."""


class CheckpointError(ModelError):
    """A file of weights is missing, unreadable, unsafe to load, or does not fit the network."""


class BadReturnError(ModelError):
    """A method of the model returned the wrong thing; the message says which, and where."""


class DataError(ModelError):
    """The images of a training run cannot be used; the message says which, and what to do."""


class RankError(Exception):
    """Another rank of a split replica raised an error, and can compute the next batch."""

    def __init__(self, rank: int, text: str, *, is_out_of_memory: bool) -> None:
        super().__init__(f"rank {rank}: {text}")
        self.rank = rank
        self.is_out_of_memory = is_out_of_memory
        """The rank lacked memory: a smaller batch may succeed."""


class PassesThrough(BaseException):
    """An error of ours that passes through code of a model, and must not count as the model's own.

    It is no `Exception`, since the model's code may catch those.
    """


class OutOfStepError(PassesThrough):
    """A rank of a split replica raised while others may wait for it in a collective or a transfer.

    Only the end of its process frees them.
    """


class InputError(ValueError):
    """One input is invalid for this model; `preprocess` and `render` raise it.

    The client gets 422 with the message, which says what was wrong, where, and what would be right.
    """


class Answered(Exception):  # noqa: N818 - it is no error
    """Raised by `preprocess`: the answer is known without the network, such as a text's tokens."""

    def __init__(self, value: object) -> None:
        """Store the answer, which is a value that JSON can say."""
        super().__init__()
        self.value = value
