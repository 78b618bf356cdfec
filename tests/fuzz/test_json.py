"""Wrong JSON, sent to a running service: the answer names its place."""

import json

import httpx
import pytest

from tests.e2e.running import Running

GOOD = [[[0] * 4] * 3] * 2
TWO = '{"instances": [{"x": [1, 2, 3], "ids": [1]}, {"x": [1, 2, %s], "ids": %s}]}'


@pytest.mark.parametrize(
    ("model", "body", "status", "detail"),
    [
        ("grid", [GOOD, [[[0] * 4] * 3, [[0] * 4, [0] * 4, [0, 0, "x", 0]]]],
         200, "instances[1][1][2][2]: expected a number, found a string"),
        ("grid", [{"image": [[[0] * 4] * 3, [[0] * 4, [0] * 4, [0, 0, None, 0]]]}],
         422, "instances[0].image[1][2][2]: expected a number, found null"),
        ("two", TWO % ("1e39", "[1]"), 200, "instances[1].x[2]: the number is out of range"),
        ("two", TWO % ("NaN", "[1]"), 400, "malformed JSON: invalid character (byte 58)"),
        ("two", '{"instances": [{"x": [1,2,3], "ids": [1], "x": [1]}]}', 422, "instances[0].x"),
        ("two", '{"instances": [1], "instance": 2}', 422, "unknown field `instance`"),
        ("two", '{"instances": [' + "[" * 100 + "]" * 100 + "]}", 422, "nested more than 100 deep"),
        ("two", '{"instances": ' + "[" * 200_000, 422, "nested more than 100 deep"),
        ("echo", b'{"instances": ["\xed\xa0\x80"]}', 400, "not UTF-8"),
    ],
)  # fmt: skip
def test_wrong_json_is_refused_with_its_place(
    target: Running, model: str, body: object, status: int, detail: str
):
    if isinstance(body, list):
        body = json.dumps({"instances": body})
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{target.url}/predict/{model}", content=body, headers=headers, timeout=90)  # type: ignore[arg-type]
    found = answer.json()
    if status == 200:  # the first instance was right
        found = {"detail": found["predictions"][1]["error"]["message"]}
    assert answer.status_code == status
    assert detail in found["detail"]
