import os

import pytest
import torch
from safetensors.torch import save_file

from models.checkpoint import StoredWeights
from models.errors import ModelError, OutOfStepError
from models.split.tensor import load_tensor_parallel
from tests.models.split import networks
from tests.models.split.pair import Pair

_loaded = {}
"""In each rank, by the name of the network."""


@pytest.fixture(scope="module")
def pair():
    pair = Pair("tensor")
    yield pair
    pair.close()


def load_counted(ranks, name, build, path, example):
    """Load, and count the bytes that are read of the file."""
    num_bytes, read = [], StoredWeights.read

    def counted(stored, name, *index):
        tensor = read(stored, name, *index)
        num_bytes.append(tensor.nbytes)
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoredWeights, "read", counted)
        part, _ = load(ranks, name, build, path, example=example)
    return part, sum(num_bytes)


def load(ranks, name, build, path, plan=None, example=()):
    plan = plan() if callable(plan) else plan
    part = load_tensor_parallel(ranks, build, path, example, tensor_plan=plan)
    _loaded[name] = part
    return part.part, part.report


def call(ranks, name, *args, error=()):
    """The lead's result, or its error's name."""
    if ranks.rank:
        return follow(ranks, name)
    try:
        with torch.inference_mode():
            return _loaded[name](*args)
    except error as raised:
        return type(raised).__name__


def call_wrongly(ranks, name, *args):
    return call(ranks, name, *args, error=IndexError)


def follow(ranks, name):
    try:
        _loaded[name].serve_next(30)
    except OutOfStepError as raised:
        return type(raised).__name__
    return os.getpid()


def whole(build, tmp_path):
    """The unsplit network, and its weights in a file."""
    torch.manual_seed(3)
    network = build().eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    path = tmp_path / "weights.safetensors"
    save_file(network.state_dict(), path)
    return network, path


def deviation(one, other):
    return ((one - other).abs().max() / other.abs().max()).item()


def test_the_encoder_of_texts_is_cut_with_no_plan_of_its_own(pair, tmp_path):
    network, path = whole(networks.bert, tmp_path)
    num_bytes = sum(each.nbytes for each in network.parameters())
    for part, _ in pair.run(load, "bert", networks.bert, path):
        assert part.num_bytes < 0.6 * num_bytes
    mask = torch.arange(9) < torch.tensor([[9], [4], [1]])
    ids = torch.randint(100, mask.shape)
    with torch.inference_mode():
        assert deviation(pair.run(call, "bert", ids, mask)[0], network(ids, mask)) <= 1e-4


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("build", list(networks.INPUTS))
def test_outputs_equal_the_unsplit_networks(pair, tmp_path, build):
    network, path = whole(build, tmp_path)
    parts = pair.run(load_counted, "a", build, path, networks.INPUTS[build]())
    num_bytes = sum(each.nbytes for each in network.parameters())
    for args in (networks.INPUTS[build](), networks.INPUTS[build]()[:1]):
        with torch.inference_mode():
            wanted = network(*args)
        got = pair.run(call, "a", *args)[0]
        assert deviation(got, wanted) <= 1e-4
    for part, bytes_read in parts:
        assert bytes_read == part.num_bytes < 0.7 * num_bytes


def styles_of_torch():
    from torch.distributed.tensor import Replicate  # takes seconds
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {
        "gate": ColwiseParallel(),  # the same as "column"
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "second.qkv": ColwiseParallel(output_layouts=Replicate()),  # the same as "gather"
        "second.out": RowwiseParallel(input_layouts=Replicate()),  # left to DTensor
    }


def test_a_plan_of_ones_own_may_name_words_or_torchs_styles(pair, tmp_path):
    network, path = whole(networks.Blocks, tmp_path)
    x, mask = networks.INPUTS[networks.Blocks]()
    with torch.inference_mode():
        wanted = network(x, mask)
    parts = pair.run(load, "styles", networks.Blocks, path, styles_of_torch)
    assert deviation(pair.run(call, "styles", x, mask)[0], wanted) <= 1e-4
    assert parts[0][0].num_bytes < sum(p.nbytes for p in network.parameters())
    words = {"first": "attention", "dow*": "gather"}
    parts = pair.run(load, "words", networks.Blocks, path, words)
    assert parts[0][0].text.startswith("1/2 of 5 of 9 matrices")
    assert deviation(pair.run(call, "words", x, mask)[0], wanted) <= 1e-4


def test_an_input_that_makes_all_ranks_fail_alike_fails_alone(pair, tmp_path):
    network, path = whole(networks.Encoder, tmp_path)
    pair.run(load, "encoder", networks.Encoder, path)
    good, bad = torch.tensor([[1, 2]]), torch.tensor([[1, 2000]])
    lead, follower = pair.run(call_wrongly, "encoder", bad)
    assert lead == "IndexError"
    assert follower > 0
    with torch.inference_mode():
        assert deviation(pair.run(call, "encoder", good)[0], network(good)) <= 1e-4


def test_a_network_of_convolutions_is_refused(pair):
    told = pair.run(refused, networks.resnet, None)
    assert all("4% can be split" in text and '"pipeline"' in text for text in told)


def refused(ranks, build, path):
    with pytest.raises(ModelError) as info:
        load_tensor_parallel(ranks, build, path)
    return str(info.value)


def test_a_plan_that_computes_something_else_is_refused(pair):
    lead, _ = pair.run(load_with_a_wrong_plan)
    assert "split, Blocks answers a batch of 1 otherwise than whole: off by" in lead
    assert "tensor_plan" in lead


def load_with_a_wrong_plan(ranks):
    x, _ = networks.INPUTS[networks.Blocks]()
    try:
        load_tensor_parallel(ranks, hooked, None, [x], tensor_plan={"down": "gather"})
    except ModelError as error:
        return str(error)


def hooked():
    network = networks.Blocks()
    network.down.register_forward_hook(lambda module, args, output: output * 2)
    return network


def test_weights_that_a_network_is_built_with_are_kept_a_part_at_a_time(pair):
    torch.manual_seed(5)
    ids = torch.randint(100, (2, 7))
    mask = torch.ones_like(ids, dtype=torch.bool)
    results = pair.run(built_and_called, ids, mask)
    with torch.inference_mode():
        assert deviation(results[0], built_bert()(ids, mask)) <= 1e-4


def built_bert():
    torch.manual_seed(11)
    return networks.bert().eval()


def built_and_called(ranks, ids, mask):
    load(ranks, "built", built_bert, None, example=(ids, mask))
    return call(ranks, "built", ids, mask)


def fail_alone(ranks, rank):
    """After the last collective, so that nobody is left waiting in one."""
    part = _loaded["alone"]
    hook = None
    if ranks.rank == rank:
        hook = part._network.register_forward_hook(lambda *_: 1 / 0)
    try:
        return call(ranks, "alone", torch.ones(1, 32), error=OutOfStepError)
    finally:
        if hook is not None:
            hook.remove()


def test_a_rank_that_fails_alone_says_that_the_group_must_end(pair, tmp_path):
    _, path = whole(networks.mlp, tmp_path)
    pair.run(load, "alone", networks.mlp, path)
    assert pair.run(fail_alone, 0)[0] == "OutOfStepError"
    assert pair.run(fail_alone, 1)[1] == "OutOfStepError"
