"""How right answers are."""

from collections import Counter

import pytest

from inferpool.models.training.scores import ClassScore, class_scores, wilson


@pytest.mark.parametrize(
    ("num_right", "num_images", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # R. G. Newcombe, Statistics in Medicine 17 (1998), table I
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_interval_is_that_of_published_examples(num_right, num_images, low, high):
    assert wilson(num_right, num_images) == pytest.approx((low, high), abs=5e-5)


def test_interval_ends_at_one_if_all_are_right_and_is_all_if_there_are_none():
    low, high = wilson(20, 20)
    assert (low, high) == pytest.approx((1 - 0.1611, 1), abs=5e-5)
    assert high <= 1
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(97, 100, z=2.5758)[0] < wilson(97, 100)[0] < 0.97


def test_each_class_has_its_counts_also_one_without_images():
    pairs = [("cat", "cat"), ("cat", "cat"), ("cat", "dog"), ("dog", "dog"), ("cow", "dog")]
    cat, dog, cow, ape = class_scores(Counter(pairs), ["cat", "dog", "cow", "ape"])
    assert cat == ClassScore(label="cat", num_images=3, num_predicted=2, num_right=2)
    assert (cat.recall, cat.precision) == (2 / 3, 1.0)
    assert (dog.recall, dog.precision) == (1.0, 1 / 3)
    assert (cow.recall, cow.precision) == (0.0, None)
    assert (ape.recall, ape.precision) == (None, None)
