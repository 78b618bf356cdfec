"""A network that each rank builds with the same weights, for comparison with a whole one."""

import torch
from torch import nn

WIDTH = 32


class SeededMlp(nn.Sequential):
    """Three layers, which are cut into as many stages, and whose matrices can be divided."""

    split_points = ("2", "4")

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(
            nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH), nn.GELU(), nn.Linear(WIDTH, 7)
        )
