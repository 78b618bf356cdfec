"""The part of the document about `/predict`, which FastAPI does not route."""

from collections.abc import Mapping, Sequence
from urllib.parse import quote

from inferpool.models.bodies import body_of
from inferpool.models.spec import USUAL_INTERFACE, Interface
from inferpool.service.api.codecs.parameters import OUTPUT_KEY
from inferpool.service.api.openapi.headers import (
    COMMON,
    EXAMPLES,
    PARAMETERS,
    Json,
    answer_headers,
)
from inferpool.service.api.openapi.problems import PREDICT_STATUSES, refer_to

_BINARY: Json = {"type": "string", "format": "binary"}
_CONTENT: Json = {
    **_BINARY,
    "description": "The content of a model that renders its own, such as a picture, with a media "
    'type that the model gives. Where JSON is preferred, and for several instances, it is `{"b64": '
    '..., "media_type": ...}`.',
}

SCHEMAS: Mapping[str, Json] = {
    "PredictRequest": {
        "type": "object",
        "required": ["instances"],
        "additionalProperties": False,
        "properties": {
            "instances": {
                "type": "array",
                "minItems": 1,
                "description": 'Each `{"b64": "..."}` (an encoded image, or bytes), or another '
                "input of the model: nested numbers, a text, or an object of its inputs by name.",
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
                "description": "The model's output for each instance, in their order. One that "
                'failed is `{"error": InstanceError}` in its place, if another succeeded.',
                "items": {},
            }
        },
    },
}
"""Schemas of bodies and answers."""

_QUERY: Mapping[str, str] = {
    "dtype": "The dtype of an octet-stream body, as torch names it: `float32`, `uint8`, ...",
    "shape": "The shape of an octet-stream body, such as `3,224,224`.",
    "name": "The name of the input that an octet-stream or npy body holds.",
    OUTPUT_KEY: "The only output wanted, for answers in npy or octet-stream.",
}
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
        "Images in base64, nested numbers, or texts",
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
    (
        "text/plain",
        "One text in UTF-8, for a model that takes texts",
        "-H 'Content-Type: text/plain' --data-binary 'hello world' '{url}'",
    ),
)
"""For each content type: its contents, and curl's arguments to send one."""
_JOB_BODY_EXAMPLES: Sequence[tuple[str, str, str]] = (
    (
        "application/jsonl",
        "Up to a million instances, one a line, each as in `instances`",
        "-H 'Content-Type: application/jsonl' --data-binary @inputs.jsonl '{url}'",
    ),
    (
        "application/x-tar",
        "Up to a million files, each an instance",
        "-H 'Content-Type: application/x-tar' --data-binary @photos.tar '{url}'",
    ),
)
"""The same for types that only jobs take."""
_VALUES: Mapping[str, object] = {
    "multipart/form-data": {
        "file": ["@first.jpg", "@second.png"],
        "parameters": '{"top_k": 3}',
    },
    "text/plain": "hello world",
}
_EVENTS = (
    'event: part\ndata: {"instance":0,"part":"there"}\n\n'
    'event: part\ndata: {"instance":0,"part":"was"}\n\n'
    'event: done\ndata: {"instance":0,"num_parts":2,"timing":{"queue_ms":0.31}}\n\n'
)
_LINES = '{"instance":0,"part":"there"}\n{"instance":0,"part":"was"}\n'
PIXEL: str = EXAMPLES["requests"]["image"]["value"]["instances"][0]["b64"]
"""A PNG of one pixel, in base64."""


def predict_paths(
    models: Sequence[str],
    default: str | None,
    examples: Mapping[str, object] | None = None,
    *,
    interfaces: Mapping[str, Interface] | None = None,
    has_jobs: bool = False,
) -> dict[str, Json]:
    """Return the path items of `/predict/{model}`, and of `/predict` with a default model.

    Args:
        models: The names of the models.
        default: The default model, if there is one.
        examples: An instance of each model that shows one.
        interfaces: How clients speak to each model where that is not as usual.
        has_jobs: Calls to these may become jobs.
    """
    answers = answers_of(has_jobs=False)
    answers_of_jobs = answers_of(has_jobs=has_jobs)
    interfaces = interfaces or {}
    shown: Json = {
        name: shown_body(name, instance, interfaces.get(name, USUAL_INTERFACE))
        for name, instance in (examples or {}).items()
    }
    paths: dict[str, Json] = {}
    if default is not None:
        about = f"Predict with {default}, the default model"
        own: Json = {name: value for name, value in shown.items() if name == default}
        paths["/predict"] = {
            "post": operation_of("predict", about, [], "/predict", own, answers_of_jobs)
        }
    name = _model_parameter(models)
    example = f"/predict/{quote(models[0])}" if models else "/predict/NAME"
    paths["/predict/{model}"] = {
        "post": operation_of(
            "predict_model",
            "Predict with the model of that name",
            [name],
            example,
            shown,
            answers_of_jobs,
        )
    }
    version: Json = {
        "name": "version",
        "in": "path",
        "required": True,
        "description": "The number of a version that is loaded.",
        "schema": {"type": "integer", "minimum": 1, "maximum": 2**53},
        "example": 1,
    }
    about = "Predict with one version of a model, whichever serves"
    paths["/predict/{model}/versions/{version}"] = {
        "post": operation_of(
            "predict_version", about, [name, version], f"{example}/versions/1", shown, answers
        )
    }
    return paths


