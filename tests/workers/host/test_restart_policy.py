import pytest

from inferpool.workers.host.restart_policy import RestartPolicy


@pytest.mark.parametrize(
    ("num_in_row", "least_s"), [(0, 0.0), (1, 0.0), (2, 0.5), (3, 1.0), (7, 16.0), (8, 30.0)]
)
def test_pauses_grow_with_failures_in_a_row_up_to_a_limit(num_in_row: int, least_s: float):
    pauses_s = [RestartPolicy().pause_s(num_in_row) for _ in range(100)]
    assert min(pauses_s) >= least_s
    assert max(pauses_s) <= 1.2 * least_s
    assert len({*pauses_s}) > 1 or not least_s  # workers that died at once start apart
