"""What the OpenAPI document says of `/predict`: FastAPI documents its own routes, not this one."""

from collections.abc import Mapping, Sequence

from service.api.errors import PROBLEM_TYPE, TABLE
from service.api.parameters import OUTPUT_KEY
from service.errors import CancelledByClientError

Json = dict[str, object]

_BINARY: Json = {"type": "string", "format": "binary"}
_PROBLEM = PROBLEM_TYPE.decode()
_PROBLEM_REF: Json = {"$ref": "#/components/schemas/Problem"}

_INSTANCE_ERROR: Json = {
    "type": "object",
    "required": ["code", "message", "status"],
    "properties": {
        "code": {"type": "string", "description": "A stable name.", "examples": ["invalid_input"]},
        "message": {"type": "string"},
        "status": {"type": "integer", "examples": [422]},
        "index": {"type": "integer", "description": "The place of the instance, from 0."},
    },
}

SCHEMAS: Mapping[str, Json] = {
    "InstanceError": _INSTANCE_ERROR,
    "Problem": {
        "type": "object",
        "description": "An error (RFC 9457).",
        "required": [
            *("type", "title", "status", "detail", "instance"),
            *("code", "error", "request_id", "retryable"),
        ],
        "properties": {
            "type": {"type": "string", "format": "uri"},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "detail": {"type": "string", "description": "What was wrong, where, and what to do."},
            "instance": {"type": "string", "format": "uri-reference"},
            "code": {"type": "string", "description": "A stable name of the error."},
            "error": {"type": "string", "description": "The same as `detail`."},
            "request_id": {"type": "string"},
            "retryable": {
                "type": "boolean",
                "description": "The same request may succeed later.",
            },
            "retry_after_s": {"type": "integer"},
            "errors": {
                "type": "array",
                "description": "Of each instance, where there were several and all failed.",
                "items": {"$ref": "#/components/schemas/InstanceError"},
            },
        },
    },
    "PredictRequest": {
        "type": "object",
        "required": ["instances"],
        "additionalProperties": False,
        "properties": {
            "instances": {
                "type": "array",
                "minItems": 1,
                "description": 'Each `{"b64": "..."}` (an encoded image, or bytes), or what else '
                "the model takes: nested numbers, or an object of its inputs by name.",
                "items": {},
            },
            "parameters": {"type": "object", "description": "Options of the model."},
        },
        "examples": [{"instances": [{"b64": "/9j/4AAQSkZJRg=="}], "parameters": {"top_k": 3}}],
    },
    "PredictResponse": {
        "type": "object",
        "required": ["predictions"],
        "properties": {
            "predictions": {
                "type": "array",
                "description": "In the order of the instances. One that failed is "
                '`{"error": {"code", "message", "status"}}` in its place, while any succeeded.',
                "items": {},
            }
        },
        "examples": [
            {"predictions": [[{"label": "tabby, tabby cat", "index": 281, "score": 0.81}]]}
        ],
    },
}
"""Components that the paths refer to."""

