"""Detectors of torchvision with random weights, beside torchvision's own forward pass."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from inferpool.models.errors import InputError, SourceError
from inferpool.models.sources.registry import build
from inferpool.models.vision.images import decode_image
from tests.models.items import (
    CPU,
    answers,
    encoded,
    image_item,
    json_item,
    loaded,
    orientation_exif,
    photo,
    run,
    tensor_item,
)
from tests.models.reference import torchvision
from tests.models.vision.test_masks import decoded

SSD = "ssdlite320_mobilenet_v3_large"
SMALL: dict[str, object] = {
    "min_size": 64,
    "max_size": 96,
    "box_score_thresh": 0.0,
    "box_detections_per_img": 5,
}
WIDE = encoded(photo("coffee").resize((150, 90)))
HIGH = encoded(photo("chelsea").resize((60, 80)))


@pytest.fixture(scope="module")
def ssd():
    model = loaded(build(f"torchvision:{SSD}", None, {"score_thresh": 0.0, "min_score": 0}))
    generator = torch.Generator().manual_seed(0)
    for each in model.network.head.parameters():  # else all scores are nearly the same
        each.normal_(std=0.05, generator=generator)
    return model


def expected(model, name: str, options: dict[str, Any], pictures: list[bytes]):
    """Return what torchvision finds in the pictures, with the model's weights."""
    network = torchvision.models.get_model(name, weights=None, weights_backbone=None, **options)
    network.eval().load_state_dict(model.network.state_dict())
    to_tensor = torchvision.transforms.functional.to_tensor
    with torch.inference_mode():
        return network([to_tensor(decode_image(each)) for each in pictures])


def assert_same(answer, found, labels) -> None:
    assert len(answer["boxes"]) == len(found["boxes"]) > 0
    assert torch.allclose(torch.tensor(answer["boxes"]), found["boxes"], atol=1e-3)
    assert torch.allclose(torch.tensor(answer["scores"]), found["scores"], atol=1e-5)
    assert answer["labels"] == [labels[each] for each in found["labels"].tolist()]


def test_boxes_are_torchvisions_in_the_pixels_of_each_picture_of_a_batch(ssd):
    found = expected(ssd, SSD, {"score_thresh": 0.0}, [WIDE, HIGH])
    categories = torchvision.models.detection.SSDLite320_MobileNet_V3_Large_Weights.DEFAULT.meta[
        "categories"
    ]
    for answer, each in zip(answers(ssd, [image_item(WIDE), image_item(HIGH)]), found, strict=True):
        assert_same(answer, each, categories)
    assert answer.keys() == {"boxes", "labels", "scores"}


@pytest.mark.parametrize("name", ["maskrcnn_resnet50_fpn", "keypointrcnn_resnet50_fpn"])
def test_masks_and_keypoints_are_torchvisions(name):
    model = loaded(build(f"torchvision:{name}", None, {**SMALL, "min_score": 0}))
    (found,) = expected(model, name, SMALL, [WIDE])
    (answer,) = answers(model, [image_item(WIDE)])
    assert_same(answer, found, model.labels)
    if "masks" in found:
        assert answer.keys() == {"boxes", "labels", "scores", "masks"}
        for mask, runs in zip(found["masks"][:, 0] > 0.5, answer["masks"], strict=True):
            assert np.array_equal(decoded(runs), mask.numpy())
    else:
        assert answer.keys() == {"boxes", "labels", "scores", "keypoints"}
        names = list(answer["keypoints"][0])
        assert (len(names), names[0], names[-1]) == (17, "nose", "right_ankle")
        places = torch.tensor([list(each.values()) for each in answer["keypoints"]])
        assert torch.allclose(places[..., :2], found["keypoints"][..., :2], atol=1e-3)
        assert torch.allclose(places[..., 2], found["keypoints_scores"], atol=1e-4)


