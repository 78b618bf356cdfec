"""Checks URLs of a service or a collector, and explains their problems.

The texts contain no part of the URL, since it may have a password in it.
"""

import re
from urllib.parse import urlsplit

DEFAULT_URL = "http://127.0.0.1:8000"
"""The URL of a service on this host."""
_USER_INFO = re.compile(r"(?<=://).*@|(?<![^\s'\"])[^\s'\":]*:(?!//).*@", re.DOTALL)
"""The user and password of a URL, even if it has no scheme or its password is not
percent-encoded."""
_MAX_PORT = 65535
_PORT = re.compile(r"(^|@)[^:@]*(:\d*)?$")
"""The end of the part before the path, with a numeric port or without one."""


def without_password(text: str) -> str:
    """Return a URL, even an invalid one, without its user and password."""
    before, at, rest = text.rpartition("@")  # without one, the pattern would search again and again
    return _USER_INFO.sub("", before + at) + rest


def problem_of_url(text: str) -> str:
    """Return why HTTP cannot use a text as a URL, for a person; empty if it can."""
    import httpx  # here, since every start of the command imports this module

    scheme, _, rest = text.partition("://")
    if not text.isprintable() or " " in text:
        return "it has spaces or control characters"
    if scheme.lower() not in ("http", "https"):
        return "it begins with neither http:// nor https://"
    place, *more = re.split("[/?#]", rest, maxsplit=1)
    try:
        url = httpx.URL(text)
        host = url.host
        url.raw_host.decode("ascii").encode("idna")  # like a look-up
        urlsplit(f"//{place.rpartition('@')[2]}")  # it checks brackets
    except (httpx.InvalidURL, ValueError):  # its text may show a part of the password
        if "@" in "".join(more):
            return "write /, ? and # in its password as %2F, %3F and %23"
        if "[" not in place and not _PORT.search(place):
            return "its port is not a number"
        return "its host name is not valid"
    if not host:
        return "it names no host"
    if url.port is not None and not 1 <= url.port <= _MAX_PORT:
        return "its port is not from 1 to 65535"
    return ""


def problem_of_address(text: str) -> str:
    """Return why a text is not a URL of a service, for a person; empty if it is one."""
    if problem := problem_of_url(text):
        return problem
    return "it has a query or a fragment" if "?" in text or "#" in text else ""
