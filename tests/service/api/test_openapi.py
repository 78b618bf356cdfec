import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from inferpool.service.api.auth import Guard
from inferpool.service.api.codecs.body import Limits
from inferpool.service.api.codecs.requests import TYPES
from inferpool.service.api.errors import TABLE
from inferpool.service.api.openapi.predict import predict_paths
from inferpool.service.api.routes.health import health_router
from inferpool.service.api.routes.metrics import metrics_router
from inferpool.service.api.trace import request_id_of, trace_of
from inferpool.service.api.web import App
from inferpool.service.errors import CancelledByClientError
from inferpool.service.parts.admin.routes import admin_router
from inferpool.service.parts.jobs.http.reading import JOB_TYPES
from inferpool.service.parts.jobs.http.routes import jobs_router
from inferpool.service.parts.kserve_v1.routes import v1_router
from inferpool.service.parts.live.sampler import events_router
from inferpool.service.parts.open_inference.routes import v2_router
from inferpool.service.parts.swap.requests import SwapOptions, request_schemas
from inferpool.service.parts.swap.routes import models_router
from inferpool.service.settings.draft import read_keys
from inferpool.service.settings.model import ModelSettings
from tests.service.api.fakes import FakeModel, call, endpoint

JSON = "application/json"
KEY = "a-key-of-sixteen-characters"
PREDICT_STATUSES = {kind.status for kind in TABLE.values()} - {409, 499, 507}


def make_app(*, with_keys: bool = True, with_admin: bool = True) -> App:
    keys = read_keys(KEY)
    guard = Guard(predict=keys, metrics=keys, admin=keys) if with_keys else Guard()
    makers = [health_router, metrics_router]
    makers += [admin_router, models_router] * with_admin
    routers = [make(None) for make in makers]  # type: ignore[operator]  # nobody asks them
    routers.append(events_router(None, guard))  # type: ignore[arg-type]  # as above
    routers.append(jobs_router(None, guard, Limits()))  # type: ignore[arg-type]  # as above
    routers.append(v1_router({}))
    routers.append(v2_router(None, None))  # type: ignore[arg-type]  # as above
    app = App(version="1.2.3", routers=routers, guard=guard)
    app.predict = endpoint(FakeModel())
    app.bodies = request_schemas
    return app


def document_of(app: App) -> Any:
    return call(app, "GET", "/openapi.json").json()


@pytest.fixture(scope="module")
def document() -> Any:
    return document_of(make_app())


def operations(document: Any) -> Iterator[tuple[str, str, Any]]:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield path, method, operation


def operation(path: str = "/predict") -> Any:
    return predict_paths(["m"], "m")[path]["post"]


def follow(document: Any, value: Any) -> Any:
    """A value, or what it refers to."""
    if "$ref" in value:
        for part in value["$ref"].removeprefix("#/").split("/"):
            document = document[part]
        return document
    return value


def examples(node: Any) -> Iterator[tuple[Any, Any]]:
    """Each schema with an example that stands beside it."""
    if isinstance(node, list):
        for each in node:
            yield from examples(each)
    if isinstance(node, dict):
        if "schema" in node and "example" in node:
            yield node["schema"], node["example"]
        if "schema" in node and "examples" in node:
            for example in node["examples"].values():
                yield node["schema"], example["value"]
        for each in node.values():
            yield from examples(each)


def test_every_number_that_a_caller_gives_has_a_greatest_value(document: Any) -> None:
    for path, method, operation in operations(document):
        body = operation.get("requestBody", {}).get("content", {}).get(JSON, {}).get("schema", {})
        given = [(name, each) for name, each in body.get("properties", {}).items()]
        for each in operation.get("parameters", ()):
            parameter = follow(document, each)
            given.append((parameter["name"], parameter.get("schema", {})))
        for name, schema in given:
            for kind in (schema, *schema.get("anyOf", ())):
                is_number = kind.get("type") in ("integer", "number")
                is_bounded = kind.keys() & {"maximum", "exclusiveMaximum"}
                # A timeout of more than the setting allows means as much as that.
                assert not is_number or is_bounded or name == "X-Timeout-Ms", (method, path, name)


def test_every_error_that_predict_can_give_is_documented(document: Any) -> None:
    responses = document["paths"]["/predict"]["post"]["responses"]
    assert {int(status) for status in responses} == PREDICT_STATUSES | {200, 202, 507}
    codes = {
        code
        for status in responses
        if int(status) >= 400
        for code in follow(document, responses[status])["content"]["application/problem+json"][
            "examples"
        ]
    }
    seen = {error.code for error in TABLE if error is not CancelledByClientError}
    assert codes == seen - {"conflict"}