_QUERY: Sequence[tuple[str, str, Json]] = (
    ("dtype", "Of an octet-stream body, as torch names it.", {"type": "string"}),
    ("shape", "Of an octet-stream body, such as `3,224,224`.", {"type": "string"}),
    ("name", "Of the input that an octet-stream or npy body holds.", {"type": "string"}),
    (
        OUTPUT_KEY,
        "The only output wanted, for answers in npy or octet-stream.",
        {"type": "string"},
    ),
)
_HEADERS: Sequence[tuple[str, str, Json]] = (
    ("X-Timeout-Ms", "A deadline, counted from arrival.", {"type": "integer", "minimum": 1}),
    ("X-Priority", "1 goes first, 9 last.", {"type": "integer", "minimum": 1, "maximum": 9}),
    (
        "X-Request-ID",
        "Sent back, and in the logs; made if it is absent.",
        {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"},
    ),
    ("traceparent", "W3C Trace Context.", {"type": "string"}),
    ("X-Tensor-Dtype", "As `dtype` in the query.", {"type": "string"}),
    ("X-Tensor-Shape", "As `shape` in the query.", {"type": "string"}),
)
_ANSWER_HEADERS: Json = {
    "X-Request-ID": {"schema": {"type": "string"}},
    "traceparent": {"schema": {"type": "string"}},
    "Server-Timing": {
        "description": "queue, preprocess, inference and total, in milliseconds.",
        "schema": {"type": "string"},
    },
}
_RETRY_HEADER: Json = {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}


def openapi_paths(models: Sequence[str], default: str | None) -> dict[str, Json]:
    """The path items of `/predict` (where there is a default model) and of `/predict/{model}`.

    Args:
        models: The names of all models.
        default: The one that `/predict` means.
    """
    paths: dict[str, Json] = {}
    if default is not None:
        about = f"Predict with `{default}`, the default model"
        paths["/predict"] = {"post": _operation("predict", about, [])}
    name: Json = {
        "name": "model",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "enum": list(models)} if models else {"type": "string"},
    }
    paths["/predict/{model}"] = {
        "post": _operation("predict_model", "Predict with the model of that name", [name])
    }
    return paths


def _operation(operation_id: str, summary: str, parameters: Sequence[Json]) -> Json:
    return {
        "operationId": operation_id,
        "summary": summary,
        "tags": ["predict"],
        "description": (
            "The body is one instance, or several. Query keys other than those below are "
            "parameters of the model: `?top_k=3`. `Accept` chooses the form of the answer."
        ),
        "parameters": [
            *parameters,
            *(_parameter(*each, place="query") for each in _QUERY),
            *(_parameter(*each, place="header") for each in _HEADERS),
        ],
        "requestBody": {"required": True, "content": _request_content()},
        "responses": _responses(),
    }


def _parameter(name: str, description: str, schema: Json, *, place: str) -> Json:
    return {"name": name, "in": place, "description": description, "schema": schema}


def _request_content() -> Json:
    files: Json = {"type": "array", "items": _BINARY}
    return {
        "image/*": {"schema": _BINARY},
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "properties": {
                    "file": {**files, "description": "Images, npy or raw tensor bytes."},
                    "parameters": {"type": "string", "description": "A JSON object."},
                },
            }
        },
        "application/json": {"schema": {"$ref": "#/components/schemas/PredictRequest"}},
        "application/octet-stream": {"schema": _BINARY},
        "application/x-npy": {"schema": _BINARY},
        "application/safetensors": {"schema": _BINARY},
    }


def _responses() -> Json:
    responses: Json = {
        "200": {
            "description": "The predictions.",
            "headers": _ANSWER_HEADERS,
            "content": {
                "application/json": {"schema": {"$ref": "#/components/schemas/PredictResponse"}},
                "application/x-npy": {"schema": _BINARY},
                "application/safetensors": {"schema": _BINARY},
                "application/octet-stream": {"schema": _BINARY},
            },
        }
    }
    titles: dict[int, list[str]] = {}
    codes: dict[int, list[str]] = {}
    for error, kind in TABLE.items():
        if error is not CancelledByClientError:
            titles.setdefault(kind.status, []).append(kind.title)
            codes.setdefault(kind.status, []).append(f"`{error.code}`")
    for status in sorted(titles):
        is_retry = status in (429, 503)
        headers = {**_ANSWER_HEADERS, "Retry-After": _RETRY_HEADER} if is_retry else _ANSWER_HEADERS
        about = "; ".join(
            f"{title} ({code})" for title, code in zip(titles[status], codes[status], strict=True)
        )
        responses[str(status)] = {
            "description": about,
            "headers": headers,
            "content": {_PROBLEM: {"schema": _PROBLEM_REF}},
        }
    return responses
