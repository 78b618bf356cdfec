"""The comparison of a split network with the whole one, without other processes."""

import re

import pytest
import torch
from torch import nn

from inferpool.models.split.verification import EXACT, Origin, Verification, deviation

CPU = torch.device("cpu")


@pytest.mark.parametrize(("moved", "says"), [(0.9e-3, ""), (1.1e-3, "off by 0.0011 of the")])
def test_numbers_may_be_off_by_a_share_of_the_largest(moved, says):
    right = torch.tensor([1.0, -100.0])
    found = deviation(right + torch.tensor([100 * moved, 0]), right, 1e-3)
    assert found.startswith(says)
    assert bool(found) is bool(says)


@pytest.mark.parametrize(("num_others", "says"), [(9, ""), (11, "other whole numbers")])
def test_a_share_of_whole_numbers_may_differ(num_others, says):
    right = torch.arange(1000)
    other = right.clone()
    other[:num_others] += 1
    assert deviation(other, right, 0.01) == says


@pytest.mark.parametrize(
    ("got", "says"),
    [
        ({"y": torch.ones(2, 3), "n": 3}, r"torch.float32 \[2, 3\] for torch.float32 \[2, 2\]"),
        ({"y": torch.ones(2, 2).double(), "n": 3}, "torch.float64 .* for torch.float32"),
        ({"y": torch.ones(2, 2), "n": 4}, "4 for 3"),
        ({"y": torch.ones(2, 2)}, " for "),
        ({"y": torch.full((2, 2), torch.nan), "n": 3}, "off by inf"),
        ({"y": torch.full((2, 2), torch.inf), "n": 3}, "off by"),
        ({"y": torch.tensor([[1, 1], [1, 1.01]]), "n": 3}, "off by 0.01 of the largest output"),
    ],
)
def test_answers_that_differ_are_described(got, says):
    right = {"y": torch.ones(2, 2), "n": 3}
    assert deviation(right, right, EXACT) == ""
    assert re.search(says, deviation(got, right, EXACT))


class Layers(nn.Module):
    """Two layers of one shape, with numbers that are not there yet."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.last(self.first(x).relu())


@pytest.fixture
def verification():
    with torch.device("meta"):
        network = Layers()
    return network, Verification(network, [torch.zeros(1, 6)], CPU)


def test_a_network_agrees_with_itself(verification):
    network, whole = verification
    assert not whole.complaint
    assert whole.difference(network, whole.origins, EXACT) == ""


def test_parameters_in_each_others_place_show(verification):
    network, whole = verification
    names = {"first.weight": "last.weight", "last.weight": "first.weight"}
    exchanged = [
        Origin(tensor=each.tensor, name=names.get(each.name, each.name), shape=each.shape)
        for each in whole.origins
    ]
    found = whole.difference(network, exchanged, EXACT)
    assert "answers a batch of 1 otherwise than whole: off by" in found


def test_what_is_right_for_one_batch_size_alone_shows(verification):
    network, whole = verification

    def compute(x):
        return network(x) + float(len(x) > 1)

    found = whole.difference(compute, whole.origins, EXACT)
    assert "answers a batch of 3 otherwise than whole: off by" in found


def test_a_split_network_that_fails_alone_is_named(verification):
    _, whole = verification

    def fail(x):
        raise ValueError("no such layer")

    found = whole.difference(fail, whole.origins, EXACT)
    assert found == "split, Layers fails: ValueError: no such layer"
