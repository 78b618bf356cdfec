import json
import re

from service.api.errors import TABLE
from service.api.openapi import SCHEMAS, openapi_paths


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
