import msgspec
import torch

from inferpool.workers.training import rank
from tests.models.training.test_learner import RECIPE


def test_readers_of_each_rank_are_seeded_by_the_run_and_the_rank():
    def seed_of(run: int, number: int) -> int:
        recipe = msgspec.structs.replace(RECIPE, seed=run)
        generator: torch.Generator = rank._reading(recipe, device, number)["generator"]
        return generator.initial_seed()

    device = torch.device("cpu")
    runs = (0, 1, 2, 2**63 - 1)
    assert len({seed_of(run, number) for run in runs for number in range(4)}) == 4 * len(runs)
    assert seed_of(1, 2) == seed_of(1, 2)
