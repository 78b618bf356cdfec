"""Says why a service cannot be reached or does not do as asked, and what to do about it."""

from typing import Any

import httpx
import msgspec

from .connecting import is_untrusted
from .urls import without_password


def why_unreached(
    error: httpx.TransportError, url: str, *, command: str, flag: str = "--url"
) -> str:
    """Return a readable text about a call without an answer.

    Args:
        error: The error of the call.
        url: Address of the service.
        command: The command.
        flag: Its flag that names another address.
    """
    text, place = str(error) or type(error).__name__, without_password(url)
    if isinstance(error, httpx.TimeoutException):
        return f"{place} does not answer"
    if is_untrusted(error):
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


def problem_in(body: bytes) -> dict[str, Any]:
    """Return the problem document in an answer; empty if there is none."""
    try:
        problem = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return problem if isinstance(problem, dict) else {}


def is_hopeless(error: httpx.TransportError) -> bool:
    """Return whether another try would have the same error."""
    return is_untrusted(error) or _is_without_tls(error)


def _is_without_tls(error: httpx.TransportError) -> bool:
    """Return whether TLS was used with a server that has none."""
    return "WRONG_VERSION_NUMBER" in str(error)
