import asyncio
import json

import pytest

from inferpool.service.tools.chaos.questions import (
    EchoQuestion,
    Expected,
    KnownQuestion,
    difference,
    indistinct,
    is_refusal,
    learn,
)
from inferpool.service.tools.trial.connection import TrialError, connected
from inferpool.service.tools.trial.inputs import TrialInput
from tests.service.tools.chaos.fake_service import answering

_GIVEN = TrialInput(name="one.json", body=b'{"instances": [1, 2]}', content_type="application/json")


def taught(*bodies: object, status: int = 200) -> KnownQuestion:
    """Learn from a service that gives these answers, one after the other."""

    async def go() -> KnownQuestion:
        async with answering(bodies, status) as address, connected(address) as connection:
            return await learn(connection, "/predict/m", _GIVEN, 1e-3)

    return asyncio.run(go())


def test_answer_of_a_healthy_service_is_the_right_one():
    question = taught({"predictions": [0.5, 1]}, {"predictions": [0.50001, 1]})
    assert question.num_instances == 2
    assert question.complaint(7, b'{"predictions":[0.5,1]}') == ""
    assert "answer.predictions[1]" in question.complaint(7, b'{"predictions":[0.5,2]}')
    request = question.request(7, "?a=b")
    assert request.startswith(b"POST /predict/m?a=b HTTP/1.1\r\n")
    assert b"X-Request-ID: 7\r\n\r\n" + _GIVEN.body in request


@pytest.mark.parametrize(
    ("bodies", "status", "message"),
    [
        ([{"predictions": [1]}, {"predictions": [2]}], 200, r"one\.json in two ways"),
        ([{"detail": "no such thing"}], 422, "422: no such thing; .*--inputs PATH"),
    ],
)
def test_input_with_changing_answers_or_none_cannot_be_tested(
    bodies: list[object], status: int, message: str
):
    with pytest.raises(TrialError, match=message):
        taught(*bodies, status=status)


def test_inputs_with_equal_answers_are_named():
    one, two, again = (taught(*2 * [{"predictions": [each]}]) for each in (0.5, 0.6, 0.50001))
    assert indistinct([one, two, again], 1e-3) == [("one.json", "one.json")]


def test_each_number_has_another_question_for_echo():
    question = EchoQuestion("/predict/echo", 1)
    bodies = {question.request(number).partition(b"\r\n\r\n")[2] for number in range(2000)}
    assert len(bodies) == 2000
    body = question.request(5).partition(b"\r\n\r\n")[2]
    (instance,) = json.loads(body)["instances"]
    right = json.dumps({"predictions": [instance]}, separators=(",", ":")).encode()
    assert question.complaint(5, right) == ""
    assert question.complaint(6, right)


def test_refusals_are_told_from_failures():
    assert is_refusal(429, b"{}")
    assert is_refusal(503, b'{"code":"unavailable"}')
    assert not is_refusal(503, b'{"code":"given_up"}')
    assert not is_refusal(500, b"{}")
    assert is_refusal(200, b'{"predictions":[1,{"error":{"status":429}}]}')
    assert not is_refusal(200, b'{"predictions":[1,{"error":{"status":500}}]}')


_ANSWER = {"predictions": [[{"label": "cat", "index": 3, "score": 0.25}]]}


@pytest.mark.parametrize(
    "found",
    [
        {"predictions": [[{"label": "dog", "index": 3, "score": 0.25}]]},
        {"predictions": [[{"label": "cat", "index": 4, "score": 0.25}]]},
        {"predictions": [[{"label": "cat", "index": 3, "score": 0.26}]]},
        {"predictions": [[{"label": "cat", "index": 3}]]},
        {"predictions": [[]]},
        {"predictions": None},
        {"predictions": [[{"label": "cat", "index": True, "score": 0.25}]]},
    ],
)
def test_any_difference_beyond_rounding_is_named_by_its_place(found: object):
    complaint = Expected(json.dumps(_ANSWER).encode(), 1e-3).complaint(json.dumps(found).encode())
    assert complaint.startswith("answer.predictions")


def test_floats_may_differ_by_rounding_and_whole_numbers_not_at_all():
    rounded = {"predictions": [[{"label": "cat", "index": 3, "score": 0.25001}]]}
    assert not difference(_ANSWER, rounded, 1e-3)
    assert not difference([0.0], [1e-6], 1e-3)
    assert not difference([1], [1.0], 1e-3)
    assert difference([1000], [1001], 1e-2)
    assert difference([1.0], [float("nan")], 1e-3)


def test_answer_that_is_no_json_is_wrong():
    assert "no JSON" in Expected(b"{}", 1e-3).complaint(b"{")
