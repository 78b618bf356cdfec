"""The standard variables of OpenTelemetry, as settings of ours.

https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/ and, for those of
the exporter, https://opentelemetry.io/docs/specs/otel/protocol/exporter/.
"""

import base64
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from inferpool.service.client.urls import problem_of_url, without_password

HEADER_VARIABLES = (
    "OTEL_EXPORTER_OTLP_HEADERS",
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
    "INFERPOOL_TRACE_HEADERS",
)
"""Variables that may hold a collector's key. Each overrides the one before."""
TRACES_PATH = "/v1/traces"
ENDPOINT_VARIABLES = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "INFERPOOL_TRACE_ENDPOINT",
)
"""Variables with a collector's URL, which may hold a password."""
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_USER_INFO = re.compile(r"(?P<scheme>[^:/?#]+://)(?P<user_info>[^/?#]*)@")
"""The user and password of a URL (RFC 3986, 3.2.1)."""
_DECIDES = {"always_on": 1.0, "always_off": 0.0}
_BY_RATIO = "traceidratio"
_PARENT_BASED = "parentbased_"


@dataclass(frozen=True, slots=True, repr=False)
class TraceHeaders:
    """Headers for a collector, which nothing that prints settings can print."""

    pairs: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """Return how many there are, for people, and nothing more."""
        return f"{len(self.pairs)} hidden" if self.pairs else "none"

    __repr__ = __str__


VariableValue = tuple[str, object, str]
"""A setting, the value that a variable gives it, and the variable."""


def values_from(environ: Mapping[str, str]) -> Iterator[VariableValue]:
    """Yield the values that the variables give, the decisive one of a setting last.

    Raises:
        ValueError: A variable is invalid; the message begins with its name.
    """
    checks: Sequence[tuple[str, str, Callable[[str], object]]] = (
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "trace_endpoint", _check_endpoint),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "trace_endpoint", _check_endpoint),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "trace_certificate", str),
        ("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "trace_certificate", str),
        ("OTEL_SERVICE_NAME", "trace_service_name", str),
        ("OTEL_RESOURCE_ATTRIBUTES", "trace_resource", pairs_of),
    )
    for variable, setting, check in checks:
        if value := environ.get(variable):
            try:
                check(value)
            except ValueError as error:
                told = without_password(value)[:80]
                raise ValueError(f"{variable}: {told!r} {error}") from None
            is_base = variable == "OTEL_EXPORTER_OTLP_ENDPOINT"
            yield setting, value.rstrip("/") + TRACES_PATH if is_base else value, variable
    for variable in HEADER_VARIABLES:
        if value := environ.get(variable):
            yield "trace_headers", headers_of(value, variable), variable
    yield from _sampling(environ)


def is_switched_off(environ: Mapping[str, str]) -> str:
    """Return the variable that switches tracing off; empty if there is none."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return "OTEL_SDK_DISABLED"
    if environ.get("OTEL_TRACES_EXPORTER", "").lower() == "none":
        return "OTEL_TRACES_EXPORTER"
    return ""


def headers_of(text: str, place: str) -> TraceHeaders:
    """Parse headers of the form `name=value,name=value`, values percent-encoded (W3C Baggage).

    Raises:
        ValueError: They have another form; the message shows only the place.
    """
    try:
        pairs = pairs_of(text)
    except ValueError:
        raise ValueError(f"{place}: is not of the form name=value,name=value") from None
    for name, value in pairs.items():
        if not _HEADER_NAME.fullmatch(name) or not value.isprintable() or not value.isascii():
            raise ValueError(f"{place}: has a header that cannot be sent")
    return TraceHeaders(tuple((name.lower(), value) for name, value in pairs.items()))


def pairs_of(text: str) -> dict[str, str]:
    """Parse `name=value,name=value`, values percent-encoded.

    Raises:
        ValueError: The text has another form.
    """
    found = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise ValueError("is not of the form name=value,name=value")
        found[name.strip()] = unquote(value.strip())
    return found


def endpoint_of(text: str) -> str:
    """Return the URL to post spans to; without a path it gets the standard one.

    Raises:
        ValueError: It is not a URL of a collector.
    """
    if problem := problem_of_url(text):
        raise ValueError(f"is not a URL such as http://localhost:4318: {problem}")
    parts = urlsplit(text)
    assert parted(text)[0] == text, "passwords belong into the headers"
    return text if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}{TRACES_PATH}"


def parted(endpoint: str) -> tuple[str, TraceHeaders]:
    """Split a URL into the part without user and password, and the header that says the same.

    Headers are hidden wherever settings are shown.
    """
    found = _USER_INFO.match(endpoint)
    if found is None:
        return endpoint, TraceHeaders()
    user, _, password = found["user_info"].partition(":")
    told = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
    bare = found["scheme"] + endpoint[found.end() :]
    return bare, TraceHeaders((("authorization", f"Basic {told}"),))


def asks_for_traces(environ: Mapping[str, str]) -> bool:
    """Return whether a variable says where traces go."""
    return any(environ.get(variable) for variable in ENDPOINT_VARIABLES)


def _check_endpoint(text: str) -> None:
    endpoint_of(parted(text)[0])


def _sampling(environ: Mapping[str, str]) -> Iterator[VariableValue]:
    variable = "OTEL_TRACES_SAMPLER"
    sampler = environ.get(variable, "").lower()
    if not sampler:
        return
    kind = sampler.removeprefix(_PARENT_BASED)
    if kind not in _DECIDES and kind != _BY_RATIO:
        if not asks_for_traces(environ):
            return  # it is meant for others on this host
        known = ", ".join([*_DECIDES, _BY_RATIO])
        raise ValueError(
            f"{variable}: {sampler[:80]!r} is not one of {known}, or one of these behind "
            f"{_PARENT_BASED}"
        )
    yield "trace_parent_based", sampler.startswith(_PARENT_BASED), variable
    if kind != _BY_RATIO:
        yield "trace_sample_ratio", _DECIDES[kind], variable
    elif argument := environ.get("OTEL_TRACES_SAMPLER_ARG"):
        variable = "OTEL_TRACES_SAMPLER_ARG"
        try:
            ratio = float(argument)
        except ValueError:
            raise ValueError(f"{variable}: {argument[:80]!r} is not a number") from None
        if not 0 <= ratio <= 1:
            raise ValueError(f"{variable}: {argument[:80]!r} is not from 0 to 1")
        yield "trace_sample_ratio", ratio, variable
