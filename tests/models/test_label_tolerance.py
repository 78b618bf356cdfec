import pytest
import torch

from inferpool.models.label_tolerance import LabelTolerance, expected_agreement
from inferpool.models.tolerance import ValueTolerance


def probabilities(num_samples=200, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(num_samples, 50, generator=generator)).softmax(-1)


def disturbed(scores, noise, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return (scores.log() + noise * torch.randn(scores.shape, generator=generator)).softmax(-1)


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1, 0.5])
def test_a_few_dozen_samples_tell_how_often_labels_change(noise):
    many = probabilities(20_000)
    changed = disturbed(many, noise)
    truth = (many.argmax(-1) == changed.argmax(-1)).float().mean().item()
    assert expected_agreement(many[:60], changed[:60]) == pytest.approx(truth, abs=0.03)


def test_labels_that_change_too_often_are_refused_with_the_figures():
    exact = {"probabilities": probabilities()}
    found = LabelTolerance().judge(exact, {"probabilities": disturbed(probabilities(), 0.2)})
    assert not found.is_within
    assert "99%" in found.text
    assert f"{found.deviation:.2g}" in found.text


def test_a_label_without_a_clear_lead_may_change_only_where_that_was_asked_for():
    exact = probabilities()
    lead = exact.log().topk(2).values
    tied = (lead[:, 0] - lead[:, 1]) < 0.05 * 2
    swapped = exact.clone()
    top = exact.topk(2).indices
    swapped.scatter_(1, top, exact.gather(1, top.flip(1)))

    def judge(other, **wish):
        return LabelTolerance(max_deviation=1.0, **wish).judge(
            {"probabilities": exact}, {"probabilities": other}
        )

    assert 0.01 < tied.float().mean() < 0.5
    near = torch.where(tied[:, None], swapped, exact)
    assert not judge(near).is_within
    assert judge(near, min_lead=0.1).is_within
    assert not judge(swapped, min_lead=0.1).is_within


@pytest.mark.parametrize("flatness", [1, 1000])
def test_scores_that_are_all_about_the_same_are_held_to_as_much(flatness):
    exact, noisy = (
        (each.log() / flatness).softmax(-1)
        for each in (probabilities(), disturbed(probabilities(), 0.2))
    )
    found = LabelTolerance(max_deviation=1.0).judge(
        {"probabilities": exact}, {"probabilities": noisy}
    )
    assert not found.is_within


def test_probabilities_that_move_far_are_refused_even_if_no_label_changes():
    def judge(moved):
        exact = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
        other = torch.tensor([[0.9 - moved, 0.1 + moved], [0.2, 0.8]])
        return LabelTolerance().judge({"probabilities": exact}, {"probabilities": other})

    assert judge(0.048).is_within
    assert not judge(0.052).is_within


@pytest.mark.parametrize(("num_changed", "is_within"), [(9, True), (11, False)])
def test_one_label_of_a_hundred_may_change(num_changed, is_within):
    exact = torch.tensor([[0.6, 0.4]]).repeat(1000, 1)
    other = exact.clone()
    other[:num_changed] = torch.tensor([0.4, 0.6])
    tolerance = LabelTolerance(max_deviation=1.0)
    found = tolerance.judge({"probabilities": exact}, {"probabilities": other})
    assert found.is_within is is_within


def test_probabilities_that_are_no_numbers_are_refused():
    exact = {"probabilities": probabilities()}
    broken = {"probabilities": probabilities().fill_(torch.nan)}
    assert not LabelTolerance().judge(exact, broken).is_within


def test_values_may_be_off_by_a_fraction_of_the_largest():
    exact = {"y": torch.tensor([[1.0, -100.0]])}
    near = ValueTolerance().judge(exact, {"y": torch.tensor([[1.09, -100.0]])})
    assert near.is_within
    assert near.deviation == pytest.approx(0.0009, rel=0.01)
    assert not ValueTolerance().judge(exact, {"y": torch.tensor([[1.11, -100.0]])}).is_within


def test_each_output_must_agree():
    exact = {"first": torch.ones(2), "last": torch.ones(2)}
    for name in exact:
        other = {**exact, name: torch.tensor([1.0, 1.01])}
        found = ValueTolerance().judge(exact, other)
        assert not found.is_within
        assert found.deviation == pytest.approx(0.01, rel=0.01)


def test_an_output_of_zeros_must_stay_so():
    exact = {"y": torch.zeros(2)}
    assert ValueTolerance().judge(exact, {"y": torch.zeros(2)}).is_within
    assert not ValueTolerance().judge(exact, {"y": torch.full((2,), 1e-9)}).is_within


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"y": torch.ones(2, 3)},
        {"y": torch.ones(2, 2).bfloat16()},
        {"y": torch.full((2, 2), torch.nan)},
    ],
)
def test_outputs_of_another_form_are_refused(other):
    assert not ValueTolerance().judge({"y": torch.ones(2, 2)}, other).is_within


def test_whole_numbers_must_be_equal():
    exact = {"y": torch.tensor([[100_000]])}
    assert ValueTolerance().judge(exact, exact).is_within
    assert not ValueTolerance().judge(exact, {"y": torch.tensor([[100_001]])}).is_within
