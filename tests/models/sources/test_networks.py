import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from inferpool.models.errors import CheckpointError, SourceError
from inferpool.models.sources.networks import (
    build_classifier,
    can_compute,
    head_of,
    native_transform,
)

TINY = "tests.training_network:TinyNet"


@pytest.mark.parametrize("name", ["squeezenet1_1", "mobilenet_v3_small", "googlenet", "swin_t"])
def test_networks_of_torchvision_get_as_many_classes_as_asked_for(name):
    network = build_classifier(f"torchvision:{name}", None, num_classes=5, options={})
    network.eval()
    with torch.inference_mode():
        assert network(torch.zeros(2, 3, 96, 96)).shape == (2, 5)
    assert any(tensor.shape[0] == 5 for tensor in head_of(network, 5).parameters())


def test_published_weights_keep_all_but_the_last_layer():
    one, two = (
        build_classifier("efficientnet_lite0", "DEFAULT", num_classes=num, options={})
        for num in (4, 7)
    )
    first, second = one.state_dict(), two.state_dict()
    different = {name for name in first if first[name].shape != second[name].shape}
    assert different == {"_fc.weight", "_fc.bias"}
    assert all(torch.equal(first[name], second[name]) for name in first.keys() - different)


def test_a_checkpoint_for_other_classes_gets_a_new_last_layer(tmp_path):
    path = tmp_path / "other.safetensors"
    old = build_classifier(TINY, None, num_classes=9, options={})
    save_file(old.state_dict(), path)
    new = build_classifier(TINY, str(path), num_classes=3, options={})
    assert torch.equal(new.body[0].weight, old.body[0].weight)
    assert new.last.weight.shape[0] == 3
    same = build_classifier(TINY, str(path), num_classes=9, options={})
    assert torch.equal(same.last.weight, old.last.weight)


def test_a_checkpoint_of_another_network_is_refused(tmp_path):
    path = tmp_path / "other.safetensors"
    save_file(nn.Linear(3, 2).state_dict(), path)
    with pytest.raises(CheckpointError, match="does not fit TinyNet"):
        build_classifier(TINY, str(path), num_classes=3, options={})


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("efficientnet_lite", "did you mean efficientnet_lite0?"),
        ("resnet18", "a network is torchvision:NAME"),
        ("torchvision:resnet81", "torchvision has no classifier 'resnet81'"),
        ("tests.training_network:write_digits", "is no class"),
        ("tests.fault_model:FaultModel", "no subclass of torch.nn.Module"),
    ],
)
def test_a_network_that_cannot_be_trained_is_named(model, text):
    with pytest.raises(SourceError, match=text.replace("?", r"\?")):
        build_classifier(model, None, num_classes=3, options={})


def test_an_option_that_a_network_does_not_take_is_named():
    with pytest.raises(SourceError, match="wide"):
        build_classifier(TINY, None, num_classes=3, options={"wide": 2})


def test_the_sizes_that_a_network_takes_are_found_by_trying():
    network = build_classifier("torchvision:alexnet", None, num_classes=3, options={})
    assert not can_compute(network, 32, 3)
    assert can_compute(network, 64, 3)
    assert network.training, "it was left as it was"


def test_the_transform_of_published_weights_is_known():
    found = native_transform("efficientnet_lite0", "DEFAULT")
    assert found is not None
    assert (found.resize, found.crop, found.interpolation) == (256, 224, "bicubic")
    assert native_transform(TINY, None) is None
