import torch

from inferpool.workers.training import rank
from tests.models.training.test_learner import RECIPE


def test_readers_of_each_rank_are_seeded_by_the_run_and_the_rank():
    device = torch.device("cpu")
    seeds = [rank._reading(RECIPE, device, number)["generator"].initial_seed() for number in (0, 1)]
    assert seeds == [1, 2]
