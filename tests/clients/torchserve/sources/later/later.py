"""A handler of a model that is registered while the server runs."""


def handle(data, context):
    """Answer with the number of rows."""
    return None if data is None else [str(len(data)) for _ in data]
