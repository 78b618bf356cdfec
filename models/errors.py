"""What can go wrong with a model or with an input to it.

    ModelError                     the model cannot be had: permanent, no restart mends it
    +-- SourceError                the source names nothing that can be loaded
    +-- CheckpointError            the weights are unreadable, unsafe, or belong to another network
    +-- BadReturnError             a method of the model returned what it must not
    InputError                     this input is at fault; the model and its neighbours are well
    RankError                      another rank of a split replica has failed at a computation
    OutOfStepError                 the ranks of a split replica cannot go on: it must end

Imported by the front end too, so nothing here imports torch.
"""


class ModelError(Exception):
    """The model cannot be loaded, and trying again will not help."""


class SourceError(ModelError):
    """The source names nothing that can be loaded: no such module, class, file or network."""


class CheckpointError(ModelError):
    """A file of weights is missing, unreadable, unsafe to load, or does not fit the network."""


class BadReturnError(ModelError):
    """A method of the model returned something else than `Model` says: names it, and its place."""


class RankError(Exception):
    """Another rank of a split replica raised an error; it is well, and computes what comes next."""

    def __init__(self, rank: int, text: str, *, is_out_of_memory: bool) -> None:
        super().__init__(f"rank {rank}: {text}")
        self.rank = rank
        self.is_out_of_memory = is_out_of_memory
        """It was memory that it lacked, so that a smaller batch may succeed."""


class OutOfStepError(BaseException):
    """A rank of a split replica raised, and others may wait for it in a collective for ever.

    Nothing but the end of its process, and of the group with it, sets them free: so it is no
    `Exception`, which the code of a model might catch.
    """


class InputError(ValueError):
    """One input is invalid for this model. Raised by `preprocess` or `render`; answered with 422.

    The message is shown to the caller: it says what was wrong, where, and what would be right.
    """
