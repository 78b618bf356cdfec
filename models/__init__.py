"""Tensors: what a model is, where it comes from, how inputs become batches. Knows no process."""

if __name__ == "models":
    raise ImportError(
        "write `inferpool.models` to import this. If you have a package `models` of your own, "
        "give it an __init__.py, so that Python takes yours"
    )
