"""What the real TorchServe handed over to a handler and answered, compared with what we do.

Its handler `plain` answers what it gets; here, that is what a worker is sent.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from inferpool.service.parts.torchserve.paths import asked_in
from tests.clients.torchserve.calls import RecordedCall, inference_calls
from tests.service.api.fakes import call
from tests.service.parts.torchserve.fake_archives import archive, parameters_of, parts_of, served

_FILE = Path(__file__).parents[3] / "clients/torchserve/recorded.json"
RECORDED: dict[str, Any] = json.loads(_FILE.read_text())["inference"]
BETTER = {
    "a packed body": 415,
    "a form cut short": 400,
    "fields %zz=1": 400,
    "a form's part without a name": 400,
    "a picture as application/x-www-form-urlencoded": 400,
}
"""Calls with another answer than TorchServe's, and our statuses."""
CALLS = {
    each.call: each
    for each in inference_calls()
    if each.path[:2] != "//"
    and asked_in(each.path.partition("?")[0]) is not None
    and each.method not in ("HEAD", "OPTIONS")
}


def _is_ours(name: str) -> bool:
    """A call that the front end answers: no handler chose its status."""
    return name.split()[0] not in ("answers", "handler")


PLAIN = [name for name in CALLS if "parts" in RECORDED[name].get("text", "")]
WRONG = [name for name in CALLS if RECORDED[name]["status"] in (400, 404) and _is_ours(name)]


def ask(asked: RecordedCall, version: str = "1.0") -> tuple[Any, Any]:
    one, two = archive("plain"), archive("plain", "2.0", key="plain_2")
    headers = {k: v for k, v in asked.headers.items() if k != "Transfer-Encoding"}
    body = b"hello" if asked.headers.keys() != headers.keys() else asked.sent
    found = call(
        served(one, two, archive("classes")),
        asked.method,
        asked.path,
        content=body,
        headers=headers,
    )
    return found, {"1.0": one, "2.0": two}[version]


@pytest.mark.parametrize("name", [each for each in PLAIN if each not in BETTER])
def test_a_handler_gets_the_same(name: str) -> None:
    theirs = json.loads(RECORDED[name]["text"])
    found, model = ask(CALLS[name], theirs["version"])
    assert found.status_code == 200
    ours = {part: (data, kind, given) for part, data, kind, given in parts_of(model)}
    assert list(ours) == list(theirs["parts"])
    for part, (kind, *rest) in theirs["parts"].items():
        data, our_kind, given = ours[part]
        if kind == "bytearray":
            assert len(data) == rest[0]  # where JSON or a text cannot be read, the worker says so
        elif kind == "str" and our_kind == "text":
            assert data.decode() == rest[0]
        else:
            assert our_kind == "json"
            assert repr(json.loads(data)) == repr(rest[0])
        shown = theirs["headers"].pop(part, None)
        assert shown is None or shown == {"content-type": given}
    headers = parameters_of(model)["headers"]
    for header, value in theirs["headers"].items():
        assert headers[header.lower()] == value
    assert ("url_path" in headers) is ("url_path" in theirs["headers"])


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused_alike(name: str) -> None:
    found, _ = ask(CALLS[name])
    theirs = RECORDED[name]
    assert (found.status_code, found.text) == (theirs["status"], theirs["text"])
    assert {each: found.headers[each] for each in ("content-type", "cache-control", "pragma")} == {
        each: theirs["headers"][each] for each in ("content-type", "cache-control", "pragma")
    }


@pytest.mark.parametrize("name", BETTER)
def test_a_call_that_cannot_be_read_says_so(name: str) -> None:
    found, model = ask(CALLS[name])
    assert found.status_code == BETTER[name]
    assert not model.payloads
