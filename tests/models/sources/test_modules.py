from collections import namedtuple

import pytest
import torch
from torch import nn

from inferpool.models.errors import ModelError
from inferpool.models.sources.modules import ModuleModel, SizedModel, named_outputs
from inferpool.models.spec import TensorSpec
from tests.models.items import answers, json_item, loaded, run, tensor_item

FOUR = [TensorSpec(name="x", dtype="float32", shape=(-1, 4))]


def load(build, **options):
    return loaded(ModuleModel(build, **options))


def test_a_network_of_one_tensor_needs_no_declaration():
    model = load(lambda: nn.Flatten())
    assert answers(model, [json_item([[1], [2]])]) == [[1.0, 2.0]]
    assert answers(model, [tensor_item({"": torch.ones(2, 2)})]) == [[1.0] * 4]


def test_outputs_are_found_by_a_trial_where_the_inputs_are_known():
    model = load(lambda: nn.Linear(4, 3), inputs=FOUR)
    assert model.outputs == [TensorSpec(name="output", dtype="float32", shape=(-1, 3))]
    assert run(model, model.warmup())["output"].shape == (2, 3)


def test_a_network_without_weights_is_the_same_in_each_process():
    """Workers are seeded anew, and yet all replicas have to answer alike."""
    weights = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.default_generator.get_state()
        weights.append(load(lambda: nn.Linear(2, 3)).network.weight)
        assert torch.equal(torch.default_generator.get_state(), before)
    assert torch.equal(*weights)


def test_networks_infer_and_do_not_train():
    model = load(lambda: nn.Dropout(0.9))
    assert answers(model, [json_item([1] * 50)]) == [[1.0] * 50]


def test_outputs_take_the_names_that_are_declared():
    class Split(nn.Module):
        def forward(self, x):
            return x[:, :1], x[:, 1:]

    outputs = [
        TensorSpec(name="low", dtype="float32", shape=(-1, 1)),
        TensorSpec(name="high", dtype="float32", shape=(-1, 3)),
    ]
    model = load(Split, inputs=FOUR, outputs=outputs)
    assert answers(model, [json_item([1, 2, 3, 4])]) == [{"low": [1.0], "high": [2.0, 3.0, 4.0]}]
    with pytest.raises(ModelError, match="has 2 outputs, but 1 are declared"):
        load(Split, inputs=FOUR, outputs=outputs[:1])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x.sum(), r"'output' has shape \[\]: its first dimension must be the batch"),
        (lambda x: x.sum(0), r"'output' has shape \[4\]"),
        (lambda x: x @ torch.ones(5), "fails on zeros of its declared inputs: RuntimeError"),
        (lambda x: "text", "returns a str"),
        (lambda x: {"y": 3}, "'y' is a int, not a tensor"),
        (lambda x: {"y": [x[0]]}, "'y' is a list of 1: it must have one tensor for each instance"),
        (lambda x: x.to(torch.complex64), "complex64 cannot be served"),
    ],
)
def test_a_network_that_does_not_serve_batches_is_refused_as_it_loads(function, message):
    class Wrapped(nn.Module):
        forward = staticmethod(function)

    with pytest.raises(ModelError, match=message):
        load(Wrapped, inputs=FOUR)


def test_outputs_are_named_by_what_holds_them():
    tensor = torch.zeros(1)
    Point = namedtuple("Point", "x y")
    assert list(named_outputs(tensor)) == ["output"]
    assert list(named_outputs([tensor, tensor])) == ["output_0", "output_1"]
    assert list(named_outputs({"a": tensor})) == ["a"]
    assert list(named_outputs(Point(tensor, tensor))) == ["x", "y"]


class Detecting(nn.Module):
    """Returns a dict for each row, with as many scores as its first number says."""

    def forward(self, x):
        return [{"scores": row[:1].repeat(int(row[0]))} for row in x]


def test_a_network_may_return_a_dict_of_tensors_for_each_instance():
    model = load(Detecting, inputs=FOUR)
    assert model.outputs == [TensorSpec(name="scores", dtype="float32", shape=(-1, -1))]
    found = run(model, [json_item([2, 0, 0, 0]), json_item([0, 0, 0, 0])])["scores"]
    assert [each.tolist() for each in found] == [[2.0, 2.0], []]
    assert list(named_outputs({"boxes": [torch.zeros(1), torch.zeros(2)]})) == ["boxes"]


def test_finite_outputs_are_promised_unless_the_options_say_otherwise():
    assert ModuleModel(nn.Identity).finite_outputs
    assert not ModuleModel(nn.Identity, finite_outputs=False).finite_outputs


class Summed(SizedModel):
    """A network of a batch of four, whose output is no batch."""

    smallest = largest = 4

    def build_network(self, placement):
        return lambda x: x.sum(0)


def test_an_output_without_a_batch_is_refused_where_batches_are_filled_up():
    with pytest.raises(ModelError, match=r"batch of 4 .* has shape \[3\]: its first dimension"):
        loaded(Summed(inputs=[TensorSpec(name="x", dtype="float32", shape=(-1, 3))]))
