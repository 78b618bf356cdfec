"""Reads addresses of cluster ports."""


def address_of(text: str) -> tuple[str, int]:
    """Return the host and the port of `HOST:PORT`, with brackets around an IPv6 address.

    Raises:
        ValueError: The text has another form.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"{text[:80]!r} is not HOST:PORT")
    return host, int(port)