def answers_of(*, has_jobs: bool) -> Json:
    """Return the answers of a call that has worked; it may become a job."""
    of_jobs: Json = {"202": _job_answer(), **refer_to([507])} if has_jobs else {}
    return {"200": _answer()} | of_jobs


def shown_body(name: str, instance: object, interface: Interface) -> Json:
    """Return an example of a JSON body for a model."""
    return {
        "summary": f"An instance that {name} takes",
        "value": body_of(interface, instance),
    }


def _model_parameter(models: Sequence[str]) -> Json:
    name: Json = {
        "name": "model",
        "in": "path",
        "required": True,
        "description": "One of the models that are served.",
        "schema": {"type": "string", "enum": list(models)} if models else {"type": "string"},
    }
    if models:
        name["example"] = models[0]
    return name


def job_body(shown: Json) -> Json:
    """Return what the body of a call that makes a job may be."""
    return _body("/jobs", shown, (*_JOB_BODY_EXAMPLES, *_BODY_EXAMPLES))


def _job_answer() -> Json:
    """Return the answer of `/predict` to a call that prefers `respond-async`."""
    headers = ("Location", "Preference-Applied", "Retry-After")
    return {
        "description": "The call has become a job, as it prefers; `Location` shows how it goes.",
        "headers": answer_headers(*COMMON, *headers),
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/JobInfo"}}},
    }


def operation_of(
    operation_id: str,
    summary: str,
    parameters: Sequence[Json],
    path: str,
    shown: Json,
    answers: Json,
) -> Json:
    """Return an operation that predicts, at a path and with examples of its JSON body."""
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
            "parameters of the model: `?top_k=3`. `Accept` chooses among the forms of the "
            "answer.\n\n"
            f"With curl, where the server is at its default address:\n\n"
            f"```sh\n{calls.rstrip()}\n```"
        ),
        "parameters": [
            *parameters,
            *(
                {"name": name, "in": "query", "description": about, "schema": {"type": "string"}}
                for name, about in _QUERY.items()
            ),
            *({"$ref": f"#/components/parameters/{name}"} for name in PARAMETERS),
        ],
        "requestBody": _body(path, shown, _BODY_EXAMPLES),
        "responses": answers | refer_to(PREDICT_STATUSES),
    }


def _body(path: str, shown: Json, forms: Sequence[tuple[str, str, str]]) -> Json:
    return {
        "required": True,
        "description": "In one of these forms, without Content-Encoding.",
        "content": _request_content(path, shown, forms),
    }


def _request_content(path: str, shown: Json, forms: Sequence[tuple[str, str, str]]) -> Json:
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
        "text/plain": {"type": "string", "minLength": 1},
    }
    content: Json = {}
    for content_type, about, arguments in forms:
        # JSON cannot show bytes: their example is the call that sends them.
        call: Json = {"summary": about, "description": f"`{_curl(arguments, path)}`"}
        call["value"] = _VALUES.get(content_type, "@FILE")
        is_json = content_type == "application/json"
        content[content_type] = {
            "schema": schemas.get(content_type, _BINARY),
            "examples": {**shown, **EXAMPLES["requests"]} if is_json else {"curl": call},
        }
    return content


def _curl(arguments: str, path: str) -> str:
    return "curl " + arguments.format(url=f"http://127.0.0.1:8000{path}")


def _answer() -> Json:
    tensor_headers = ("X-Tensor-Name", "X-Tensor-Dtype", "X-Tensor-Shape")
    return {
        "description": "The predictions, in the form that `Accept` asks for.",
        "headers": answer_headers(*COMMON, "X-Model-Version", *tensor_headers),
        "content": {
            "application/json": {
                "schema": {"$ref": "#/components/schemas/PredictResponse"},
                "examples": EXAMPLES["predictions"],
            },
            "application/x-npy": {"schema": _BINARY},
            "application/x-npz": {"schema": _BINARY},
            "application/safetensors": {"schema": _BINARY},
            "application/octet-stream": {"schema": _BINARY},
            "image/*": {"schema": _CONTENT},
            "text/event-stream": {
                "schema": {
                    "type": "string",
                    "description": "Of a model that answers in parts: an event `part` for each, "
                    "as it comes; `done` or `error` (a Problem) at the end of each instance.",
                },
                "examples": {"stream": {"summary": "Two parts", "value": _EVENTS}},
            },
            "application/jsonl": {
                "schema": {
                    "type": "string",
                    "description": "The same as lines: one for each part, or an error.",
                },
                "examples": {"stream": {"summary": "Two parts", "value": _LINES}},
            },
        },
    }
