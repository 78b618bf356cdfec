import torch
from torch import nn

from models.split.building import build_on_meta


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(4), persistent=False)


def test_parameters_have_no_values_and_buffers_have_theirs():
    network = build_on_meta(Tied)
    assert all(parameter.is_meta for parameter in network.parameters())
    assert network.head.weight is network.embedding.weight
    assert torch.equal(network.positions, torch.arange(4))
    assert not nn.Linear(2, 2).weight.is_meta
