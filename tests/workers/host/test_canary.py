import pytest

from inferpool.workers.host.canary import Canary
from inferpool.workers.shared.messages import BatchDone, ItemError


def answer(took_s: float = 0.01, error: str = "") -> BatchDone:
    return BatchDone(1, [ItemError("model_error", error)] if error else [], took_s / 2, took_s / 2)


@pytest.mark.parametrize(
    ("batch_timeout_s", "took_s", "every_s", "limit_s"),
    [
        (60.0, 0.01, 5.0, 4.0),  # a quick model is asked often
        (60.0, 2.0, 100.0, 40.0),  # canaries take a fiftieth of the time of a slow one
        (1.5, 1.0, 50.0, 1.5),  # no canary may take longer than a batch
    ],
)
def test_next_canary_depends_on_the_time_of_the_last_one(
    batch_timeout_s: float, took_s: float, every_s: float, limit_s: float
):
    canary = Canary(batch_timeout_s, every_s=5.0, patience_s=4.0)
    assert canary.limit_s == batch_timeout_s  # the first may take as long as a batch
    assert canary.note(answer(took_s))
    assert (canary.every_s, canary.limit_s) == (pytest.approx(every_s), limit_s)


def test_only_failures_in_a_row_are_an_illness():
    canary = Canary(60.0, every_s=5.0, patience_s=5.0)
    assert not canary.note(answer(error="no"))
    assert canary.note(answer())
    assert not canary.note(answer(error="no"))
    assert not canary.is_ill
    canary.forget_failures()  # after a good answer to a request
    assert not canary.note(answer(error="no"))
    assert not canary.is_ill
    canary.note(answer(error="never"))
    assert canary.is_ill
    assert canary.failure == "never"
