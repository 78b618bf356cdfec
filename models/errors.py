"""What can go wrong with a model or with an input to it.

    ModelError                     the model cannot be had: permanent, no restart mends it
    +-- SourceError                the source names nothing that can be loaded
    +-- CheckpointError            the weights are unreadable, unsafe, or belong to another network
    InputError                     this input is at fault; the model and its neighbours are well

Imported by the front end too, so nothing here imports torch.
"""


class ModelError(Exception):
    """The model cannot be loaded, and trying again will not help."""


class SourceError(ModelError):
    """The source names nothing that can be loaded: no such module, class, file or network."""


class CheckpointError(ModelError):
    """A file of weights is missing, unreadable, unsafe to load, or does not fit the network."""


class InputError(ValueError):
    """One input is invalid for this model. Raised by `preprocess` or `render`; answered with 422.

    The message is shown to the caller: it says what was wrong, where, and what would be right.
    """
