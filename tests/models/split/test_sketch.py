import pytest
import torch
from torch import nn

from models.split.sketch import Sketch, fill


@pytest.mark.parametrize("is_zip", [True, False])
def test_what_a_network_loads_as_it_is_built_is_in_its_parts(tmp_path, caplog, is_zip):
    def layers():
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def build():
        network = layers()
        network.load_state_dict(torch.load(tmp_path / "weights.pth", weights_only=True))
        return network

    trained = layers()
    trained[1].running_mean += 3
    torch.save(
        trained.state_dict(), tmp_path / "weights.pth", _use_new_zipfile_serialization=is_zip
    )
    sketch = Sketch(build)
    assert all(parameter.is_meta for parameter in sketch.network.parameters())
    part = sketch.network[1:]
    fill(part, sketch.built_for(part).get, torch.device("cpu"))
    expected = trained[1:].state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in part.state_dict().items())
    assert sketch.network[0].weight.is_meta
    assert not caplog.records


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(4), persistent=False)


def test_parameters_have_no_values_and_buffers_have_theirs():
    network = Sketch(Tied).network
    assert all(parameter.is_meta for parameter in network.parameters())
    assert network.head.weight is network.embedding.weight
    assert torch.equal(network.positions, torch.arange(4))
    assert not nn.Linear(2, 2).weight.is_meta
