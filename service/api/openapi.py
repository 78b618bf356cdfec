"""What the OpenAPI document says of `/predict`: FastAPI documents its own routes, not this one."""

from collections.abc import Mapping, Sequence
from urllib.parse import quote

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
    (
        "X-Timeout-Ms",
        "A deadline in milliseconds, counted from arrival; answered with 504 when it passes.",
        {"type": "integer", "minimum": 1},
    ),
    (
        "X-Priority",
        "1 goes first, 9 last; 5 if not given.",
        {"type": "integer", "minimum": 1, "maximum": 9},
    ),
    (
        "X-Request-ID",
        "Sent back, and in the logs; made if it is absent.",
        {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"},
    ),
    ("traceparent", "W3C Trace Context.", {"type": "string"}),
    ("X-Tensor-Dtype", "As `dtype` in the query.", {"type": "string"}),
    ("X-Tensor-Shape", "As `shape` in the query.", {"type": "string"}),
)
_HEADER_EXAMPLES: Mapping[str, object] = {
    "X-Timeout-Ms": 2000,
    "X-Priority": 1,
    "X-Request-ID": "order-1234",
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
}
"""Pages fill these in when one tries a call, so there are none that would break another's body."""
_BODY_EXAMPLES: Sequence[tuple[str, str, str]] = (
    (
        "image/*",
        "One image: JPEG, PNG, WebP, GIF, BMP or TIFF",
        "-H 'Content-Type: image/jpeg' --data-binary @photo.jpg '{url}'",
    ),
    (
        "multipart/form-data",
        "Several files, answered in order, and parameters of a classifier",
        "-F file=@first.jpg -F file=@second.png -F 'parameters={{\"top_k\": 3}}' '{url}'",
    ),
    (
        "application/json",
        "Images in base64, or nested numbers",
        "-H 'Content-Type: application/json' --data-binary @request.json '{url}'",
    ),
    (
        "application/octet-stream",
        "One tensor's bytes: little-endian, in C order; a first dimension more, and it is a batch",
        "-H 'Content-Type: application/octet-stream' --data-binary @pixels.bin "
        "'{url}?dtype=uint8&shape=224,224,3'",
    ),
    (
        "application/x-npy",
        "One array, as numpy.save writes it",
        "-H 'Content-Type: application/x-npy' --data-binary @pixels.npy '{url}'",
    ),
    (
        "application/safetensors",
        "Tensors by the names of the model's inputs, as safetensors.numpy.save_file writes them",
        "-H 'Content-Type: application/safetensors' --data-binary @inputs.safetensors '{url}'",
    ),
)
"""By content type: what the body holds, and the arguments of curl that send one."""
_JSON_REQUESTS: Json = {
    "image": {
        "summary": "An encoded image, in base64",
        "value": {"instances": [{"b64": "/9j/4AAQSkZJRg=="}], "parameters": {"top_k": 3}},
    },
    "numbers": {
        "summary": "Two instances for a model whose only input takes three numbers",
        "value": {"instances": [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]},
    },
    "inputs": {
        "summary": "One instance for a model with several inputs",
        "value": {"instances": [{"ids": [101, 7592, 102], "mask": [1, 1, 1]}]},
    },
}
_JSON_ANSWERS: Json = {
    "classifier": {
        "summary": "A classifier's best two labels for one image",
        "value": {
            "predictions": [
                [
                    {"label": "tiger cat", "index": 282, "score": 0.37},
                    {"label": "Egyptian cat", "index": 285, "score": 0.36},
                ]
            ]
        },
    },
    "partial": {
        "summary": "Two images, of which the second could not be read",
        "value": {
            "predictions": [
                [{"label": "tiger cat", "index": 282, "score": 0.37}],
                {
                    "error": {
                        "code": "invalid_input",
                        "message": "these 12 bytes are no image",
                        "status": 422,
                    }
                },
            ]
        },
    },
}
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
        paths["/predict"] = {"post": _operation("predict", about, [], "/predict")}
    name: Json = {
        "name": "model",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "enum": list(models)} if models else {"type": "string"},
    }
    if models:
        name["example"] = models[0]
    example = f"/predict/{quote(models[0])}" if models else "/predict/NAME"
    paths["/predict/{model}"] = {
        "post": _operation("predict_model", "Predict with the model of that name", [name], example)
    }
    return paths


def _operation(operation_id: str, summary: str, parameters: Sequence[Json], path: str) -> Json:
    calls = "".join(
        f"# {content_type}: {about}\n{_curl(arguments, path)}\n\n"
        for content_type, about, arguments in _BODY_EXAMPLES
    )
    return {
        "operationId": operation_id,
        "summary": summary,
        "tags": ["predict"],
        "description": (
            "The body is one instance, or several. Query keys other than those below are "
            "parameters of the model: `?top_k=3`. `Accept` chooses the form of the answer.\n\n"
            f"With curl, where the server is at its default address:\n\n"
            f"```sh\n{calls.rstrip()}\n```"
        ),
        "parameters": [
            *parameters,
            *(_parameter(*each, place="query") for each in _QUERY),
            *(_parameter(*each, place="header") for each in _HEADERS),
        ],
        "requestBody": {"required": True, "content": _request_content(path)},
        "responses": _responses(),
    }


def _parameter(name: str, description: str, schema: Json, *, place: str) -> Json:
    parameter: Json = {"name": name, "in": place, "description": description, "schema": schema}
    return parameter | ({"example": _HEADER_EXAMPLES[name]} if name in _HEADER_EXAMPLES else {})


def _request_content(path: str) -> Json:
    files: Json = {"type": "array", "items": _BINARY}
    form: Json = {
        "type": "object",
        "required": ["file"],
        "properties": {
            "file": {**files, "description": "Images, npy or raw tensor bytes."},
            "parameters": {"type": "string", "description": "A JSON object."},
        },
    }
    schemas: Mapping[str, Json] = {
        "multipart/form-data": form,
        "application/json": {"$ref": "#/components/schemas/PredictRequest"},
    }
    content: Json = {}
    for content_type, about, arguments in _BODY_EXAMPLES:
        # Bytes have no value that JSON could show: their example is the call that sends them.
        call = {"summary": about, "description": f"`{_curl(arguments, path)}`"}
        is_json = content_type == "application/json"
        content[content_type] = {
            "schema": schemas.get(content_type, _BINARY),
            "examples": _JSON_REQUESTS if is_json else {"curl": call},
        }
    return content


def _curl(arguments: str, path: str) -> str:
    return "curl " + arguments.format(url=f"http://127.0.0.1:8000{path}")


def _responses() -> Json:
    responses: Json = {
        "200": {
            "description": "The predictions.",
            "headers": _ANSWER_HEADERS,
            "content": {
                "application/json": {
                    "schema": {"$ref": "#/components/schemas/PredictResponse"},
                    "examples": _JSON_ANSWERS,
                },
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
