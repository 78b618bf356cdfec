import numpy as np
import pytest
import torch

from inferpool.models.errors import InputError, ModelError
from inferpool.models.vision.classifier import imagenet_labels, stacked
from inferpool.models.vision.images import decode_image
from tests.fuzz import bombs
from tests.models.items import (
    CPU,
    answers,
    bytes_item,
    encoded,
    image_item,
    json_item,
    loaded,
    photo,
    run,
    tensor_item,
)
from tests.models.reference import IMAGENET_CATEGORIES, ImageClassification
from tests.small_classifier import SmallClassifier


@pytest.fixture(scope="module")
def model():
    return loaded(SmallClassifier())


def reference_scores(model, image):
    preset = ImageClassification(crop_size=32, resize_size=36)
    with torch.inference_mode():
        return model.network(preset(image)[None]).softmax(-1)[0]


# What goes in


def test_an_image_scores_as_the_reference_does(model):
    images = [photo(name) for name in ("chelsea", "coffee", "astronaut")]
    outputs = run(model, [image_item(encoded(image, "PNG")) for image in images])
    for image, scores in zip(images, outputs["probabilities"], strict=True):
        assert torch.allclose(scores, reference_scores(model, image), atol=1e-6)
    assert model.outputs[0].shape == (-1, 10)


@pytest.mark.parametrize("decode", ["exact", "fast"])
def test_an_elongated_image_is_refused_before_it_is_decoded(decode):
    model = loaded(SmallClassifier())
    model.decode = decode
    head = bombs.png_of(bombs.png_head(1, 60_000), b"IDAT")  # which has no pixels to be decoded
    with pytest.raises(InputError, match=r"36 x 2160000 = 77,760,000 pixels; at most 50,000,000"):
        model.preprocess(image_item(head))
    with pytest.raises(InputError, match="cannot be decoded"):
        model.preprocess(image_item(bombs.png_of(bombs.png_head(30_000, 1_600), b"IDAT")))


def test_pixels_and_opaque_bytes_score_exactly_as_their_image(model):
    data = encoded(photo("coffee").resize((60, 40)))
    pixels = torch.from_numpy(np.array(decode_image(data)))
    scores = run(
        model,
        [
            image_item(data),
            bytes_item(data),
            tensor_item({"image": pixels}),
            tensor_item({"": pixels.permute(2, 0, 1)}),
            json_item(pixels.tolist()),
            json_item({"image": pixels.float().tolist()}),
        ],
    )["probabilities"]
    assert (scores == scores[0]).all()


def test_gray_pixels_are_taken_as_three_equal_colours(model):
    gray = torch.randint(0, 256, (50, 40), dtype=torch.uint8)
    items = [tensor_item({"": gray}), tensor_item({"": gray[:, :, None].expand(-1, -1, 3)})]
    one, three = run(model, items)["probabilities"]
    assert torch.equal(one, three)


def test_normalised_inputs_go_with_images_in_one_batch(model):
    image = photo("chelsea")
    normalized = ImageClassification(crop_size=32, resize_size=36)(image)
    items = [
        image_item(encoded(image, "PNG")),
        tensor_item({"image": normalized}),
        json_item(normalized.tolist()),
    ]
    scores = run(model, items)["probabilities"]
    assert torch.equal(scores[0], scores[1])
    assert torch.equal(scores[1], scores[2])
    alone = run(model, items[1:2])["probabilities"][0]
    assert torch.allclose(alone, scores[1], atol=1e-6)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (image_item(b"no"), "no image"),
        (tensor_item({"x": torch.zeros(3)}), "one tensor, 'image', not 'x'"),
        (tensor_item({}), "not none"),
        (tensor_item({"": torch.zeros(3), "image": torch.zeros(3)}), "not '', 'image'"),
        (tensor_item({"": torch.zeros(3, 16, 16)}), r"not float32 \[3, 16, 16\]"),
        (tensor_item({"": torch.zeros(4, 4, 4, dtype=torch.uint8)}), r"not uint8 \[4, 4, 4\]"),
        (tensor_item({"": torch.zeros(4, 4, 3, dtype=torch.int64)}), r"not int64 \[4, 4, 3\]"),
        (tensor_item({"": torch.zeros(0, 4, 3, dtype=torch.uint8)}), "no pixels: it is 4 x 0"),
        (tensor_item({"": torch.full((3, 32, 32), torch.nan)}), r"'image': nan at \[0, 0, 0\]"),
        (json_item([[[1, 2, 3]], [[1, 2]]]), r"instance\[1\]\[0\]: expected 3 numbers, found 2"),
        (json_item([[[1, 2, 300]]]), r"instance\[0\]\[0\]\[2\]: 300 is out of range for uint8"),
        (json_item([[[1, 2, 0.5]]]), r"\[2\]: expected a whole number, found the number 0.5"),
        (json_item([1, 2, 3]), r"not numbers of shape \[3\]"),
        (json_item("text"), r"takes an encoded image.*, not a text"),
        (json_item({"image": "text"}), r"instance\.image: this model takes.*, not a text"),
        (json_item({"picture": 1}), "'picture' is unknown: expected 'image'"),
    ],
)
def test_anything_but_a_picture_is_refused(model, item, message):
    with pytest.raises(InputError, match=message):
        model.preprocess(item)


# What comes out


def test_the_best_labels_come_first_as_many_as_asked_for(model):
    data = encoded(photo("coffee"))
    items = [image_item(data), image_item(data, top_k=2), image_item(data, top_k=10)]
    scores = run(model, items)["probabilities"][0]
    five, two, ten = answers(model, items)
    assert [len(five), len(two), len(ten)] == [5, 2, 10]
    assert ten[:5] == five
    assert five[:2] == two
    assert five[0] == {
        "label": f"label {scores.argmax()}",
        "index": int(scores.argmax()),
        "score": float(scores.max()),
    }
    assert [each["score"] for each in ten] == sorted(scores.tolist(), reverse=True)
    assert model.render({"probabilities": scores}, {"top_k": 2}) == two


@pytest.mark.parametrize("top_k", [0, 11, 2.0, True, "3", None])
def test_a_wrong_parameter_is_refused_before_the_image_is_decoded(model, top_k):
    with pytest.raises(InputError, match="'top_k' must be a whole number from 1 to 10, not"):
        model.preprocess(image_item(b"not decoded", top_k=top_k))
    with pytest.raises(InputError, match="'topk' is unknown: this model knows 'top_k'"):
        model.preprocess(image_item(b"not decoded", topk=3))


def test_a_parameter_that_is_wrong_fails_its_own_instance_alone(model):
    outputs = {"probabilities": torch.eye(10)[:3]}
    first, second, third = model.render_batch(outputs, [{"top_k": 1}, {"top_k": 99}, {}])
    assert first == [{"label": "label 0", "index": 0, "score": 1.0}]
    assert isinstance(second, InputError)
    assert len(third) == 5


# Loading


def test_labels_that_are_not_as_many_as_the_classes_are_refused():
    model = SmallClassifier()
    model.labels = ["one"]
    with pytest.raises(ModelError, match=r"yields \[1, 10\], but there are 1 labels"):
        model.load(CPU)


def test_the_warmup_is_an_image_that_the_model_takes(model):
    (answer,) = answers(model, model.warmup())
    assert len(answer) == 5


def test_the_labels_of_imagenet_are_those_that_torchvision_publishes():
    assert list(imagenet_labels()) == IMAGENET_CATEGORIES


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
