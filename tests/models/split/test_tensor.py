import pytest
import torch
from safetensors.torch import save_file

from tests.models.split import networks
from tests.models.split.rank_processes import RaisedError


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


def test_a_bert_is_cut_by_its_own_plan_and_has_the_numbers_that_it_is_built_with(pair):
    network = networks.bert()
    num_bytes = sum(each.nbytes for each in network.parameters())
    mask = torch.arange(9) < torch.tensor([[9], [4], [1]])
    ids = torch.randint(100, mask.shape)
    with (
        pair.loaded("tensor", networks.bert, example=(ids, mask)) as model,
        torch.inference_mode(),
    ):
        assert all(part.num_bytes < 0.6 * num_bytes for part in model.parts)
        assert deviation(model(ids, mask), network(ids, mask)) <= 1e-4


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("build", list(networks.INPUTS))
def test_outputs_equal_the_unsplit_networks(pair, tmp_path, build):
    network, path = whole(build, tmp_path)
    num_bytes = sum(each.nbytes for each in network.parameters())
    example = networks.INPUTS[build]()
    with pair.loaded("tensor", build, path, example) as model, torch.inference_mode():
        for args in (networks.INPUTS[build](), networks.INPUTS[build]()[:1]):
            assert deviation(model(*args), network(*args)) <= 1e-4
    for part, num_bytes_read in zip(model.parts, model.num_bytes_read, strict=True):
        assert num_bytes_read == part.num_bytes < 0.7 * num_bytes


def test_a_network_that_writes_to_its_input_does_so_on_each_rank(pair):
    network, x = networks.Overwriting(), torch.randn(2000, 4)
    with pair.loaded("tensor", networks.Overwriting, example=[x[:2]]) as model:
        assert deviation(model(x), network(x.clone())) <= 1e-4


def test_a_plan_of_ones_own_may_name_words_or_torchs_styles(pair, tmp_path):
    network, path = whole(networks.Blocks, tmp_path)
    x, mask = networks.INPUTS[networks.Blocks]()
    with torch.inference_mode():
        wanted = network(x, mask)
    with pair.loaded("tensor", networks.StyledBlocks, path) as model:
        assert deviation(model(x, mask), wanted) <= 1e-4
    assert model.parts[0].text.startswith("1/2 of 5 of 9 matrices")
    words = {"first": "attention", "dow*": "gather"}
    named = {"tensor_plan": words, "example": [x, mask]}
    with pair.loaded("tensor", networks.Blocks, path, **named) as model:
        assert deviation(model(x, mask), wanted) <= 1e-4
    assert model.parts[0].text.startswith("1/2 of 5 of 9 matrices")


def test_an_input_that_makes_all_ranks_fail_alike_fails_alone(pair, tmp_path):
    network, path = whole(networks.Encoder, tmp_path)
    good, bad = torch.tensor([[1, 2]]), torch.tensor([[1, 2000]])
    with pair.loaded("tensor", networks.Encoder, path, [good]) as model, torch.inference_mode():
        with pytest.raises(RaisedError, match="IndexError"):
            model(bad)
        assert deviation(model(good), network(good)) <= 1e-4


def test_a_network_of_convolutions_is_refused(pair):
    with (
        pytest.raises(RaisedError, match=r'ModelError: .*4% can be split.* "pipeline"'),
        pair.loaded("tensor", networks.resnet),
    ):
        pass


def hooked():
    network = networks.Blocks()
    network.down.register_forward_hook(lambda module, args, output: output * 2)
    return network


def test_a_plan_that_computes_something_else_is_refused(pair):
    x, _ = networks.INPUTS[networks.Blocks]()
    message = "split, Blocks answers a batch of 1 otherwise than whole: off by .* tensor_plan"
    with (
        pytest.raises(RaisedError, match=message),
        pair.loaded("tensor", hooked, example=[x], tensor_plan={"down": "gather"}),
    ):
        pass


def test_a_rank_that_fails_alone_says_that_the_group_must_end(pair):
    example = [torch.ones(1, 32), torch.tensor(2)]
    with pair.loaded("tensor", networks.FailingOnRank, example=example) as model:
        with pytest.raises(RaisedError, match="OutOfStepError: rank 0 failed"):
            model(torch.ones(1, 32), torch.tensor(0))
        model(torch.ones(1, 32), torch.tensor(2))
    with pair.loaded("tensor", networks.FailingOnRank, example=example) as model:
        model(torch.ones(1, 32), torch.tensor(1))
        with pytest.raises(RaisedError, match="OutOfStepError: rank 1 failed alone"):
            model.wait_for(1)
