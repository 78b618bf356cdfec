"""What can go wrong before or beside the load itself."""


class LoadError(Exception):
    """The run cannot go on; the message says what to do about it."""
