"""Masks as runs and as PNGs, beside plain loops and torchvision's own functions."""

from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from inferpool.models.vision.masks import labels_at, palette_png, runs_by_label, runs_in_box


def decoded(runs) -> np.ndarray:
    """Return the mask of COCO's uncompressed runs."""
    height, width = runs["size"]
    values = np.arange(len(runs["counts"])) % 2 == 1
    return np.repeat(values, runs["counts"]).reshape(width, height).T


def test_runs_go_down_the_columns_and_begin_outside():
    labels = np.array([[1, 0, 0], [1, 1, 2]], np.uint8)
    assert runs_by_label(labels) == {
        0: {"size": [2, 3], "counts": [2, 1, 1, 1, 1]},
        1: {"size": [2, 3], "counts": [0, 2, 1, 1, 2]},
        2: {"size": [2, 3], "counts": [5, 1]},
    }


@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (1, 9), (40, 30)])
def test_runs_of_all_labels_give_back_the_picture(shape):
    labels = np.random.default_rng(0).integers(0, 3, shape).astype(np.uint8)
    found = runs_by_label(labels)
    assert found.keys() == set(np.unique(labels).tolist())
    for label, runs in found.items():
        assert np.array_equal(decoded(runs), labels == label)


@pytest.mark.parametrize(
    "box",
    [
        (3.2, 4.7, 20.1, 17.9),
        (-5.0, -3.0, 9.0, 30.0),
        (10.0, 0.0, 24.0, 20.0),
        (0.0, 0.0, 25.0, 20.0),
        (-40.0, -40.0, 90.0, 70.0),
        (6.0, 6.0, 6.0, 6.0),
    ],
)
def test_the_mask_of_an_instance_is_the_one_that_torchvision_pastes(box):
    from torchvision.models.detection.roi_heads import paste_masks_in_image

    generator = torch.Generator().manual_seed(1)
    for mask in (torch.rand(28, 28, generator=generator), torch.ones(28, 28), torch.zeros(28, 28)):
        pasted = paste_masks_in_image(mask[None, None], torch.tensor([box]), (20, 25))[0, 0] > 0.5
        runs = runs_in_box(mask, box, (20, 25))
        assert np.array_equal(decoded(runs), pasted.numpy())
        assert all(runs["counts"][1:])
        assert sum(runs["counts"]) == 500


def test_an_instance_outside_the_picture_has_no_pixels():
    runs = runs_in_box(torch.ones(28, 28), (40.0, 40.0, 60.0, 60.0), (20, 25))
    assert runs == {"size": [20, 25], "counts": [500]}


@pytest.mark.parametrize("size", [(33, 47), (8, 10), (3, 4), (1, 1)])
def test_labels_are_those_of_scores_enlarged_some_rows_at_a_time(size):
    scores = torch.randn(5, 8, 10, generator=torch.Generator().manual_seed(0))
    whole = functional.interpolate(scores[None], size, mode="bilinear")[0].argmax(0)
    assert torch.equal(labels_at(scores, size, most_numbers=5 * 47 * 3).long(), whole)


def test_a_png_has_the_labels_as_its_pixels_and_the_colours_of_voc():
    labels = np.array([[0, 1, 15], [2, 20, 255]], np.uint8)
    image = Image.open(BytesIO(palette_png(labels)))
    assert (image.format, image.mode) == ("PNG", "P")
    assert np.array_equal(np.asarray(image), labels)
    colors = np.asarray(image.convert("RGB"))
    assert colors[0].tolist() == [[0, 0, 0], [128, 0, 0], [192, 128, 128]]
    assert colors[1].tolist() == [[0, 128, 0], [0, 64, 128], [224, 224, 192]]
