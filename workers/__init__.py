"""Batches: processes and devices that compute them, and which are alive. Knows no HTTP."""

if __name__ == "workers":
    raise ImportError(
        "write `inferpool.workers` to import this. If you have a package `workers` of your own, "
        "give it an __init__.py, so that Python takes yours"
    )
