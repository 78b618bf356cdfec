"""`inferpool.Content`: an answer of a kind of its own, such as a picture. Imports no torch."""

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

_MAX_HEADERS = 16
_MAX_HEADER_BYTES = 4096
_MAX_TYPE_CHARS = 255
_NOT_IN_JSON = "which stands for a whole answer: `render` returns it by itself, not inside a value"
_NONE: Mapping[str, str] = MappingProxyType({})
_TOKEN = r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"
_MEDIA_TYPE = re.compile(
    rf"(?!\*){_TOKEN}/(?!\*){_TOKEN}(?:[ \t]*;[ \t]*{_TOKEN}=(?:{_TOKEN}|\"[ !#-\[\]-~]*\"))*"
)
"""A media type with its parameters (RFC 9110, 8.3.1), and no range such as image/*."""
_NAME = re.compile(_TOKEN)
_VALUE = re.compile(r"[ -~]*")
_REFUSED = frozenset(
    (
        # Of one connection (RFC 9110, 7.6.1), and of the framing of messages.
        *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"),
        *("upgrade", "proxy-authenticate", "proxy-authorization", "http2-settings"),
        # They act on the client's browser beyond this answer.
        *("set-cookie", "set-cookie2", "location", "refresh", "clear-site-data", "alt-svc"),
        *("service-worker-allowed", "strict-transport-security", "www-authenticate", "nel"),
        *("report-to", "reporting-endpoints"),
        # The service says these itself.
        *("allow", "date", "link", "preference-applied", "referrer-policy", "retry-after"),
        *("server", "server-timing", "traceparent", "tracestate", "vary", "x-request-id"),
        *("x-content-type-options", "x-frame-options", "x-model-version"),
    )
)
_REFUSED_BEGINNINGS = ("access-control-", "content-", "cross-origin-", "x-tensor-")


class Content:
    """An answer that is sent as it is, with a media type of its own.

    >>> return inferpool.Content(png, "image/png")

    It is no struct and no dataclass, so that JSON has no form for it.
    """

    __slots__ = ("data", "headers", "media_type")

    json_hint = _NOT_IN_JSON

    def __init__(self, data: bytes, media_type: str, headers: Mapping[str, str] = _NONE) -> None:
        """Store an answer.

        Args:
            data: All of its bytes.
            media_type: Its type, such as "image/png" or "text/html; charset=utf-8".
            headers: Further headers of the answer: at most 16, of 4 KiB together. The service
                refuses those that say something about the connection, the form of the content or
                the client's browser, and those that it sends itself.
        """
        self.data = data
        self.media_type = media_type
        self.headers = headers

    def __repr__(self) -> str:
        """Show its type and size."""
        size = len(self.data) if isinstance(self.data, bytes) else type(self.data).__name__
        return f"Content({self.media_type!r}, {size})"

    @property
    def fault(self) -> str:
        """Complaint about what cannot be sent; empty if all can."""
        data: object = self.data
        if not isinstance(data, bytes | bytearray | memoryview):
            return f"the data of a Content must be bytes, not {type(data).__name__}"
        if fault := type_fault(self.media_type):
            return f"the media_type of a Content {fault}"
        if bare_type(self.media_type) == "application/json":
            return (
                "a Content cannot be of the media type application/json: return the value itself, "
                "or JSON that is rendered already as msgspec.Raw"
            )
        headers: object = self.headers
        if not isinstance(headers, Mapping):
            return f"the headers of a Content must be a dict, not {type(headers).__name__}"
        return next(_header_faults(headers), "")


def type_fault(media_type: object) -> str:
    """Return what is wrong with a media type; empty if nothing is."""
    if not isinstance(media_type, str):
        return f"must be a string, not {type(media_type).__name__}"
    if len(media_type) > _MAX_TYPE_CHARS or not _MEDIA_TYPE.fullmatch(media_type):
        return f"must be one type such as image/png, not {media_type[:80]!r}"
    return ""


def bare_type(media_type: str) -> str:
    """Return a media type without its parameters, in lower case."""
    return media_type.partition(";")[0].strip().lower()


def bare_types(media_types: Sequence[str]) -> tuple[str, ...]:
    """Return the types that a model's class declares.

    Raises:
        ValueError: They are no media types; says what they must be.
    """
    if isinstance(media_types, str):
        raise ValueError(f'must be a list such as ("{media_types[:80]}",), not a string')
    for each in media_types:
        if fault := type_fault(each):
            raise ValueError(f"{fault} in it" if isinstance(each, str) else fault)
    return tuple(dict.fromkeys(map(bare_type, media_types)))


def _header_faults(headers: Mapping[object, object]) -> Iterator[str]:
    num_bytes = 0
    if len(headers) > _MAX_HEADERS:
        yield f"a Content has {len(headers)} headers; at most {_MAX_HEADERS} are sent"
    for name, value in headers.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            yield f"a Content has a header {str(name)[:80]!r}, which is no name of a header"
            return
        shown = f"the header {name[:80]!r} of a Content"
        lower = name.lower()
        if lower in _REFUSED or lower.startswith(_REFUSED_BEGINNINGS):
            yield f"{shown} is not a model's to set"
        if not isinstance(value, str) or not _VALUE.fullmatch(value):
            yield f"{shown} must be a string of printable ASCII characters"
            return
        num_bytes += len(name) + len(value)
    if num_bytes > _MAX_HEADER_BYTES:
        yield f"the headers of a Content have {num_bytes:,} bytes; at most {_MAX_HEADER_BYTES:,}"
