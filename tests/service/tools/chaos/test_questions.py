import asyncio
import json

import pytest

from inferpool.service.tools.chaos.questions import (
    EchoQuestion,
    KnownQuestion,
    indistinct,
    is_refusal,
    learn,
)
from inferpool.service.tools.trial.connection import TrialError, connected
from inferpool.service.tools.trial.inputs import TrialInput
from tests.service.tools.fake_service import answering

_GIVEN = TrialInput(name="one.json", body=b'{"instances": [1, 2]}', content_type="application/json")


def taught(*bodies: object, status: int = 200) -> KnownQuestion:
    """Learn from a service that gives these answers, one after the other."""

    async def go() -> KnownQuestion:
        async with answering(bodies, status) as address, connected(address) as connection:
            return await learn(connection, "/predict/m", _GIVEN, 1e-3)

    return asyncio.run(go())


def complaint_of(right: list[object], body: bytes) -> str:
    """Return what is wrong with an answer where the right predictions are known."""
    known = json.dumps({"predictions": right}).encode()
    return KnownQuestion("/predict/m", _GIVEN, known, 1e-3).complaint(1, body)


def test_answer_of_a_healthy_service_is_the_right_one():
    question = taught({"predictions": [0.5, 1]}, {"predictions": [0.50001, 1]})
    assert question.num_instances == 2
    assert question.complaint(7, b'{"predictions":[0.5,1]}') == ""
    assert "answer.predictions[1]" in question.complaint(7, b'{"predictions":[0.5,2]}')
    request = question.request(7, "?a=b")
    assert request.startswith(b"POST /predict/m?a=b HTTP/1.1\r\n")
    assert b"X-Request-ID: 7\r\n\r\n" + _GIVEN.body in request


def test_input_with_changing_answers_or_none_cannot_be_tested():
    with pytest.raises(TrialError, match=r"one\.json in two ways"):
        taught({"predictions": [1]}, {"predictions": [2]})
    with pytest.raises(TrialError, match=r"422: no such thing; .*--inputs PATH"):
        taught({"detail": "no such thing"}, status=422)


def test_inputs_with_equal_answers_are_named():
    one, two, again = (taught(*2 * [{"predictions": [each]}]) for each in (0.5, 0.6, 0.50001))
    assert indistinct([one, two, again], 1e-3) == [("one.json", "one.json")]


def test_each_number_has_another_question_for_echo():
    question = EchoQuestion("/predict/echo", 1)
    bodies = [question.request(number).partition(b"\r\n\r\n")[2] for number in range(2000)]
    assert len(set(bodies)) == 2000
    (instance,) = json.loads(bodies[5])["instances"]
    right = json.dumps({"predictions": [instance]}, separators=(",", ":")).encode()
    assert question.complaint(5, right) == ""
    assert question.complaint(6, right)


def test_refusals_are_told_from_failures():
    for status, body in (
        (429, {}),
        (503, {"code": "unavailable"}),
        (200, {"predictions": [1, {"error": {"status": 429}}]}),
    ):
        assert is_refusal(status, json.dumps(body).encode())
    for status, body in (
        (503, {"code": "given_up"}),
        (500, {}),
        (200, {"predictions": [1, {"error": {"status": 500}}]}),
    ):
        assert not is_refusal(status, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("right", "found", "is_same"),
    [
        ({"label": "cat", "score": 0.25}, {"label": "cat", "score": 0.2501}, True),
        ({"label": "cat", "score": 0.25}, {"label": "cat", "score": 0.26}, False),
        ({"label": "cat", "score": 0.25}, {"label": "dog", "score": 0.25}, False),
        ({"label": "cat", "score": 0.25}, {"label": "cat"}, False),
        (0.0, 1e-6, True),
        (1, 1.0, True),
        (1, True, False),
        (1000, 1001, False),
        ([1], [], False),
        ([1], None, False),
    ],
)
def test_floats_may_differ_by_rounding_and_nothing_else(
    right: object, found: object, is_same: bool
):
    complaint = complaint_of([right], json.dumps({"predictions": [found]}).encode())
    assert (complaint == "") == is_same
    assert is_same or complaint.startswith("answer.predictions[0]")


def test_answer_that_is_no_json_is_wrong():
    assert "no JSON" in complaint_of([], b"{")


@pytest.mark.parametrize(
    ("parts", "is_right"), [([1, 2], True), ([], True), ([2, 1], False), ([1, 2, 3, 4], False)]
)
def test_a_stream_may_break_off_after_the_right_parts(parts: list[int], is_right: bool) -> None:
    question = KnownQuestion("/predict/m", _GIVEN, b'{"predictions":[[1,2,3]]}', 1e-3)
    broken = {"error": {"code": "stream_broken", "status": 500, "message": "-"}, "parts": parts}
    body = json.dumps({"predictions": [broken]}).encode()
    assert question.broke_off_rightly(body) is is_right
    assert question.complaint(1, body)
    assert not question.broke_off_rightly(b'{"predictions":[[1,2,3]]}')
