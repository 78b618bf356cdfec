"""Says why a service cannot be reached, and what to do about it."""

import httpx


def why_unreached(
    error: httpx.TransportError, url: str, *, place: str, command: str, flag: str = "--url"
) -> str:
    """Return a readable text about a call without an answer.

    Args:
        error: The error of the call.
        url: Address of the service.
        place: The address without its password.
        command: The command.
        flag: Its flag that names another address.
    """
    text = str(error) or type(error).__name__
    if isinstance(error, httpx.TimeoutException):
        return f"{place} does not answer"
    if _is_untrusted(error):
        return (
            f"the certificate of {place} is not trusted ({text}): --ca-file PATH names one to "
            "trust, --insecure trusts any"
        )
    if _is_without_tls(error):
        return f"{place} does not speak TLS; is it http?"
    if isinstance(error, httpx.RemoteProtocolError | httpx.UnsupportedProtocol):
        cause = "; is it https?" if url.startswith("http:") else ""
        return f"{place} closed the connection ({text}){cause}"
    if isinstance(error, httpx.ConnectError):
        return (
            f"no service answers at {place} ({text}). Start one with `inferpool serve`, or name "
            f"another: `{command} {flag} http://HOST:PORT`"
        )
    return f"the connection to {place} was lost ({text})"


def is_hopeless(error: httpx.TransportError) -> bool:
    """Return whether another try would have the same error."""
    return _is_untrusted(error) or _is_without_tls(error)


def _is_untrusted(error: httpx.TransportError) -> bool:
    return "CERTIFICATE_VERIFY_FAILED" in str(error)


def _is_without_tls(error: httpx.TransportError) -> bool:
    """Return whether TLS was used with a server that has none."""
    return "WRONG_VERSION_NUMBER" in str(error)
