"""Sends the calls, writes answers down, and says how two answers differ."""

import base64
import contextlib
import dataclasses
import hashlib
import http.client
import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tests.clients.torchserve.calls import (
    RecordedCall,
    inference_calls,
    management_calls,
    metrics_calls,
)

TOLERANCE = 1e-4
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w.])")
_LARGE_BYTES = 20_000
_EVERY = 997
"""Every so-manieth number of a large answer is kept."""
_TIMEOUT_S = 120.0
_KEPT = ("content-type", "allow", "x-of-the-handler", "cache-control", "pragma", "x-pieces")
Answer = dict[str, Any]


def asked(port: int, call: RecordedCall) -> Answer:
    """Send a call; return its answer as it is written down.

    Returns:
        "status", "reason", "headers" (some), "chunked" and the body: "text" or "base64", or of a
        large one "length", "shape" (a hash of what is no number) and every 997th of "numbers".
        Of copies that were sent at once, all bodies must be the same. {"status": None}: the server
        has hung up.
    """
    answers: list[Answer] = []
    threads = [
        threading.Thread(target=lambda: answers.append(_asked(port, call)))
        for _ in range(call.copies)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == call.copies
    assert all(each == answers[0] for each in answers), answers
    return answers[0]


def _asked(port: int, call: RecordedCall) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    body = call.sent
    try:
        connection.connect()
        connection.putrequest(call.method, call.path, skip_accept_encoding=True)
        for name, value in call.headers.items():
            connection.putheader(name, value)
        has_length = "Transfer-Encoding" not in call.headers
        if has_length and (body or call.method not in ("GET", "HEAD", "OPTIONS")):
            connection.putheader("Content-Length", str(len(body)))
        with contextlib.suppress(OSError):  # it may have answered before it hung up
            connection.endheaders(body)
        response = connection.getresponse()
        return written(response, response.read())
    except (OSError, http.client.HTTPException):
        return {"status": None}
    finally:
        connection.close()


def written(response: http.client.HTTPResponse, body: bytes) -> Answer:
    """Return an answer as it is written down."""
    names = {name.lower(): value for name, value in response.headers.items()}
    found: Answer = {
        "status": response.status,
        "reason": response.reason,
        "headers": {name: names[name] for name in _KEPT if name in names},
    }
    if "x-request-id" in names:
        found["headers"]["x-request-id"] = "..."
    if names.get("transfer-encoding", "") == "chunked":
        found["chunked"] = True
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return found | {"base64": base64.b64encode(body).decode()}
    if len(body) < _LARGE_BYTES:
        return found | {"text": text}
    shape, numbers = taken_apart(text)
    digest = hashlib.sha256(shape.encode()).hexdigest()
    return found | {"length": len(numbers), "shape": digest, "numbers": numbers[::_EVERY]}


def taken_apart(text: str) -> tuple[str, list[float]]:
    """Return a text with a mark for each number, and the numbers."""
    return _NUMBER.sub("#", text), [float(each) for each in _NUMBER.findall(text)]


def difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return how an answer differs from the expected one; empty if it does not.

    Reason phrases are not compared: HTTP/2 has none, and no client reads them.
    """
    for key in ("status", "headers", "chunked", "base64", "length", "shape"):
        if expected.get(key) != found.get(key):
            return f"{key}: {found.get(key)!r} for {expected.get(key)!r}"
    if "text" not in expected:
        return _difference_of_numbers(expected.get("numbers", []), found.get("numbers", []))
    text, told = comparable(found.get("text", "")), comparable(expected["text"])
    shape, numbers = taken_apart(text)
    shape_told, numbers_told = taken_apart(told)
    if shape != shape_told:
        return f"text: {text[:500]!r} for {told[:500]!r}"
    return _difference_of_numbers(numbers_told, numbers)


def _difference_of_numbers(expected: Sequence[float], found: Sequence[float]) -> str:
    if len(expected) != len(found):
        return f"{len(found)} numbers for {len(expected)}"
    for one, other in zip(expected, found, strict=True):
        if abs(one - other) > TOLERANCE:
            return f"{other} for {one}"
    return ""


_DESCRIBED = (
    "modelName",
    "modelVersion",
    "modelUrl",
    "minWorkers",
    "maxWorkers",
    "responseTimeout",
)
_OF_A_WORKER = ("status", "gpu")


def comparable(text: str) -> str:
    """Return what must be equal in a description of models, or in metrics; other texts as they are.

    A description also tells what differs from run to run, and how this service batches, which is
    not as TorchServe does. Of metrics, the names and labels of those that start with "ts_" count.
    """
    if text.startswith("# HELP"):
        names = re.findall(r"^(ts_\w+){([^}]*)}", text, re.MULTILINE)
        return repr(sorted({(name, *re.findall(r"(\w+)=", labels)) for name, labels in names}))
    text = re.sub(r"boundary=-+\w+", "boundary=...", text)  # a client's own
    if '"modelVersion"' not in text or '"workers"' not in text:
        return text
    return json.dumps(
        [
            {
                **{name: each[name] for name in _DESCRIBED},
                "workers": [[one[name] for name in _OF_A_WORKER] for one in each["workers"]],
            }
            for each in json.loads(text)
        ]
    )


def ask_all(ports: Mapping[str, int], key: str = "") -> dict[str, dict[str, Answer]]:
    """Send all calls in their order; return the answers by the server's and the call's name.

    Args:
        ports: Those of the three addresses.
        key: What calls of management are sent with, which TorchServe does not need.
    """
    found: dict[str, dict[str, Answer]] = {}
    for each in (*inference_calls(), *metrics_calls(), *management_calls()):
        call = each
        answers = found.setdefault(call.server, {})
        assert call.call not in answers, f"two calls have the name {call.call}"
        if key and call.server == "management":
            call = dataclasses.replace(
                call, headers={**call.headers, "Authorization": f"Bearer {key}"}
            )
        answers[call.call] = asked(ports[call.server], call)
    return found
