"""The service: takes HTTP calls, queues and batches their instances, and answers them."""

if __name__ == "service":
    raise ImportError(
        "write `inferpool.service` to import this. If you have a package `service` of your own, "
        "give it an __init__.py, so that Python takes yours"
    )
