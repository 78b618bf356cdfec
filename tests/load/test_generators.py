from inferpool.service.tools.trial.tally import LoadTally
from tests.load.generators import LoadSeries


def test_a_long_series_keeps_everything_in_a_bounded_number_of_bins():
    series = LoadSeries(width_s=1.0)
    for second in range(5000):
        tally = LoadTally()
        tally.latency.record(0.01, 2)
        series.add(second + 0.5, tally)
    assert len(series.bins) <= 400
    assert sum(each.num_good for each in series.bins) == 10_000
    assert series.width_s == 16.0
    assert {each.num_good for each in series.bins[:-1]} == {32}
