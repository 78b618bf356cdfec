import json

import pytest

from inferpool.service.tools.chaos.answers import Expected, difference

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


def test_inputs_with_the_same_answer_are_found_out():
    cat = Expected(b"[0.5]", 1e-3)
    assert cat.is_same_as(Expected(b"[0.50001]", 1e-3))
    assert not cat.is_same_as(Expected(b"[0.6]", 1e-3))
