"""Segmenters of torchvision with random weights, beside torchvision's own forward pass."""

from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from inferpool.models.errors import InputError, SourceError
from inferpool.models.ragged import row_of
from inferpool.models.sources.registry import build
from inferpool.models.vision.images import decode_image
from tests.models.items import CPU, answers, encoded, image_item, loaded, photo, run, tensor_item
from tests.models.reference import torchvision
from tests.models.vision.test_masks import decoded

NAME = "lraspp_mobilenet_v3_large"
WIDE = encoded(photo("coffee").resize((150, 90)))
HIGH = encoded(photo("chelsea").resize((60, 80)))


@pytest.fixture(scope="module")
def model():
    return loaded(build(f"torchvision:{NAME}", None, {"resize": 64}))


def expected(model, name: str, picture: bytes, resize: int) -> np.ndarray:
    """Return the classes that torchvision finds for a picture, in its own size."""
    network = torchvision.models.get_model(name, weights=None, weights_backbone=None).eval()
    network.load_state_dict(model.network.state_dict())
    preset = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    preset.resize_size = [resize]
    image = decode_image(picture)
    with torch.inference_mode():
        scores = network(preset(image)[None])["out"]
        scores = functional.interpolate(scores, image.size[::-1], mode="bilinear")
    return scores[0].argmax(0).numpy()


@pytest.mark.parametrize("name", [NAME, "deeplabv3_mobilenet_v3_large"])
def test_classes_are_torchvisions_in_the_pixels_of_each_picture(name):
    model = loaded(build(f"torchvision:{name}", None, {"resize": 64}))
    for picture in (WIDE, HIGH):
        labels = run(model, [image_item(picture)])["labels"][0].numpy()
        wanted = expected(model, name, picture, 64)
        assert labels.shape == wanted.shape
        assert (labels == wanted).mean() > 0.999  # two classes may be as good as each other
        (answer,) = answers(model, [image_item(picture)])
        assert len(answer) == len(np.unique(labels[labels > 0]))
        for label, runs in answer.items():
            assert np.array_equal(decoded(runs), labels == model.labels.index(label))


def test_pictures_that_the_network_sees_in_one_size_are_computed_together(model):
    same = encoded(photo("astronaut").resize((300, 180)))
    items = [image_item(WIDE), image_item(same)]
    features = [model.preprocess(each) for each in (*items, image_item(HIGH))]
    assert len({model.bucket(each) for each in features}) == 2
    together = run(model, items)["labels"]
    assert [list(each.shape) for each in together] == [[90, 150], [180, 300]]
    alone = [run(model, [item])["labels"][0] for item in items]
    assert all(map(torch.equal, together, alone))


def test_a_picture_may_be_its_pixels(model):
    pixels = torch.from_numpy(np.array(decode_image(WIDE)))
    found = [run(model, [item]) for item in (image_item(WIDE), tensor_item({"image": pixels}))]
    assert torch.equal(found[0]["labels"][0], found[1]["labels"][0])


def test_content_is_a_png_with_the_class_of_each_pixel(model):
    outputs = row_of(run(model, [image_item(WIDE)]), 0)
    content = model.render_content(outputs, {})
    assert content.media_type == model.media_types[0] == "image/png"
    image = Image.open(BytesIO(content.data))
    assert (image.mode, image.size) == ("P", (150, 90))
    assert np.array_equal(np.asarray(image), outputs["labels"].numpy())


def test_parameters_are_refused(model):
    with pytest.raises(InputError, match="'min_score' is unknown: this model knows none"):
        model.preprocess(image_item(WIDE, min_score=0.5))


def test_the_head_that_serves_training_alone_is_left_out(tmp_path, caplog):
    caplog.set_level("INFO")
    name = "deeplabv3_mobilenet_v3_large"
    network = torchvision.models.get_model(
        name, weights=None, weights_backbone=None, aux_loss=True, num_classes=3
    )
    torch.save(network.state_dict(), tmp_path / "own.pth")
    labels = ["nothing", "cat", "dog"]
    options: dict[str, object] = {"labels": labels, "resize": 64}
    model = loaded(build(f"torchvision:{name}", str(tmp_path / "own.pth"), options))
    assert model.network.aux_classifier is None
    (answer,) = answers(model, [image_item(WIDE)])
    assert answer.keys() <= set(labels)
    assert caplog.messages[-1] == (
        f"{name} is a segmenter of torchvision, with the weights of {tmp_path}/own.pth, for 3 "
        "classes: nothing, cat, dog"
    )


def test_more_classes_than_a_palette_has_colours_are_refused():
    with pytest.raises(SourceError, match="257 classes are too many"):
        build(f"torchvision:{NAME}", None, {"num_classes": 257})


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", torchvision.models.list_models(module=torchvision.models.segmentation)
)
def test_every_segmenter_of_torchvision_answers_as_it_does(name):
    model = build(f"torchvision:{name}", None, {"resize": 64})
    model.load(CPU)
    labels = run(model, [image_item(HIGH)])["labels"][0].numpy()
    assert (labels == expected(model, name, HIGH, 64)).mean() > 0.99


def test_a_picture_much_longer_than_wide_is_refused(model):
    for size in ((180, 1), (1, 5000), (161, 10)):
        item = image_item(encoded(Image.new("RGB", size), "PNG"))
        with pytest.raises(InputError, match=rf"{size[0]} x {size[1]} pixels.* at most 16 times"):
            model.preprocess(item)
    assert answers(model, [image_item(encoded(Image.new("RGB", (160, 10)), "PNG"))])
