import json
import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from inferpool.models.errors import CheckpointError
from inferpool.models.files.checkpoint import (
    StoredWeights,
    load_weights,
    read_weights,
)
from inferpool.models.files.kinds import kind_of

# torch.jit is deprecated, and still what users have.
scripting = pytest.mark.filterwarnings("ignore:`torch.jit")


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)


def state(**changes):
    torch.manual_seed(1)
    return {name: torch.rand_like(t) if t.dim() else t for name, t in Net().state_dict().items()}


def saved(path, value, **options):
    torch.save(value, path, **options)
    return path


def assert_loads(path):
    assert all(tensor.device.type == "cpu" for tensor in read_weights(path, Net()).values())
    network = Net()
    load_weights(network, path)
    assert all(torch.equal(network.state_dict()[name], tensor) for name, tensor in state().items())


def refused(path, network=None):
    with pytest.raises(CheckpointError) as info:
        load_weights(network or Net(), path)
    return str(info.value)


PREFIXES = ("", "module.", "_orig_mod.", "module._orig_mod.", "model.", "model._orig_mod.")


@pytest.mark.parametrize("wrapper", [None, "state_dict", "model_state_dict", "model"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_state_dict_is_found_in_what_training_scripts_save(tmp_path, wrapper, prefix):
    weights = {prefix + name: tensor for name, tensor in state().items()}
    value = weights if wrapper is None else {"epoch": 3, wrapper: weights, "lr": 0.1}
    assert_loads(saved(tmp_path / "a.pth", value))


class Wrapped(nn.Module):
    """A network that has parts of its own with the names of wrappers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, Net())


@pytest.mark.parametrize("part", ["model", "module", "_orig_mod"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_part_that_is_called_like_a_wrapper_keeps_its_name(tmp_path, part, prefix):
    weights = Wrapped(part).state_dict()
    value = {prefix + name: tensor for name, tensor in weights.items()}
    network = Wrapped(part)
    load_weights(network, saved(tmp_path / "a.pth", value))
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, weights[name])


def test_safetensors_and_files_older_than_the_zip_format_load(tmp_path):
    save_file(state(), tmp_path / "a.safetensors")
    assert_loads(tmp_path / "a.safetensors")
    assert_loads(saved(tmp_path / "b.pth", state(), _use_new_zipfile_serialization=False))


def sharded(folder, weights, index=None):
    """Write weights as Hugging Face's libraries do for large models: several files and an index."""
    for number, (name, tensor) in enumerate(weights.items()):
        save_file({name: tensor}, folder / f"part-{number}.safetensors")
    files = {name: f"part-{number}.safetensors" for number, name in enumerate(weights)}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": index or files}))
    return path


def test_weights_in_several_files_load_by_their_index(tmp_path):
    assert_loads(sharded(tmp_path, state()))


def test_an_index_leads_to_the_files_beside_it_only(tmp_path):
    assert "not a file beside it" in refused(sharded(tmp_path, state(), {"a": "../b.safetensors"}))
    assert "and it is not" in refused(sharded(tmp_path, state(), {"a": "part-0.safetensors"}))
    assert "no such file" in refused(sharded(tmp_path, state(), {"a": "part-9.safetensors"}))


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_a_part_of_a_tensor_is_read_alone_and_copied(tmp_path, suffix):
    weights = {f"module.{name}": tensor for name, tensor in state().items()}
    path = tmp_path / f"a.{suffix}"
    (save_file if suffix == "safetensors" else torch.save)(weights, path)
    stored = StoredWeights(path, Net())
    whole = state()["first.weight"]
    assert stored.shapes["first.weight"] == (4, 3)
    assert torch.equal(stored.read("first.weight", slice(1, 3)), whole[1:3])
    part = stored.read("first.weight", slice(None), slice(0, 2))
    assert torch.equal(part, whole[:, :2])
    assert part.is_contiguous()
    assert part.untyped_storage().nbytes() == part.nbytes
    assert stored.read("norm.num_batches_tracked") == 0


def test_weights_of_another_precision_are_converted_and_training_counters_may_be_missing(tmp_path):
    halves = {name: tensor.half() for name, tensor in state().items()}
    network = Net()
    load_weights(network, saved(tmp_path / "a.pth", halves))
    assert network.first.weight.dtype == torch.float32
    weights = state()
    del weights["norm.num_batches_tracked"]
    assert_loads(saved(tmp_path / "a.pth", weights))


@pytest.mark.parametrize("name", ["a.pth", "a.safetensors"])
@pytest.mark.parametrize("keep", [0, 1, 60, -9])
def test_a_file_cut_short_cannot_be_read(tmp_path, name, keep):
    path = tmp_path / name
    if name.endswith(".pth"):
        saved(path, state())
    else:
        save_file(state(), path)
    path.write_bytes(path.read_bytes()[:keep])
    assert name in refused(path)


def test_rubbish_is_no_checkpoint(tmp_path):
    path = tmp_path / "a.pth"
    path.write_bytes(b"<html>404</html>" * 40)
    assert "a.pth is a page of HTML, perhaps that of a failed download" in refused(path)
    path.write_bytes(b"<p>404</p>" * 40)
    text = refused(path)
    assert text.startswith(f"{path} is not a checkpoint: torch.load finds no pickled tensors in it")
    assert "weights_only" not in text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"just some text", "KeyError: 544502645"),
        (b"junk", "error: unpack requires a buffer of 4 bytes"),
        (b"K", "IndexError: "),
    ],
)
def test_errors_of_torch_are_named_by_their_type(tmp_path, content, reason):
    path = tmp_path / "a.pth"
    path.write_bytes(content)
    text = refused(path)
    assert text.startswith(f"{path} is not a checkpoint, or is damaged: torch.load fails with ")
    assert reason in text


