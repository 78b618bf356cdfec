import torch

from inferpool.models.border import checked
from inferpool.models.ragged import RaggedOutput, joined, outputs_of, row_of
from inferpool.models.spec import TensorSpec
from inferpool.models.tolerance import ValueTolerance
from tests.ragged_model import RaggedBoxes

ONE, TWO = torch.ones(1, 4), torch.ones(2, 4)
DECLARED = [TensorSpec(name="boxes", dtype="float32", shape=(-1, -1, 4))]


def test_all_forms_of_lists_are_one_form_for_workers():
    forms = ({"boxes": [ONE, TWO]}, {"boxes": (ONE, TWO)}, [{"boxes": ONE}, {"boxes": TWO}])
    for returned in (*forms, [ONE, TWO]):
        (name, found), *rest = outputs_of(returned, DECLARED).items()
        assert (name, rest, type(found)) == ("boxes", [], RaggedOutput)
        assert [each.shape for each in found] == [ONE.shape, TWO.shape]


def test_output_that_stands_alone_is_named():
    assert outputs_of(TWO, DECLARED) == {"boxes": TWO}
    assert outputs_of(TWO) == {"output": TWO}
    assert list(outputs_of([ONE, TWO])) == ["output"]


def test_dict_of_tensors_of_a_checked_model_stays_the_same_object():
    outputs = {"boxes": TWO}

    class Plain(RaggedBoxes):
        def forward(self, batch):
            return outputs

    assert checked(Plain()).forward({}) is outputs


def test_rows_of_a_list_are_chosen_and_copied():
    output = RaggedOutput([ONE, TWO, ONE])
    assert output[1] is TWO
    assert type(output[:1]) is type(output[[0, 1]]) is RaggedOutput
    assert output[[1, 0]][0] is TWO
    assert output.clone()[1] is not TWO
    assert row_of({"boxes": output, "num": torch.tensor([1, 2, 1])}, 1)["num"] == 2


def test_batches_with_and_without_lists_are_joined():
    found = joined([{"boxes": RaggedOutput([ONE, TWO])}, {"boxes": TWO[None]}])
    assert [each.shape for each in found["boxes"]] == [ONE.shape, TWO.shape, TWO.shape]
    assert joined([{"y": TWO}, {"y": ONE}])["y"].shape == (3, 4)


def test_difference_in_number_is_a_difference():
    judge = ValueTolerance().judge
    near = RaggedOutput([ONE, TWO + 1e-4])
    assert judge({"boxes": RaggedOutput([ONE, TWO])}, {"boxes": near}).is_within
    assert judge({"boxes": TWO[:, None]}, {"boxes": RaggedOutput([ONE, ONE])}).is_within
    others = (RaggedOutput([ONE, ONE]), RaggedOutput([ONE]), RaggedOutput([ONE, TWO.double()]))
    for other in others:
        assert not judge({"boxes": RaggedOutput([ONE, TWO])}, {"boxes": other}).is_within
    assert not judge({"boxes": RaggedOutput([ONE, TWO])}, {}).is_within
