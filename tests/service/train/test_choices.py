import pytest

from inferpool.models.training.samples import ImageFacts
from inferpool.service.train.choices import (
    balanced,
    batch_for,
    decay_for,
    edge_for,
    epochs_for,
    kind_of,
    rate_for,
    readers_for,
)


def facts(short_edge: int) -> ImageFacts:
    return ImageFacts(num_sampled=1, num_unreadable=0, short_edge=short_edge)


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        (["0", "1", "9"], "digits"),
        (["One", "two"], "digits"),
        (["0", "1", "999"], ""),
        (["a", "B", "ß"], "letters"),
        (["a", "7"], "letters"),
        (["turn_left", "turn_right", "straight"], "directions"),
        (["cat", "dog"], ""),
        (["bright", "dark"], ""),
    ],
)
def test_labels_that_mirroring_would_change_are_known(labels: list[str], kind: str):
    assert kind_of(labels) == kind


class TestEdge:
    @pytest.mark.parametrize(
        ("short_edge", "has_weights", "edge"),
        [
            (8, False, 32),
            (8, True, 64),
            (33, False, 64),
            (100, True, 128),
            (150, True, 224),
            (150, False, 160),
            (4000, True, 224),
            (4000, False, 224),
            (0, True, 224),
            (0, False, 224),
        ],
    )
    def test_small_images_stay_small(self, short_edge: int, has_weights: bool, edge: int):
        assert edge_for(short_edge, 224, has_weights=has_weights, fits=lambda _: True) == edge

    def test_a_network_that_takes_no_small_ones_gets_the_next_it_takes(self):
        assert edge_for(8, 299, has_weights=False, fits=lambda edge: edge >= 75) == 96
        assert edge_for(8, 299, has_weights=False, fits=lambda edge: edge == 299) == 299
        assert edge_for(8, 224, has_weights=False, fits=lambda edge: False) is None


def test_more_images_are_shown_less_often():
    assert epochs_for(1437, has_weights=False) == 28
    assert [epochs_for(num, has_weights=False) for num in (10, 10**6)] == [60, 10]
    assert [epochs_for(num, has_weights=True) for num in (10, 2000, 10**6)] == [30, 5, 3]


def test_a_batch_grows_with_the_images_and_divides_evenly():
    sizes = {num: batch_for(num, 1) for num in (5, 100, 1437, 5000, 10**6)}
    assert sizes == {5: 5, 100: 16, 1437: 32, 5000: 64, 10**6: 256}
    assert batch_for(1437, 3) == 30
    assert batch_for(5, 8) == 16


def test_the_rate_grows_with_the_root_of_the_batch_up_to_a_bound():
    assert [rate_for(size, has_weights=False) for size in (8, 32, 64, 4096)] == [
        *(0.0005, 0.001, 0.0014, 0.003)
    ]
    assert rate_for(32, has_weights=True) == 0.0003


def test_an_average_spans_some_steps_but_not_of_a_short_run():
    assert decay_for(99, 33) == 0.0
    assert decay_for(1232, 44) == pytest.approx(1 - 1 / 61.6, abs=1e-4)
    assert decay_for(100_000, 10) == pytest.approx(1 - 1 / 20, abs=1e-4)
    assert decay_for(100, 100) == pytest.approx(1 - 1 / 20, abs=1e-4)


def test_balanced_weights_make_the_mean_image_count_once():
    weights = balanced([10, 90])
    assert weights[0] == pytest.approx(9 * weights[1], rel=1e-4)
    assert 10 * weights[0] + 90 * weights[1] == pytest.approx(100, rel=1e-4)


def test_readers_are_for_gpus_and_for_what_takes_long_to_read():
    assert readers_for(1437, facts(8), 2, on_cpu=True) == 0
    assert readers_for(10**6, facts(8), 2, on_cpu=True) == 1
    assert readers_for(1437, facts(500), 2, on_cpu=True) == 1
    assert readers_for(1437, None, 2, on_cpu=True) == 1
    assert [readers_for(1437, facts(8), cores, on_cpu=False) for cores in (0, 4, 32)] == [1, 4, 8]
