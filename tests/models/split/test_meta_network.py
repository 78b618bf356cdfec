import pytest
import torch
from torch import nn

from inferpool.models.split.meta_network import MetaNetwork, fill


@pytest.mark.parametrize("is_zip", [True, False])
def test_weights_that_a_network_loads_as_it_is_built_are_in_its_parts(tmp_path, caplog, is_zip):
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
    meta = MetaNetwork(build)
    assert all(parameter.is_meta for parameter in meta.network.parameters())
    part = meta.network[1:]
    fill(part, meta.built(dict(part.state_dict(keep_vars=True))).get, torch.device("cpu"))
    expected = trained[1:].state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in part.state_dict().items())
    assert meta.network[0].weight.is_meta
    assert not caplog.records


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(4), persistent=False)


def test_parameters_have_no_values_and_buffers_have_theirs():
    network = MetaNetwork(Tied).network
    assert all(parameter.is_meta for parameter in network.parameters())
    assert network.head.weight is network.embedding.weight
    assert torch.equal(network.positions, torch.arange(4))
    assert not nn.Linear(2, 2).weight.is_meta


class Noisy(nn.Sequential):
    """Draws random tensors after its parameters."""

    def __init__(self):
        torch.manual_seed(1)
        super().__init__(nn.Linear(3, 4), nn.Linear(4, 2))
        self.register_buffer("noise", torch.randn(2), persistent=False)
        self.plain = torch.randn(2)


class WithMean(nn.Linear):
    """Has a buffer that is computed of its parameters as it is built."""

    def __init__(self):
        torch.manual_seed(1)
        super().__init__(3, 4)
        self.register_buffer("mean", self.weight.detach().mean(0))


def normed():
    torch.manual_seed(1)
    return nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))


@pytest.mark.parametrize("build", [Noisy, WithMean, normed])
def test_a_part_that_is_built_again_has_the_numbers_of_the_whole(build):
    meta = MetaNetwork(build)
    fill(
        meta.network,
        meta.built(dict(meta.network.state_dict(keep_vars=True))).get,
        torch.device("cpu"),
    )
    x, whole = torch.ones(3), build()
    assert torch.equal(meta.network(x), whole(x))
    for name, tensor in [*whole.named_buffers(), ("plain", getattr(whole, "plain", None))]:
        assert tensor is None or torch.equal(getattr(meta.network, name), tensor)
