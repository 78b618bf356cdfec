"""Every header that the service reads or sends, as OpenAPI components."""

from collections.abc import Mapping

Json = dict[str, object]

_REQUEST_ID: Json = {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"}
_TRACEPARENT: Json = {
    "type": "string",
    "pattern": "^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$",
}
_DTYPE: Json = {"type": "string"}
_SHAPE: Json = {"type": "string"}


def _taken(name: str, description: str, schema: Json, example: object = None) -> Json:
    header: Json = {"name": name, "in": "header", "description": description, "schema": schema}
    return header if example is None else header | {"example": example}


PARAMETERS: Mapping[str, Json] = {
    "XTimeoutMs": _taken(
        "X-Timeout-Ms",
        "A deadline in milliseconds, counted from arrival; answered with 504 when it passes. More "
        "than the setting `max_timeout_s` means as much as that.",
        {"type": "integer", "minimum": 1},
        2000,
    ),
    "XPriority": _taken(
        "X-Priority",
        "1 goes first, 9 last; 5 if not given.",
        {"type": "integer", "minimum": 1, "maximum": 9},
        1,
    ),
    "XRequestId": _taken(
        "X-Request-ID",
        "Sent back, and in the logs; made if it is absent or has another form.",
        _REQUEST_ID,
        "order-1234",
    ),
    "Traceparent": _taken(
        "traceparent",
        "W3C Trace Context: the trace that this call belongs to. A new one is begun if it is "
        "absent or cannot be read.",
        {"type": "string"},
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    ),
    "Tracestate": _taken(
        "tracestate",
        "W3C Trace Context: passed on beside a valid `traceparent`.",
        {"type": "string"},
        "vendor=opaque",
    ),
    "XTensorDtype": _taken("X-Tensor-Dtype", "As `dtype` in the query.", _DTYPE),
    "XTensorShape": _taken("X-Tensor-Shape", "As `shape` in the query.", _SHAPE),
}
"""What a call to `/predict` may bring. Pages fill an example in when one tries a call, so there are
none that would break another's body."""

OF_ALL = ("XRequestId", "Traceparent", "Tracestate")
"""Those of them that a call to any route may bring."""

HEADERS: Mapping[str, Json] = {
    "XRequestId": {
        "description": "The id of the call: that which it brought, or a new one.",
        "schema": _REQUEST_ID,
    },
    "Traceparent": {
        "description": "W3C Trace Context: the trace of the call, and the span in which it was "
        "answered.",
        "schema": _TRACEPARENT,
    },
    "Tracestate": {
        "description": "W3C Trace Context: that which the call brought.",
        "schema": {"type": "string"},
    },
    "ServerTiming": {
        "description": "Milliseconds: of predictions `queue`, `preprocess` and `inference` "
        "(of several instances the longest), and `total`.",
        "schema": {"type": "string"},
        "example": "queue;dur=0.21, preprocess;dur=2.80, inference;dur=14.31, total;dur=17.95",
    },
    "RetryAfter": {
        "description": "Seconds after which another try makes sense.",
        "schema": {"type": "integer", "minimum": 1},
    },
    "WwwAuthenticate": {
        "description": "How a key is sent.",
        "schema": {"type": "string"},
        "example": 'Bearer realm="inferpool"',
    },
    "Allow": {
        "description": "The methods that there are.",
        "schema": {"type": "string"},
        "example": "POST",
    },
    "XTensorName": {
        "description": "Of an answer in octet-stream: the output's name, percent-encoded where "
        "it has spaces, a percent sign or anything but ASCII.",
        "schema": {"type": "string"},
    },
    "XTensorDtype": {
        "description": "Of an answer in octet-stream: its dtype, as torch names it.",
        "schema": _DTYPE,
        "example": "float32",
    },
    "XTensorShape": {
        "description": "Of an answer in octet-stream: its shape.",
        "schema": _SHAPE,
        "example": "1,1000",
    },
}
"""What an answer may have."""

_NAMES: Mapping[str, str] = {
    "X-Request-ID": "XRequestId",
    "traceparent": "Traceparent",
    "tracestate": "Tracestate",
    "Server-Timing": "ServerTiming",
    "Retry-After": "RetryAfter",
    "WWW-Authenticate": "WwwAuthenticate",
    "Allow": "Allow",
    "X-Tensor-Name": "XTensorName",
    "X-Tensor-Dtype": "XTensorDtype",
    "X-Tensor-Shape": "XTensorShape",
}

COMMON = ("X-Request-ID", "traceparent", "tracestate", "Server-Timing")
"""What every answer has, `tracestate` where the call brought one."""


def answer_headers(*names: str) -> Json:
    """The headers of an answer, by the components that describe them."""
    return {name: {"$ref": f"#/components/headers/{_NAMES[name]}"} for name in names}