@pytest.mark.parametrize("name", ["a.pth", "a.safetensors"])
def test_a_missing_and_an_empty_file_are_called_so(tmp_path, name):
    assert refused(tmp_path / name) == f"{tmp_path / name}: there is no such file"
    (tmp_path / name).touch()
    assert refused(tmp_path / name) == f"{tmp_path / name} is not a checkpoint: the file is empty"


class Bomb:
    ran = False

    def __reduce__(self):
        return (exec, ("import tests.models.files.test_checkpoint as t; t.Bomb.ran = True",))


@pytest.mark.parametrize("is_zip", [True, False])
def test_objects_other_than_tensors_are_refused_and_not_run(tmp_path, is_zip):
    path = saved(tmp_path / "a.pth", Bomb(), _use_new_zipfile_serialization=is_zip)
    assert "holds objects other than tensors (" in refused(path)
    assert "convert it to safetensors" in refused(path)
    assert not Bomb.ran


def test_networks_and_plain_pickles_are_refused(tmp_path):
    path = saved(tmp_path / "a.pth", Net())
    assert "test_checkpoint.Net" in refused(path)
    path.write_bytes(pickle.dumps(Bomb()))
    refused(path)
    assert not Bomb.ran


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2), "holds a Tensor, not a state_dict"),
        ({}, "is empty"),
        ({"epoch": 1, "lr": 2}, "2 these are not tensors: epoch, lr"),
    ],
)
def test_files_without_weights_are_refused(tmp_path, value, message):
    assert message in refused(saved(tmp_path / "a.pth", value))


def test_weights_of_another_network_are_told_by_name_and_shape(tmp_path):
    weights = state()
    weights["head.weight"] = torch.zeros(1)
    del weights["first.bias"]
    message = refused(saved(tmp_path / "a.pth", weights), Net(width=5))
    assert "does not fit Net: 1 missing: first.bias; 1 unexpected: head.weight; 5 of another" in (
        message
    )
    assert "first.weight ([4, 3] in the file, [5, 3] in the network)" in message
    assert message.endswith("and 1 more")


@scripting
@pytest.mark.slow
def test_whole_models_are_no_weights(tmp_path):
    torch.jit.script(nn.Linear(2, 2)).save(tmp_path / "a.pt")
    assert "is a TorchScript archive, a whole model" in refused(tmp_path / "a.pt")
    program = torch.export.export(nn.Linear(2, 2), (torch.zeros(1, 2),))
    torch.export.save(program, tmp_path / "a.pt2")
    assert "is a torch.export archive, a whole model" in refused(tmp_path / "a.pt2")


@scripting
def test_archives_are_told_apart_by_what_is_in_them(tmp_path):
    torch.jit.script(nn.Linear(2, 2)).save(tmp_path / "a")
    assert kind_of(tmp_path / "a") == "torchscript"
    assert kind_of(saved(tmp_path / "b", state())) == "checkpoint"
    assert kind_of(tmp_path / "none") is None
    (tmp_path / "c").write_bytes(b"PK\3\4")
    assert kind_of(tmp_path / "c") == "cut"
