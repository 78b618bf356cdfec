"""Requests: who gets in, how long they wait, which batch they join, and what the caller is told."""

if __name__ == "service":
    raise ImportError(
        "write `inferpool.service` to import this. If you have a package `service` of your own, "
        "give it an __init__.py, so that Python takes yours"
    )
