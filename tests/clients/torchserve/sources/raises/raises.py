"""A handler that cannot be loaded."""


def handle(data, context):
    """Raise at once."""
    raise ValueError("a secret of the loading")