def test_every_error_is_a_problem_with_an_example_of_each_of_its_codes(document: Any) -> None:
    for path, _, operation in operations(document):
        for status, response in operation["responses"].items():
            if int(status) < 400:
                continue
            (media,) = follow(document, response)["content"].values()
            if "examples" not in media:  # another protocol has its own form
                assert "error" in follow(document, media["schema"])["required"]
                continue
            for code, example in media["examples"].items():
                value = example["value"]
                assert (value["code"], value["status"]) == (code, int(status)), path
                assert ("retry_after_s" in value) == (
                    value["retryable"] and status in ("429", "503")
                )


@pytest.mark.parametrize(
    ("code", "method", "path", "headers", "body"),
    [
        ("bad_request", "POST", "/predict", {"content-type": JSON}, b'{"instances":[1]} x'),
        ("unauthorized", "GET", "/metrics", {}, b""),
        ("forbidden", "GET", "/admin/settings", {"x-api-key": KEY}, b""),
        ("method_not_allowed", "GET", "/predict", {}, b""),
        ("not_acceptable", "POST", "/predict", {"accept": "text/html"}, b"1"),
        ("too_large", "POST", "/predict", {"content-length": f"{2**24 + 1}"}, b"1"),
        ("unsupported_type", "POST", "/predict", {}, b"1"),
        ("invalid_input", "POST", "/predict", {"content-type": JSON}, b'{"instances":[]}'),
    ],
)
def test_errors_are_answered_as_their_examples_say(
    document: Any, code: str, method: str, path: str, headers: dict[str, str], body: bytes
) -> None:
    app = make_app(with_keys=False)
    app._guard = Guard(metrics=read_keys(KEY), admin=read_keys("another-key-of-sixteen"))
    answer = call(app, method, path, headers=headers, content=body)
    shown = document["components"]["responses"][f"Problem{answer.status_code}"]["content"]
    example = shown["application/problem+json"]["examples"][code]["value"]
    found = answer.json()
    assert found["code"] == code
    for member in ("type", "title", "status", "detail", "retryable"):
        assert found[member] == example[member]


def test_paths_with_a_policy_say_which_keys_open_them(document: Any) -> None:
    for path, _, operation in operations(document):
        schemes = {name for each in operation["security"] for name in each}
        is_open = path.removeprefix("/v2") in ("/health/live", "/health/ready")
        is_admin = path.startswith(("/admin", "/v2/repository/models"))
        kind = "admin" if is_admin else path.split("/")[1]
        kind = {"health": "metrics", "events": "metrics"}.get(kind, kind)
        kind = "predict" if kind in ("jobs", "v1", "v2") else kind
        assert schemes == (set() if is_open else {f"{kind}_bearer", f"{kind}_header"}), path
        assert is_open or {"401", "403"} <= set(operation["responses"])
    schemes = list(document["components"]["securitySchemes"])
    assert len(schemes) == 6
    assert schemes[0] == "predict_bearer"  # as /docs asks for them
    without = document_of(make_app(with_keys=False))
    assert "securitySchemes" not in without["components"]
    assert not any(operation["security"] for _, _, operation in operations(without))


def test_every_example_has_the_form_that_its_schema_asks_for(document: Any) -> None:
    found = list(examples(document))
    assert len(found) > 40
    for schema, example in found:
        whole = {"components": document["components"], **schema}
        jsonschema_rs.validate(whole, example)
    for schema in document["components"]["schemas"].values():
        jsonschema_rs.meta.validate(schema)
    parameters = document["components"]["parameters"]
    request_id = parameters["XRequestId"]["example"]
    assert request_id_of(request_id.encode()) == request_id
    assert trace_of(parameters["Traceparent"]["example"].encode()) is not None


def test_fields_of_answers_are_described_by_their_docstrings(document: Any) -> None:
    worker = document["components"]["schemas"]["WorkerHealth"]["properties"]
    assert (
        worker["last_beat_age_s"]["description"]
        == "Seconds since its loop last showed that it runs."
    )
    assert "`starting`, `ready`" in worker["state"]["description"]


def test_every_operation_has_a_name_of_its_own_and_says_what_it_does(document: Any) -> None:
    ids = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(set(ids)) == len(ids)
    assert {"predict", "predict_model", "health", "live", "ready", "metrics", "drain"} <= set(ids)
    for path, _, operation in operations(document):
        assert operation["summary"]
        assert operation["description"]
        assert operation["tags"][0] in {tag["name"] for tag in document["tags"]}
        is_change = operation["operationId"] in ("add_model", "swap_model", "create_job", "put_job")
        is_prediction = path.startswith("/predict") or path.endswith((":predict", "/infer"))
        is_change |= path.startswith("/v2/repository")
        takes_body = is_prediction or is_change  # fronts pass on no other
        assert ("requestBody" in operation) == takes_body


