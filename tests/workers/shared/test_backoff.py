from inferpool.workers.shared.backoff import Backoff


def test_pauses_double_up_to_the_longest_and_begin_again_after_a_success():
    pauses = Backoff(0.5, 5.0)
    assert [pauses.next_s() for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    pauses.reset()
    assert [pauses.next_s() for _ in range(2)] == [0.5, 1.0]


def test_the_pause_after_any_number_of_failures_has_a_length():
    assert [Backoff(0.1, 30.0).pause_s(num) for num in (0, 3, 10_000)] == [0.1, 0.8, 30.0]
