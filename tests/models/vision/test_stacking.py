import pytest
import torch

from inferpool.models.vision.stacking import stacked


def test_pictures_side_by_side_are_not_copied():
    ring = torch.arange(5 * 2 * 4 * 3, dtype=torch.uint8).view(5, 24)
    images = [ring[row].view(2, 4, 3) for row in (1, 2, 3)]
    batch = stacked(images, torch.stack)
    assert batch.data_ptr() == ring[1].data_ptr()
    assert batch.is_contiguous()
    assert torch.equal(batch, torch.stack(images))


@pytest.mark.parametrize("rows", [(1, 3), (2, 1), (1, 1), (0,), (3, 4, 0)])
def test_other_pictures_are_copied(rows: tuple[int, ...]):
    ring = torch.arange(5 * 24, dtype=torch.uint8).view(5, 24)
    images = [ring[row].view(2, 4, 3) for row in rows]
    batch = stacked(images, torch.stack)
    assert batch.data_ptr() not in [image.data_ptr() for image in images]
    assert torch.equal(batch, torch.stack(images))


def test_pictures_of_their_own_and_other_shapes_are_told_apart():
    ring = torch.zeros(4, 24, dtype=torch.uint8)
    with pytest.raises(RuntimeError):
        stacked([ring[0].view(2, 4, 3), ring[1].view(4, 2, 3)], torch.stack)
    images = [torch.full((2, 4, 3), each, dtype=torch.uint8) for each in (1, 2)]
    assert torch.equal(stacked(images, torch.stack), torch.stack(images))
