from tests.load.tally import Series, Tally


def _tally(num):
    tally = Tally()
    for _ in range(num):
        tally.latency.record(0.01)
    return tally


def test_a_long_series_keeps_everything_in_a_bounded_number_of_bins():
    series = Series(width_s=1.0)
    for second in range(5000):
        series.add(second + 0.5, _tally(2))
    assert len(series.bins) <= 400
    assert sum(each.num_good for each in series.bins) == 10_000
    assert series.width_s == 16.0
    assert {each.num_good for each in series.bins[:-1]} == {32}


def test_kinds_of_errors_are_bounded():
    tally, other = Tally(), Tally()
    for number in range(100):
        tally.fail(f"error {number}")
        other.fail(f"another {number}")
    tally.add(other)
    assert tally.num_errors == 200
    assert len(tally.errors) <= 41


def test_server_timings_are_averaged_by_name():
    tally = Tally()
    for value in (1.0, 2.0):
        other = Tally()
        other.timing_ms["queue"] = value
        other.num_timed["queue"] = 1
        tally.add(other)
    assert tally.timings_ms() == {"queue": 1.5}