def test_bodies_of_changes_have_all_settings_and_options_with_their_docstrings(document: Any):
    def properties(path: str) -> Any:
        body = document["paths"][path]["post"]["requestBody"]["content"][JSON]["schema"]
        jsonschema_rs.meta.validate(body)
        return body["properties"]

    added = properties("/admin/models")
    swapped = properties("/admin/models/{model}/versions")
    assert set(added) == {"name", "ephemeral"} | set(ModelSettings.model_fields)
    assert set(swapped) == set(SwapOptions.model_fields) | set(ModelSettings.model_fields)
    assert all(each["description"] for each in (added | swapped).values())
    assert swapped["min_agreement"]["default"] == 0.99
    assert (added["replicas"]["default"], "default" in swapped["replicas"]) == ("auto", False)


def test_the_document_passes_a_linter(document: Any, tmp_path: Path) -> None:
    redocly = shutil.which("redocly")
    if redocly is None:
        pytest.skip("needs the npm package @redocly/cli on the PATH")
    plain = document_of(make_app(with_keys=False, with_admin=False))
    for name, each in (("keys", document), ("plain", plain)):
        (tmp_path / f"{name}.json").write_text(json.dumps(each))
    answer = subprocess.run(
        [redocly, "lint", "--extends=recommended-strict", "keys.json", "plain.json"],
        cwd=tmp_path,
        env={
            **os.environ,
            "REDOCLY_TELEMETRY": "off",
            "REDOCLY_SUPPRESS_UPDATE_NOTICE": "true",
        },
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_calls_about_jobs_have_the_answers_that_they_get(document: Any) -> None:
    for path, method, statuses in (
        ("/predict", "post", {"202", "507"}),
        ("/jobs", "post", {"202", "408", "429", "507"}),
        ("/jobs/{id}/result", "get", {"404", "406", "409"}),
        ("/jobs", "get", {"404"}),
    ):
        assert statuses <= set(document["paths"][path][method]["responses"])
    for path, header in (
        ("/jobs", "Link"),
        ("/jobs/{id}", "Retry-After"),
        ("/jobs/{id}/result", "X-Model-Version"),
    ):
        assert header in document["paths"][path]["get"]["responses"]["200"]["headers"]


def test_every_type_of_body_of_a_job_has_an_example(document: Any) -> None:
    for path, method in (("/jobs", "post"), ("/jobs/{id}", "put")):
        content = document["paths"][path][method]["requestBody"]["content"]
        assert set(content) == set(JOB_TYPES)


def test_every_type_of_body_that_is_read_has_an_example() -> None:
    content = operation()["requestBody"]["content"]
    assert tuple(content) == TYPES
    for content_type, media in content.items():
        assert media["examples"], content_type
        for example in media["examples"].values():
            assert example["summary"]


@pytest.mark.parametrize("path", ["/predict", "/predict/{model}"])
def test_the_calls_of_curl_are_complete_and_go_to_the_path(path: str) -> None:
    lines = re.findall(r"^curl .+$", operation(path)["description"], re.MULTILINE)
    assert len(lines) == len(TYPES)
    for line in lines:
        words = shlex.split(line)
        assert words[-1].partition("?")[0] == "http://127.0.0.1:8000" + path.format(model="m")
        assert "{{" not in line
        for word in words:
            if word.startswith("parameters="):
                assert json.loads(word.removeprefix("parameters=")) == {"top_k": 3}


def test_the_document_is_made_again_only_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app()
    num_made = 0
    make = App.openapi

    def count(self: App) -> Any:
        nonlocal num_made
        num_made += 1
        return make(self)

    monkeypatch.setattr(App, "openapi", count)
    first = call(app, "GET", "/openapi.json")
    assert first.headers["content-type"] == JSON
    etag = first.headers["etag"]
    again = call(app, "GET", "/openapi.json")
    assert (again.content, again.headers["etag"], num_made) == (first.content, etag, 1)
    unchanged = call(app, "GET", "/openapi.json", headers={"if-none-match": etag})
    assert (unchanged.status_code, unchanged.content) == (304, b"")
    app.examples = lambda: {"fake": [1, 2, 3]}
    changed = call(app, "GET", "/openapi.json", headers={"if-none-match": etag})
    assert (changed.status_code, num_made) == (200, 2)
    assert changed.headers["etag"] != etag


PATHS = ["/predict/{model}", "/predict/{model}/versions/{version}"]


def test_paths_depend_on_the_default_and_instances_that_models_show_are_examples():
    assert list(predict_paths(["m"], None)) == PATHS
    paths = predict_paths(["m", "n"], "m", {"m": [1], "n": "text"})

    def shown(path: str) -> list[object]:
        content = paths[path]["post"]["requestBody"]["content"]  # type: ignore[index]
        examples = content["application/json"]["examples"]
        return [each["value"] for name, each in examples.items() if name in ("m", "n")]

    assert shown("/predict") == [{"instances": [[1]]}]
    assert shown("/predict/{model}") == [{"instances": [[1]]}, {"instances": ["text"]}]
