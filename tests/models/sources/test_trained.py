"""The folder of a training run as a model."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from inferpool.models.errors import ModelError
from inferpool.models.example import own_example, shown_example
from inferpool.models.files.run_folder import RunFolder
from inferpool.models.sources.registry import build
from inferpool.models.sources.trained import TrainedClassifier
from inferpool.models.vision.transforms import ImageTransform
from tests.models.items import CPU, answers, encoded, image_item
from tests.run_folders import (
    COLOURS,
    SMALL,
    TINY,
    colour_weights,
    write_colours,
    write_run,
)


def loaded(source: Path | str, weights: str | None = "DEFAULT") -> TrainedClassifier:
    model = build(str(source), weights, {})
    assert isinstance(model, TrainedClassifier)
    model.load(CPU)
    return model


@pytest.fixture
def colours(tmp_path: Path) -> Path:
    """A run whose network tells colours apart, with held-out images."""
    held_out = write_colours(tmp_path / "images")
    return write_run(tmp_path / "run", model=TINY, weights=colour_weights(), validation=held_out)


def label_of(model: TrainedClassifier, data: bytes) -> object:
    (answer,) = answers(model, [image_item(data)])
    return answer[0]["label"]


def test_a_run_of_torchvision_answers_as_its_network_does(tmp_path):
    run = write_run(tmp_path / "run")
    model = loaded(run)
    assert model.labels == list(COLOURS)
    assert model.transform == ImageTransform(resize=36, crop=32, mean=SMALL.mean, std=SMALL.std)
    assert model.prepares_apart
    x = torch.rand(2, 3, 32, 32)
    import torchvision

    network = torchvision.models.resnet18(num_classes=3)
    network.load_state_dict(load_file(RunFolder(run).weights))
    with torch.inference_mode():
        assert torch.allclose(model.forward({"image": x})["logits"], network.eval()(x), atol=1e-5)


def test_a_class_of_the_users_is_served_with_the_labels_of_its_run(colours):
    model = loaded(colours)
    for label, colour in COLOURS.items():
        picture = encoded(Image.new("RGB", (50, 60), colour), "PNG")
        assert label_of(model, picture) == label


def test_other_weights_may_be_given_or_none(colours, tmp_path):
    other = tmp_path / "other.safetensors"
    save_file(colour_weights(num_wrong=1), other)
    assert loaded(colours, str(other)).network.last.bias.tolist() == [0, 0, -100]
    assert not torch.equal(loaded(colours, None).network.last.weight, torch.eye(3) * 4)


def test_held_out_images_are_what_presets_are_tried_on_and_people_are_shown(colours):
    model = loaded(colours)
    assert len(model.samples()) == len(model.encoded_samples()) == 24
    labels = [label_of(model, bytes(item.payload)) for item in model.samples()]
    assert labels == [label for label in COLOURS for _ in range(8)]
    assert json.loads(shown_example(model, own_example(model), []))["b64"]


def test_a_large_example_is_made_small(tmp_path):
    path = tmp_path / "noise.png"
    torch.manual_seed(0)
    noise = torch.randint(256, (500, 700, 3), dtype=torch.uint8).numpy()
    Image.fromarray(noise).save(path)
    run = write_run(tmp_path / "run", model=TINY, validation=[(path, "red")])
    model = loaded(run)
    data, kind = model.example()
    assert kind == "image/jpeg"
    assert len(data) <= 8192
    assert shown_example(model, own_example(model), [])


def test_without_its_images_a_run_is_tried_on_photographs_and_shows_no_example(colours):
    for path in (colours.parent / "images").iterdir():
        path.write_bytes(b"no image")
    model = loaded(colours)
    assert len(model.samples()) == 60
    assert model.encoded_samples()
    assert model.example() is None
    RunFolder(colours).validation.unlink()
    assert len(loaded(colours).samples()) == 60


def edited(run: Path, **changes: object) -> None:
    card = RunFolder(run).card
    card.write_text(json.dumps({**json.loads(card.read_text()), **changes}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: run.weights.unlink(), r"model\.safetensors: there is no such file"),
        (lambda run: run.weights.write_bytes(b"x" * 99), r"model\.safetensors cannot be read as"),
        (
            lambda run: run.labels.write_text("red\ngreen\n"),
            r"labels\.txt has 2 labels, but the weights in .*model\.safetensors are for 3 classes",
        ),
        (lambda run: run.labels.unlink(), r"labels in .*labels\.txt cannot be read"),
        (lambda run: run.labels.write_text(""), r"labels\.txt has no labels"),
        (lambda run: edited(run.path, version=2), r"card\.json has version 2, but this inferpool"),
        (lambda run: run.card.write_text("{}"), r"card\.json is no card of a training run"),
        (lambda run: run.card.write_text("{"), r"card\.json is no card of a training run"),
        (
            lambda run: run.card.unlink(),
            r"the run in .*run has not ended: `inferpool train --output .*run --resume` goes on",
        ),
        (
            lambda run: (run.card.unlink(), run.recipe.unlink()),
            r"run is no .* training run: it has no card\.json; nor .*: it has no config\.json",
        ),
        (lambda run: edited(run.path, model="tests.nowhere:Net"), r"no module 'tests\.nowhere'"),
    ],
)
def test_a_run_that_cannot_be_served_says_why(colours, damage, message):
    damage(RunFolder(colours))
    with pytest.raises(ModelError, match=message) as error:
        loaded(colours)
    assert "\n" not in str(error.value)


def test_a_folder_that_is_not_there_and_options_are_refused(colours):
    with pytest.raises(ModelError, match=r"there is no folder no/where \(looked for from"):
        build("no/where", "DEFAULT", {})
    with pytest.raises(ModelError, match=r"does not take these options: .*; it takes none"):
        build(str(colours), "DEFAULT", {"num_classes": 3})
