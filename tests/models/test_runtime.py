import torch

from inferpool.models.base import Model
from inferpool.models.spec import MAX_IMAGE_PIXELS


class WithoutSuper(Model):
    def __init__(self) -> None:
        self.runtime = "the name is the user's own"


def test_what_one_model_is_given_is_not_anothers():
    first, second = WithoutSuper(), WithoutSuper()
    first.decode = "fast"
    first.max_image_pixels = 5
    assert (first.decode, first.max_image_pixels) == ("fast", 5)
    assert (second.decode, second.max_image_pixels) == ("exact", MAX_IMAGE_PIXELS)
    assert (Model.decode, Model.max_image_pixels) == ("exact", MAX_IMAGE_PIXELS)
    assert (first.runtime, first.ranks, first.stack_instances) == (
        "the name is the user's own",
        None,
        torch.stack,
    )


def test_a_class_may_have_a_value_of_its_own():
    class Careful(Model):
        max_image_pixels = 5

    model = Careful()
    assert model.max_image_pixels == 5
    model.max_image_pixels = 6
    assert model.max_image_pixels == 6
