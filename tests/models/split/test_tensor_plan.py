import pytest
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.nn import functional
from torch.nn.utils import prune

from inferpool.models.errors import ModelError
from inferpool.models.split.tensor import choose_plan
from inferpool.models.split.tensor_plan import find_plan, own_plan
from tests.models.split import networks

STYLE = RowwiseParallel(input_layouts=Replicate())


class ReadsWeight(nn.Module):
    """Uses a Linear's matrix past its forward; may be traced, or may not."""

    def __init__(self, is_traced):
        super().__init__()
        self.is_traced = is_traced
        self.first, self.read = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        if not self.is_traced and x.sum() > 0:
            x = -x
        return functional.linear(self.first(x).softmax(-1), self.read.weight)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding(x))


def cut(network, size=2):
    return {each.name: each.how for each in find_plan(network.eval(), size).cuts}


@pytest.mark.parametrize("is_traced", [True, False])
def test_a_layer_whose_matrix_is_read_by_other_code_stays_whole(is_traced):
    assert "read" not in cut(ReadsWeight(is_traced))


def test_a_matrix_that_two_layers_share_stays_whole():
    assert cut(Shared()) == {}


def test_outputs_that_other_code_reads_too_are_gathered():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

        def forward(self, x):
            hidden = self.up(x).relu()
            return self.down(hidden), hidden

    assert cut(Branching()) == {"up": "gather", "down": "gather"}


@pytest.mark.parametrize(
    ("wishes", "can_verify", "message"),
    [
        (None, False, "give `load_network` an `example`"),
        ({"first": "attention"}, False, "give `load_network` an `example`"),
        (
            {"first": "attention", "up": RowwiseParallel(input_layouts=Replicate())},
            True,
            "torch's styles",
        ),
    ],
)
def test_a_plan_that_may_be_wrong_is_refused_if_it_cannot_be_verified(wishes, can_verify, message):
    with pytest.raises(ModelError, match=message):
        choose_plan(networks.Blocks().eval(), 2, wishes, can_verify=can_verify)
    choose_plan(networks.Blocks().eval(), 2, {"up": "gather"}, can_verify=False)


def test_numbers_that_are_no_widths_and_the_order_of_layers_do_not_matter():
    class OutFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.o = nn.Linear(16, 16)
            self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
            self.num_heads, self.dim, self.max_tokens = 4, 16, 16

    plan = own_plan(nn.ModuleDict({"a": OutFirst()}), {"a": "attention"}, 2)
    assert [each.name for each in plan.cuts if each.how == "row"] == ["a.o"]
    assert {each.attribute for each in plan.counts} == {"num_heads", "dim"}


def test_a_layer_with_fewer_features_than_ranks_stays_whole():
    network = nn.Sequential(nn.Linear(64, 3), nn.ReLU(), nn.Linear(3, 64))
    assert cut(network, size=4) == {"2": "gather"}


def test_layers_that_do_more_than_torchs_own_stay_whole():
    class Inherited(nn.MultiheadAttention):
        """It might compute anything."""

    hooked = nn.Linear(64, 64)
    hooked.register_forward_hook(lambda module, args, output: output - output.mean(-1, True))
    pruned = prune.identity(nn.Linear(64, 64), "weight")
    network = nn.Sequential(hooked, nn.ReLU(), nn.Linear(64, 64), pruned, Inherited(64, 2))
    assert set(cut(network)) == {"2"}


def test_a_layer_before_an_activation_that_is_not_elementwise_is_gathered():
    def found(activation):
        return cut(nn.TransformerEncoderLayer(32, 2, 64, activation=activation))

    assert found(functional.gelu)["linear1"] == "column"
    assert found(lambda x: x.softmax(-1))["linear1"] == "gather"


def test_an_attention_is_cut_by_the_heads_that_its_attributes_count():
    plan = own_plan(networks.Blocks(), {"first": "attention"}, 4)
    assert {each.name: (each.how, each.units) for each in plan.cuts} == {
        "first.q": ("column", 4),
        "first.k": ("column", 4),
        "first.v": ("column", 4),
        "first.out": ("row", 4),
    }
    shares = {(each.attribute, each.units * each.per_unit) for each in plan.counts}
    assert shares == {("num_heads", 4), ("width", 32)}


def test_an_attention_of_fewer_heads_than_ranks_is_gathered():
    plan = own_plan(networks.Blocks(), {"first": "attention"}, 8)
    assert [each.how for each in plan.cuts] == ["gather"] * 4
    assert not plan.counts


def test_an_attention_that_does_not_show_its_heads_is_refused():
    with pytest.raises(ModelError, match="the heads of second are not to be told"):
        own_plan(networks.Blocks(), {"second": "attention"}, 2)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"fist": "column"}, "the network has no submodule 'fist'"),
        ({"gate": "columns"}, "'columns' is none of column, row"),
        ({"first": "row"}, '"row" is for Linear, and first is a Attention'),
        ({"gate": "gather"}, "gate has 64 parts for 65 ranks"),
    ],
)
def test_a_plan_that_does_not_fit_the_network_is_refused(plan, message):
    with pytest.raises(ModelError, match=message):
        own_plan(networks.Blocks(), plan, 65)
