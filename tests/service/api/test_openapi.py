import base64
import json
import re
import shlex
from typing import Any

import pytest

from service.api.codecs import TYPES
from service.api.errors import TABLE
from service.api.openapi import SCHEMAS, openapi_paths
from service.api.trace import request_id_of, trace_of


def operation(path: str = "/predict") -> Any:
    return openapi_paths(["m"], "m")[path]["post"]


def test_every_error_that_a_client_can_see_is_documented() -> None:
    responses = openapi_paths(["m"], "m")["/predict"]["post"]["responses"]  # type: ignore[index]
    expected = {kind.status for kind in TABLE.values()} - {499} | {200}
    assert {int(status) for status in responses} == expected


def test_without_a_default_only_the_path_with_a_name_is_there() -> None:
    assert list(openapi_paths(["m"], None)) == ["/predict/{model}"]
    assert list(openapi_paths(["m"], "m")) == ["/predict", "/predict/{model}"]


def test_every_reference_leads_somewhere() -> None:
    text = json.dumps([openapi_paths(["m"], "m"), SCHEMAS])
    names = set(re.findall(r"#/components/schemas/(\w+)", text))
    assert names == set(SCHEMAS) - {"InstanceError"} | {"InstanceError"}


def test_every_type_of_body_that_is_read_has_an_example() -> None:
    content = operation()["requestBody"]["content"]
    assert tuple(content) == TYPES
    for content_type, media in content.items():
        assert media["examples"], content_type
        for example in media["examples"].values():
            assert example["summary"]
            assert ("value" in example) != (example.get("description", "")[:6] == "`curl ")


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


def test_the_json_examples_have_the_form_that_the_schemas_ask_for() -> None:
    requests = operation()["requestBody"]["content"]["application/json"]["examples"]
    for request in requests.values():
        assert request["value"]["instances"]
        assert set(request["value"]) <= set(SCHEMAS["PredictRequest"]["properties"])  # type: ignore[call-overload]
    assert base64.b64decode(requests["image"]["value"]["instances"][0]["b64"], validate=True)
    answers = operation()["responses"]["200"]["content"]["application/json"]["examples"]
    assert set(answers["classifier"]["value"]["predictions"][0][0]) == {"label", "index", "score"}
    error = answers["partial"]["value"]["predictions"][1]["error"]
    assert set(error) == set(SCHEMAS["InstanceError"]["required"])  # type: ignore[call-overload]


def test_the_headers_have_examples_that_are_taken() -> None:
    examples = {
        each["name"]: each["example"] for each in operation()["parameters"] if "example" in each
    }
    assert list(examples) == ["X-Timeout-Ms", "X-Priority", "X-Request-ID", "traceparent"]
    assert examples["X-Timeout-Ms"] >= 1
    assert 1 <= examples["X-Priority"] <= 9
    assert request_id_of(examples["X-Request-ID"].encode()) == examples["X-Request-ID"]
    assert trace_of(examples["traceparent"].encode()) is not None
