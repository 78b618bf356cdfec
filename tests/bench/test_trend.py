import numpy as np

from tests.bench.trend import trend_of

_SECONDS = list(range(600))


def samples(per_hour: float, seed: int, *, step: float = 0.0) -> list[float]:
    """Noise around a line; with `step`, a walk that goes nowhere in particular."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(0, 1, len(_SECONDS))
    walk = np.zeros(len(_SECONDS))
    for i in range(1, len(_SECONDS)):
        walk[i] = 0.95 * walk[i - 1] + step * rng.normal()
    return list(100 + per_hour * np.array(_SECONDS) / 3600 + noise + walk)


def test_growth_is_found_with_its_interval():
    trend = trend_of(_SECONDS, samples(30.0, 1))
    assert trend is not None
    assert trend.low < 30 < trend.high
    assert trend.high - trend.low < 10
    assert not trend.is_flat


def test_noise_alone_is_rarely_called_growth_even_where_neighbours_are_alike():
    trends = [trend_of(_SECONDS, samples(0.0, seed, step=0.3)) for seed in range(100)]
    assert sum(trend is not None and trend.is_flat for trend in trends) >= 85


def test_what_never_changes_is_flat():
    trend = trend_of(_SECONDS, [7.0] * len(_SECONDS))
    assert trend is not None
    assert abs(trend.slope) < 1e-6
    assert trend.mean == 7.0


def test_few_samples_say_nothing():
    assert trend_of([1, 2, 3], [1.0, 2.0, 3.0]) is None
