import pytest

from inferpool.workers.host.canary import EVERY_S, PATIENCE_S, Canary
from inferpool.workers.messages import BatchDone, ItemError


def answer(took_s: float = 0.01, error: str = "") -> BatchDone:
    return BatchDone(1, [ItemError("model_error", error)] if error else [], took_s / 2, took_s / 2)


def test_first_canary_may_take_as_long_as_a_batch():
    assert Canary(60.0).limit_s == 60


def test_quick_model_is_asked_often_and_must_answer_soon():
    canary = Canary(60.0)
    assert canary.note(answer(0.01))
    assert (canary.every_s, canary.limit_s) == (EVERY_S, PATIENCE_S)


def test_canaries_of_a_slow_model_take_a_fiftieth_of_its_time():
    canary = Canary(60.0)
    canary.note(answer(2.0))
    assert canary.every_s == pytest.approx(100)
    assert canary.limit_s == 40


def test_canary_never_takes_longer_than_a_batch_may():
    canary = Canary(1.5)
    canary.note(answer(1.0))
    assert canary.limit_s == 1.5


def test_only_failures_in_a_row_are_an_illness():
    canary = Canary(60.0)
    assert not canary.note(answer(error="no"))
    assert canary.note(answer())
    assert not canary.note(answer(error="no"))
    assert not canary.is_ill
    canary.note(answer(error="never"))
    assert canary.is_ill
    assert canary.failure == "never"


def test_good_answer_to_a_request_ends_the_row_too():
    canary = Canary(60.0)
    canary.note(answer(error="no"))
    canary.forget_failures()
    canary.note(answer(error="no"))
    assert not canary.is_ill
