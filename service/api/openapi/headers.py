"""Every header that the service reads or sends, as OpenAPI components; and all examples."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Json = dict[str, object]

EXAMPLES: Mapping[str, Any] = json.loads(Path(__file__).with_name("examples.json").read_bytes())
"""Bodies of `/predict`, its answers, and the answers of other routes by their operation's id."""

_TEXT: Json = {"type": "string"}
_REQUEST_ID: Json = {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"}
_TRACEPARENT: Json = {"type": "string", "pattern": "^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$"}


def _header(description: str, schema: Json, example: object = None) -> Json:
    header: Json = {"description": description, "schema": schema}
    return header if example is None else header | {"example": example}


_REQUEST_HEADERS: Mapping[str, Json] = {
    "X-Timeout-Ms": _header(
        "A deadline in milliseconds, counted from arrival; answered with 504 when it passes. More "
        "than the setting `max_timeout_s` means as much as that.",
        {"type": "integer", "minimum": 1},
        2000,
    ),
    "X-Priority": _header(
        "1 goes first, 9 last; 5 if not given.",
        {"type": "integer", "minimum": 1, "maximum": 9},
        1,
    ),
    "X-Model-Version": _header(
        "The number of a version of the model; by default the one that serves. The path "
        "`/predict/{model}/versions/{version}` says the same.",
        {"type": "integer", "minimum": 1, "maximum": 2**53},
    ),
    "X-Request-ID": _header(
        "Sent back, and in the logs; made if it is absent or has another form.",
        _REQUEST_ID,
        "order-1234",
    ),
    "traceparent": _header(
        "W3C Trace Context: the trace that this call belongs to. A new one is begun if it is "
        "absent or cannot be read.",
        _TEXT,
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    ),
    "tracestate": _header(
        "W3C Trace Context: passed on beside a valid `traceparent`.", _TEXT, "vendor=opaque"
    ),
    "Prefer": _header(
        "RFC 7240: `respond-async` makes a job of the call, `wait=N` waits up to N seconds for its "
        "end.",
        _TEXT,
    ),
    "Idempotency-Key": _header(
        "Of calls that make a job: those with the same key make one only.",
        {"type": "string", "minLength": 1, "maxLength": 255},
    ),
    "X-Tensor-Dtype": _header("The same as `dtype` in the query.", _TEXT),
    "X-Tensor-Shape": _header("The same as `shape` in the query.", _TEXT),
}
_ANSWER_HEADERS: Mapping[str, Json] = {
    "X-Request-ID": _header("The id of the call: its own, or a new one.", _REQUEST_ID),
    "traceparent": _header(
        "W3C Trace Context: the trace of the call, and the span in which it was answered.",
        _TRACEPARENT,
    ),
    "tracestate": _header("W3C Trace Context: the one that the call brought.", _TEXT),
    "Server-Timing": _header(
        "Milliseconds: of predictions `queue`, `preprocess` and `inference` (of several instances "
        "the longest), and `total`.",
        _TEXT,
        "queue;dur=0.21, preprocess;dur=2.80, inference;dur=14.31, total;dur=17.95",
    ),
    "X-Model-Version": _header(
        "The version of the model that made the predictions.", {"type": "integer"}, 1
    ),
    "Retry-After": _header(
        "Seconds after which another try makes sense.", {"type": "integer", "minimum": 1}
    ),
    "Location": _header(
        "The address of the job, mostly relative to that of the call.", _TEXT, "./jobs/5f0c"
    ),
    "Link": _header("Where the next page is.", _TEXT, '<./jobs?after=5f0c>; rel="next"'),
    "Preference-Applied": _header("The preferences that were followed.", _TEXT, "respond-async"),
    "WWW-Authenticate": _header("How a key is sent.", _TEXT, 'Bearer realm="inferpool"'),
    "Allow": _header("The methods that there are.", _TEXT, "POST"),
    "X-Tensor-Name": _header(
        "In an octet-stream answer: the output's name, percent-encoded where it has spaces, a "
        "percent sign or anything but ASCII.",
        _TEXT,
    ),
    "X-Tensor-Dtype": _header(
        "In an octet-stream answer: the dtype, as torch names it.", _TEXT, "float32"
    ),
    "X-Tensor-Shape": _header("In an octet-stream answer: the shape.", _TEXT, "1,1000"),
}

COMMON = ("X-Request-ID", "traceparent", "tracestate", "Server-Timing")
"""Headers of every answer; `tracestate` only if the call brought one."""


def _key(name: str) -> str:
    """Return the name of a header's component: `XRequestId` for `X-Request-ID`."""
    return name.title().replace("-", "")


PARAMETERS: Mapping[str, Json] = {
    _key(name): {"name": name, "in": "header", **header}
    for name, header in _REQUEST_HEADERS.items()
}
"""Headers of calls. Pages fill the examples in when a user tries a call, so none may break it."""
HEADERS: Mapping[str, Json] = {_key(name): header for name, header in _ANSWER_HEADERS.items()}
"""Headers of answers."""
COMMON_PARAMETERS = tuple(map(_key, COMMON[:3]))
"""Parameters of every route."""


def answer_headers(*names: str) -> Json:
    """Return the headers of an answer as references to their components."""
    return {name: {"$ref": f"#/components/headers/{_key(name)}"} for name in names}