def test_only_what_is_as_sure_as_asked_for_is_answered(ssd):
    (every,) = answers(ssd, [image_item(WIDE)])
    middle = sorted(every["scores"])[len(every["scores"]) // 2]
    (some,) = answers(ssd, [image_item(WIDE, min_score=middle)])
    assert 0 < len(some["boxes"]) < len(every["boxes"])
    assert all(score >= middle for score in some["scores"])
    assert all(one >= two for one, two in pairwise(some["scores"]))
    by_default = loaded(build(f"torchvision:{SSD}", None, {}))
    (none,) = answers(by_default, [image_item(WIDE)])
    assert none == {"boxes": [], "labels": [], "scores": []}


@pytest.mark.parametrize("value", [-0.1, 1.5, "0.5", True, None, math.nan])
def test_a_score_that_is_none_is_refused(ssd, value):
    with pytest.raises(InputError, match="'min_score' must be a number from 0 to 1"):
        ssd.preprocess(image_item(WIDE, min_score=value))
    with pytest.raises(SourceError, match="'min_score' must be a number from 0 to 1"):
        build(f"torchvision:{SSD}", None, {"min_score": value})


def test_an_unknown_parameter_is_refused(ssd):
    with pytest.raises(InputError, match="'top_k' is unknown: this model knows 'min_score'"):
        ssd.preprocess(image_item(WIDE, top_k=3))


def test_boxes_lie_in_the_picture_as_it_is_seen_upright(ssd):
    turned = encoded(photo("coffee").resize((90, 150)), exif=orientation_exif(6))
    upright = decode_image(turned)
    assert upright.size == (150, 90)
    outputs = run(ssd, [image_item(turned)])
    assert outputs["size"][0].tolist() == [90, 150]
    plain = run(ssd, [tensor_item({"image": torch.from_numpy(np.array(upright))})])
    assert torch.equal(outputs["boxes"][0], plain["boxes"][0])


def test_pixels_are_taken_in_each_form(ssd):
    gray = np.full((8, 9), 7, np.uint8)
    colored = np.stack([gray] * 3, axis=-1)
    forms = [
        tensor_item({"image": torch.from_numpy(colored)}),
        tensor_item({"": torch.from_numpy(colored).permute(2, 0, 1)}),
        tensor_item({"image": torch.from_numpy(gray)}),
        json_item(colored.tolist()),
        json_item({"image": colored.tolist()}),
        image_item(encoded(Image.fromarray(gray), "PNG")),
    ]
    for item in forms:
        assert np.array_equal(ssd.preprocess(item)["image"].numpy(), colored)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (json_item("photo"), "takes an encoded image or its pixels .*, not a text"),
        (json_item([[1, 2]]), r"instance\[0\]\[0\]: expected 3 numbers"),
        (json_item([[[1, 2, 300]]]), "300 is out of range"),
        (tensor_item({"x": torch.zeros(2, 2, dtype=torch.uint8)}), "one tensor, 'image', not 'x'"),
        (tensor_item({"image": torch.zeros(3, 8, 8)}), r"not float32 \[3, 8, 8\]"),
        (tensor_item({"image": torch.zeros(0, 8, 3, dtype=torch.uint8)}), "has no pixels"),
        (image_item(b"no picture"), "these 10 bytes are no image"),
    ],
)
def test_what_is_no_picture_is_refused(ssd, item, message):
    with pytest.raises(InputError, match=message):
        ssd.preprocess(item)


def test_a_picture_with_too_many_pixels_is_refused():
    model = build(f"torchvision:{SSD}", None, {})
    model.max_image_pixels = 100
    for item in (image_item(WIDE), tensor_item({"image": torch.zeros(11, 10).byte()})):
        with pytest.raises(InputError, match="at most 100 are taken"):
            model.preprocess(item)


def test_pictures_of_other_proportions_are_computed_apart_where_they_are_padded(ssd):
    features = [ssd.preprocess(image_item(each)) for each in (WIDE, HIGH)]
    assert {ssd.bucket(each) for each in features} == {None}
    padding = loaded(build("torchvision:fasterrcnn_mobilenet_v3_large_320_fpn", None, SMALL))
    assert len({padding.bucket(each) for each in features}) == 2


def test_a_checkpoint_and_classes_of_ones_own_are_taken(ssd, tmp_path, caplog):
    caplog.set_level("INFO")
    options: dict[str, object] = {"labels": ["cat", "dog"], "score_thresh": 0.0, "min_score": 0}
    first = loaded(build(f"torchvision:{SSD}", None, options))
    torch.save(first.network.state_dict(), tmp_path / "own.pth")
    second = loaded(build(f"torchvision:{SSD}", str(tmp_path / "own.pth"), options))
    (answer,) = answers(second, [image_item(WIDE)])
    assert answer == answers(first, [image_item(WIDE)])[0]
    assert set(answer["labels"]) <= {"cat", "dog"}
    assert caplog.messages[-1] == (
        f"{SSD} is a detector of torchvision, with the weights of {tmp_path}/own.pth, for 2 "
        "classes: cat, dog"
    )
    assert "with random weights" in caplog.messages[0]


def test_published_weights_are_named_before_they_are_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    model = build(f"torchvision:{SSD}", "DEFAULT", {})
    assert model.download.endswith("/ssdlite320_mobilenet_v3_large_coco-a79551df.pth")
    with pytest.raises(SourceError, match="no weights 'V9' for ssdlite320"):
        build(f"torchvision:{SSD}", "V9", {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", torchvision.models.list_models(module=torchvision.models.detection)
)
def test_every_detector_of_torchvision_answers_as_it_does(name):
    own = {"score_thresh": 0.0} if "rcnn" not in name else SMALL
    model = build(f"torchvision:{name}", None, {**own, "min_score": 0})
    model.load(CPU)
    (found,) = expected(model, name, own, [WIDE])
    (answer,) = answers(model, [image_item(WIDE)])
    assert_same(answer, found, model.labels)


def test_a_picture_whose_edge_would_vanish_is_refused():
    options = {**SMALL, "max_size": 96}
    model = loaded(build("torchvision:fasterrcnn_mobilenet_v3_large_fpn", None, options))
    for size in ((300, 3), (2, 192)):
        item = image_item(encoded(Image.new("RGB", size), "PNG"))
        with pytest.raises(InputError, match=rf"{size[0]} x {size[1]} pixels.* less than 96 times"):
            run(model, [item])
    assert answers(model, [image_item(encoded(Image.new("RGB", (190, 2)), "PNG"))])


def test_a_number_of_classes_beside_other_names_is_refused():
    options = {"labels": ["cat", "dog"], "num_classes": 2}
    with pytest.raises(SourceError, match=r"labels has 3 names, but options\.num_classes is 2"):
        build(f"torchvision:{SSD}", None, options)
