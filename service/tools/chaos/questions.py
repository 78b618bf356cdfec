"""The questions: the request for each number, and its right answer."""

import random
from collections.abc import Mapping, Sequence

import msgspec

from inferpool.service.client.reaching import problem_in
from inferpool.service.tools.chaos.protocols import ChaosConnection
from inferpool.service.tools.trial.connection import TrialError, post_request
from inferpool.service.tools.trial.inputs import TrialInput

_ASK_ALONE_S = 120.0
_REFUSALS = (429, 503)
_MAX_SHOWN = 80
_MAX_ROUNDINGS = 64
_ATOL_SHARE = 0.01
"""Share of the tolerance by which numbers close to zero may differ."""


class KnownQuestion:
    """An input with a known answer: the model was asked before any fault."""

    def __init__(self, path: str, given: TrialInput, body: bytes, tolerance: float) -> None:
        """Store the input, and the JSON that the service answered without other load.

        A float may differ by `tolerance`, a part of itself: batches of different sizes are rounded
        differently.
        """
        self.given = given
        self.value = msgspec.json.decode(body)
        self.num_instances = len(self.value.get("predictions", []))
        self._path = path
        self._tolerance = tolerance
        self._known_right = {body}

    def request(self, number: int, query: str = "", key: str = "") -> bytes:
        """Return the whole HTTP request, maybe with an API key; its X-Request-ID is the number."""
        given = self.given
        return _numbered(self._path + query, given.body, given.content_type, str(number), key)

    def complaint(self, number: int, body: bytes) -> str:
        """Return what is wrong with an answer; empty if nothing is."""
        if body in self._known_right:
            return ""
        try:
            value = msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            return f"no JSON: {error}"
        complaint = difference(self.value, value, self._tolerance)
        if not complaint and len(self._known_right) < _MAX_ROUNDINGS:
            self._known_right.add(body)
        return complaint

    def broke_off_rightly(self, body: bytes) -> bool:
        """Return whether streams in an answer say that they broke off, after the right parts."""
        if b'"stream_broken"' not in body:
            return False
        try:
            found = msgspec.json.decode(body)["predictions"]
            expected = self.value["predictions"]
            return len(found) == len(expected) and all(
                not difference(right[: len(parts)], parts, self._tolerance)
                for right, parts in zip(expected, map(_parts_in, found), strict=True)
            )
        except (msgspec.DecodeError, KeyError, TypeError):
            return False


class EchoQuestion:
    """JSON that `echo` sends back. It differs for each number, so that any mix-up is seen."""

    num_instances = 1

    def __init__(self, path: str, seed: int) -> None:
        self._path = path
        letters = "abcdefghijklmnopqrstuvwxyz"
        self._texts = "".join(random.Random(seed).choices(letters, k=1024))

    def request(self, number: int, query: str = "", key: str = "") -> bytes:
        """Return the whole HTTP request."""
        body = b'{"instances":[%s]}' % self._instance(number)
        return _numbered(self._path + query, body, "application/json", str(number), key)

    def complaint(self, number: int, body: bytes) -> str:
        """Return what is wrong with an answer; empty if nothing is."""
        expected = b'{"predictions":[%s]}' % self._instance(number)
        return "" if body == expected else f"expected {expected[:80]!r}, found {body[:80]!r}"

    def broke_off_rightly(self, body: bytes) -> bool:
        """Return False: it is no stream."""
        return False

    def _instance(self, number: int) -> bytes:
        start = number * 7 % 800
        text = self._texts[start : start + number % 200]
        return b'{"n":%d,"text":"%s"}' % (number, text.encode("ascii"))


Question = EchoQuestion | KnownQuestion
"""A request that can be sent under any number."""


def _numbered(path: str, body: bytes, content_type: str, request_id: str, key: str) -> bytes:
    headers = {"X-Request-ID": request_id} | ({"X-API-Key": key} if key else {})
    return post_request(path, body, content_type, headers)


async def learn(
    connection: ChaosConnection, path: str, given: TrialInput, tolerance: float, key: str = ""
) -> KnownQuestion:
    """Ask a healthy service twice, and return the question with this answer as the right one.

    Raises:
        TrialError: The input is refused, or has two answers.
        NoAnswerError: There is no answer.
    """
    request = _numbered(path, given.body, given.content_type, "learn", key)
    bodies = []
    for _ in range(2):
        answer = await connection.ask(request, _ASK_ALONE_S)
        if answer.status != 200:
            detail = problem_in(answer.body).get("detail") or repr(answer.body[:200])
            raise TrialError(
                f"{path} answers {given.name} with {answer.status}: {detail}; "
                "give inputs that it takes (--inputs PATH)"
            )
        bodies.append(answer.body)
    question = KnownQuestion(path, given, bodies[0], tolerance)
    if complaint := question.complaint(0, bodies[1]):
        raise TrialError(
            f"{path} answers {given.name} in two ways, so no answer can be called right "
            f"({complaint}); if that is rounding, raise --tolerance"
        )
    return question


def indistinct(questions: Sequence[KnownQuestion], tolerance: float) -> list[tuple[str, str]]:
    """Return pairs of inputs with the same answer: swapped answers to them would go unnoticed."""
    return [
        (left.given.name, right.given.name)
        for i, left in enumerate(questions)
        for right in questions[i + 1 :]
        if not difference(left.value, right.value, tolerance)
    ]


def is_refusal(status: int, body: bytes) -> bool:
    """Return whether an answer says that nothing was computed, and to try again later."""
    if status in _REFUSALS:
        return b'"given_up"' not in body
    return status == 200 and b'"error"' in body and _has_refused_instance(body)


def _parts_in(prediction: object) -> list[object]:
    """Return the parts that a stream had; those of a broken one stand beside its error."""
    parts = prediction["parts"] if isinstance(prediction, dict) else prediction
    if not isinstance(parts, list):
        raise TypeError("these are no parts")
    return parts


def _has_refused_instance(body: bytes) -> bool:
    try:
        predictions = msgspec.json.decode(body)["predictions"]
        errors = [each["error"] for each in predictions if isinstance(each, dict)]
        return any(error.get("status") in _REFUSALS for error in errors if isinstance(error, dict))
    except (msgspec.DecodeError, KeyError, TypeError):
        return False


def problem_code(body: bytes) -> str:
    """Return the `code` of a problem; empty if the body is none."""
    return str(problem_in(body).get("code", ""))


def difference(expected: object, found: object, tolerance: float, place: str = "answer") -> str:
    """Name the first place where two JSON values differ by more than rounding; empty if none."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        if expected.keys() != found.keys():
            return f"{place}: expected the keys {list(expected)}, found {list(found)}"
        for key, value in expected.items():
            if complaint := difference(value, found[key], tolerance, f"{place}.{key}"):
                return complaint
        return ""
    if isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            return f"{place}: expected {len(expected)} entries, found {len(found)}"
        for i, (left, right) in enumerate(zip(expected, found, strict=True)):
            if complaint := difference(left, right, tolerance, f"{place}[{i}]"):
                return complaint
        return ""
    types = {type(expected), type(found)}
    if float in types <= {int, float}:
        assert isinstance(expected, int | float)
        assert isinstance(found, int | float)
        allowed = tolerance * (max(abs(expected), abs(found)) + _ATOL_SHARE)
        is_same = abs(expected - found) <= allowed
    else:
        is_same = type(expected) is type(found) and expected == found
    return "" if is_same else f"{place}: expected {_shown(expected)}, found {_shown(found)}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
