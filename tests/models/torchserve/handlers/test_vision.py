"""Our handlers give the answers of TorchServe's own, and refuse what those refuse."""

import importlib
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torchvision import transforms  # type: ignore[import-untyped]  # it ships no annotations

from inferpool.models.errors import InputError
from inferpool.models.torchserve.handlers import HANDLERS
from inferpool.models.torchserve.handlers.vision import (
    ImageClassifier,
    ImageSegmenter,
    ObjectDetector,
    VisionHandler,
)
from tests.models.torchserve.handlers.archives import (
    CLASSIFIER,
    StillContext,
    answers_of,
    photos,
    picture_of,
    write_archive,
)

REAL = json.loads(Path(__file__).with_name("answers.json").read_bytes())


def handler_named(name: str) -> type[Any]:
    module, _, called = HANDLERS[name].partition(":")
    found: type[Any] = getattr(importlib.import_module(module), called)
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return answers_of(handler_named, tmp_path_factory.mktemp("archives"))


def places_and_values(answer: Any, place: str = "") -> dict[str, Any]:
    """Return the leaves of an answer, by places that keep the order of names."""
    if isinstance(answer, list):
        parts = [(str(at), each) for at, each in enumerate(answer)]
    elif isinstance(answer, dict):
        parts = [(f"{at} {name}", each) for at, (name, each) in enumerate(answer.items())]
    else:
        return {place: answer}
    found: dict[str, Any] = {}
    for name, each in parts:
        found |= places_and_values(each, f"{place}/{name}")
    return found


@pytest.mark.parametrize("case", REAL)
def test_answers_are_those_of_torchserve(case: str, answers: dict[str, Any]):
    ours, real = places_and_values(answers[case]), places_and_values(REAL[case])
    assert [*ours] == [*real]
    numbers = {name: each for name, each in real.items() if not isinstance(each, str)}
    assert {name: ours[name] for name in numbers} == pytest.approx(numbers, abs=1e-4)
    assert [ours[name] for name in real.keys() - numbers] == [
        real[name] for name in real.keys() - numbers
    ]


def png_of(size: tuple[int, int]) -> bytearray:
    file = BytesIO()
    Image.new("RGB", size).save(file, "PNG")
    return bytearray(file.getvalue())


def classifier_at(folder: Path, max_image_pixels: int) -> ImageClassifier:
    archive = write_archive(folder / f"of_{max_image_pixels}", "image_classifier", CLASSIFIER)
    context = StillContext(archive)
    context.system_properties["max_image_pixels"] = max_image_pixels
    handler = ImageClassifier()
    handler.initialize(context)
    return handler


def test_a_picture_of_too_many_pixels_is_refused_before_it_is_decoded(tmp_path: Path):
    handler = classifier_at(tmp_path, 300 * 300)
    assert handler.preprocess([{"data": png_of((300, 300))}]).shape == (1, 3, 224, 224)
    with pytest.raises(InputError, match="301 x 300 = 90,300 pixels"):
        handler.preprocess([{"data": png_of((301, 300))}])


def test_a_picture_that_resizing_makes_too_large_is_refused(tmp_path: Path):
    handler = classifier_at(tmp_path, 300 * 300)
    with pytest.raises(InputError, match="the image has 256 x 2560"):
        handler.preprocess([{"data": png_of((1, 10))}])


def test_a_file_that_no_picture_of_ours_is_runs_no_other_decoder(tmp_path: Path):
    handler = classifier_at(tmp_path, 300 * 300)
    with pytest.raises(InputError, match="are no image: JPEG, PNG"):
        handler.preprocess(
            [{"data": bytearray(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")}]
        )


@pytest.mark.parametrize("body", ["a", {"a": 1}, None, [[1, 2], [3]], picture_of("L"), [1e400, ""]])
def test_an_input_that_is_no_picture_is_the_clients_fault(body: object):
    with pytest.raises(InputError, match="picture"):
        ImageClassifier().preprocess([{"body": body}])


def test_a_picture_lies_as_it_is_stored():
    """TorchServe ignores the orientation of EXIF."""
    turned = Image.new("RGB", (6, 4), "red")
    exif = turned.getexif()
    exif[274] = 6
    file = BytesIO()
    turned.save(file, "JPEG", exif=exif)
    assert ObjectDetector().preprocess([{"body": file.getvalue()}]).shape == (1, 3, 4, 6)


def test_pictures_of_other_sizes_are_no_batch():
    rows = [{"body": png_of((6, 4))}, {"body": png_of((4, 6))}]
    with pytest.raises(RuntimeError, match="equal size"):
        ObjectDetector().preprocess(rows)
    assert ImageSegmenter().preprocess(rows).shape == (2, 3, 224, 224)


def test_a_number_makes_no_tensor_of_that_length():
    """In TorchServe's, `torch.FloatTensor(9)` has nine numbers that lay in memory before."""
    assert VisionHandler().preprocess([{"body": 9}]).tolist() == [9]


class Grays(ImageClassifier):
    """A user's class with steps of its own."""

    topk = 2
    image_processing = transforms.Compose(
        [transforms.Grayscale(3), *ImageClassifier.image_processing.transforms]
    )


def test_a_users_class_changes_steps_and_the_number_of_classes():
    handler = Grays()
    rows = [{"data": photos()[0]}]
    x_BCHW = handler.preprocess(rows)
    first, second = (
        x_BCHW[0, at] * std + mean
        for at, (mean, std) in enumerate([(0.485, 0.229), (0.456, 0.224)])
    )
    assert torch.allclose(first, second, atol=1e-5)
    scores = torch.tensor([[0.0, 2.0, 1.0]])
    assert [[*each] for each in handler.postprocess(scores)] == [["1", "2"]]
    handler.set_max_result_classes(1)
    assert handler.get_max_result_classes() == len(handler.postprocess(scores)[0]) == 1


def test_a_class_without_a_name_is_an_error():
    handler = ImageClassifier()
    handler.mapping = {"0": "cat"}
    handler.topk = 2
    with pytest.raises(KeyError, match="1"):
        handler.postprocess(torch.tensor([[0.0, 1.0]]))
