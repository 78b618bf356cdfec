"""How presets are timed and compared on a CPU, by a fake clock."""

import itertools

import pytest

from inferpool.models.ragged import RaggedOutput
from inferpool.models.tolerance import ValueTolerance
from tests.models.items import loaded
from tests.models.speed.pace import FewSamples, small


def prepared(pace, max_batch_size=4, **times):
    """Return a trial, and the network of a preset; calibrating and sizing are done."""
    trial = pace.trial(small(), max_batch_size, **times)
    network = trial.prepare("folded")
    pace.seen.clear()
    pace.sizes.clear()
    return trial, network


def test_a_gain_is_the_mean_over_single_instances_and_full_batches(pace):
    trial, network = prepared(pace)
    pace.seconds = lambda kind, size: 0.008 if kind == "exact" else 0.001 * size
    assert trial.gain(network) == pytest.approx(4.0)  # of 8 and 2
    assert set(pace.sizes) == {1, 4}


@pytest.mark.parametrize("slow_kind", ["exact", "folded"])
def test_a_slow_moment_changes_no_gain(pace, slow_kind):
    trial, network = prepared(pace)
    calls = itertools.count()

    def seconds(kind, size):
        is_slow = kind == slow_kind and next(calls) == 3
        return (0.002 if kind == "exact" else 0.001) * (100 if is_slow else 1)

    pace.seconds = seconds
    assert trial.gain(network) == pytest.approx(2.0)


def in_turn(*ratios):
    """Return a time for each call, so that rounds have these ratios one after the other."""
    ratio = itertools.cycle(ratios)
    return lambda kind, size: 0.001 * next(ratio) if kind == "exact" else 0.001


@pytest.mark.parametrize(
    ("ratios", "rounds_s", "wanted"),
    [
        ((1.0, 1.05), 0.5, 3),  # they hardly differ
        ((1.0, 1.2), 0.5, 15),
        ((1.0, 1.2), 0.02, 9),  # of 0.0021 s, after one that is no measure
        ((1.0, 1.2), 0.0, 3),
    ],
)
def test_rounds_that_differ_are_repeated_for_a_while(pace, ratios, rounds_s, wanted):
    trial, network = prepared(pace, max_batch_size=1, rounds_s=rounds_s)
    pace.seconds = in_turn(*ratios)
    trial.gain(network)
    assert pace.seen.count("folded") == 1 + wanted  # the first call is no measure


def test_rounds_end_with_the_time_for_all_presets(pace):
    trial, network = prepared(pace, max_batch_size=1)
    pace.seconds = in_turn(1.0, 1.2)
    trial.until = pace.now + pace.prepare_s + 0.002 + 4.7 * 0.0021
    trial.gain(network)
    assert pace.seen.count("folded") == 1 + 5


def test_batches_that_would_take_long_are_timed_in_smaller_ones(pace):
    pace.batch_s = 0.1
    trial, network = prepared(pace, batch_s=0.25)
    trial.gain(network)
    assert set(pace.sizes) == {1, 2}


@pytest.mark.parametrize(("compare_s", "num_batches"), [(1.5, 2), (0.5, 1), (60.0, 13)])
def test_samples_are_compared_for_a_while(pace, compare_s, num_batches):
    pace.batch_s = 1.0  # so a batch has one sample
    trial, network = prepared(pace, compare_s=compare_s)
    assert trial.compare(network).is_within
    assert pace.seen == ["exact"] * num_batches + ["folded"] * num_batches


def test_a_network_is_calibrated_with_samples_of_every_kind_as_far_as_time_allows(pace):
    numbers = []
    for batch_s, wanted in ((0.001, 12), (0.5, 4), (9.0, 2)):
        pace.batch_s = batch_s
        trial = pace.trial(small())
        trial.calibrate(trial.exact)
        numbers.append((pace.sizes[-1], wanted))
    assert [size for size, _ in numbers] == [wanted for _, wanted in numbers]


class CutByPlace(FewSamples):
    """Returns the first probabilities of each instance, one more for each place in the batch."""

    num_less = 0

    def postprocess(self, outputs):
        rows = super().postprocess(outputs)["probabilities"]
        first = [row[: number + 1 - self.num_less] for number, row in enumerate(rows)]
        return {"probabilities": RaggedOutput(first)}


def test_presets_are_compared_by_lists_and_a_difference_in_number_counts(pace):
    model = loaded(CutByPlace())
    model.tolerance = ValueTolerance(relative=0.1)
    trial = pace.trial(model)
    network = trial.prepare("folded")
    assert trial.compare(network).is_within
    model.num_less = 1
    assert not trial.compare(network).is_within
