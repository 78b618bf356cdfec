"""A small network for classes of pictures, as an archive carries one."""

import torch
from torch import nn


class Classes(nn.Module):
    """Gives the scores of eight classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, kernel_size=16, stride=16)
        self.second = nn.Conv2d(8, 16, kernel_size=3, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.last = nn.Linear(64, 8)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        found = torch.relu(self.second(torch.relu(self.first(pictures))))
        return self.last(torch.flatten(self.pool(found), 1))
