import pytest
import torch

from inferpool.models.split.packing import have_different_rows, pack

CPU = torch.device("cpu")


def test_conjugates_and_negatives_are_resolved_before_they_are_sent():
    x = torch.tensor([1 + 2j, 3 - 4j])
    _, (conjugate, negative) = pack([x.conj(), x.conj().imag], CPU)
    assert torch.view_as_real(conjugate).tolist() == [[1, -2], [3, 4]]
    assert negative.numpy().tolist() == [-2, 4]  # which numpy does not take with the sign beside it


def test_tensors_that_are_not_dense_are_refused_before_they_are_sent():
    with pytest.raises(TypeError, match="only dense tensors"):
        pack({"x": torch.eye(2).to_sparse()}, CPU)


def test_a_row_in_the_middle_that_differs_is_found():
    assert have_different_rows([torch.tensor([[1.0], [2.0], [1.0]])])
    assert not have_different_rows([torch.ones(3, 2)])
