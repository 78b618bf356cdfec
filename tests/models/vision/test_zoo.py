import hashlib
import types

import pytest
import torch

from inferpool.models.errors import CheckpointError, SourceError
from inferpool.models.sources.registry import build
from inferpool.models.vision.images import decode_image
from inferpool.models.vision.zoo import TorchvisionClassifier
from tests.models.items import CPU, answers, encoded, image_item, loaded, photo, run
from tests.models.reference import ImageClassification, SqueezeNet1_1_Weights, torchvision

NAME = "squeezenet1_1"


@pytest.fixture(scope="module")
def weights():
    torch.manual_seed(0)
    return torchvision.models.get_model(NAME).state_dict()


@pytest.fixture
def published(weights, tmp_path, monkeypatch):
    """Publish weights as torchvision does, with their hash in the name, at a local URL."""
    torch.save(weights, tmp_path / "weights")
    digest = hashlib.sha256((tmp_path / "weights").read_bytes()).hexdigest()
    path = (tmp_path / "weights").rename(tmp_path / f"squeezenet1_1-{digest[:8]}.pth")
    monkeypatch.setattr(SqueezeNet1_1_Weights.IMAGENET1K_V1.value, "url", path.as_uri())
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    return path


def assert_scores_as_torchvision_alone(model, weights):
    network = torchvision.models.get_model(NAME).eval()
    network.load_state_dict(weights)
    preset = SqueezeNet1_1_Weights.DEFAULT.transforms()
    data = encoded(photo("chelsea"))
    with torch.inference_mode():
        expected = network(preset(decode_image(data))[None]).softmax(-1)[0]
    scores = run(model, [image_item(data)])["probabilities"][0]
    assert torch.allclose(scores, expected, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["DEFAULT", "IMAGENET1K_V1", "SqueezeNet1_1_Weights.IMAGENET1K_V1"]
)
def test_published_weights_are_downloaded_once_and_checked(published, weights, name):
    model = build(f"torchvision:{NAME}", name, {})
    assert model.download == published.as_uri()
    assert (len(model.labels), model.labels[281]) == (1000, "tabby")
    model.load(CPU)
    assert model.download == ""
    assert_scores_as_torchvision_alone(model, weights)
    published.unlink()
    again = loaded(build(f"torchvision:{NAME}", name, {}))
    assert answers(again, again.warmup()) == answers(model, model.warmup())


def test_a_download_that_is_damaged_or_missing_is_refused(published):
    published.write_bytes(published.read_bytes() + b"x")
    model = build(f"torchvision:{NAME}", "DEFAULT", {})
    with pytest.raises(CheckpointError, match=r"cannot be loaded from file:.*invalid hash value"):
        model.load(CPU)
    published.unlink()
    with pytest.raises(CheckpointError, match="cannot be loaded from file:"):
        model.load(CPU)


def test_a_damaged_file_in_the_cache_is_refused_before_it_is_read(published):
    cached = torch.hub.get_dir() + "/checkpoints/" + published.name
    model = loaded(build(f"torchvision:{NAME}", "DEFAULT", {}))
    with open(cached, "ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match=r"is damaged: its SHA-256 begins with .* delete it"):
        model.load(CPU)


def test_a_checkpoint_takes_the_place_of_the_published_weights(weights, tmp_path):
    torch.save({"state_dict": weights}, tmp_path / "own.pth")
    model = loaded(build(f"torchvision:{NAME}", str(tmp_path / "own.pth"), {}))
    assert_scores_as_torchvision_alone(model, weights)


def test_classes_and_labels_of_ones_own_are_options(tmp_path):
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    cases: list[tuple[dict[str, object], list[str]]] = [
        ({"num_classes": 3}, ["class 0", "class 1", "class 2"]),
        ({"labels": ["cat", "dog"]}, ["cat", "dog"]),
        ({"labels": str(tmp_path / "labels.txt")}, ["cat", "dog"]),
    ]
    for options, labels in cases:
        model = loaded(build(f"torchvision:{NAME}", None, options))
        (answer,) = answers(model, model.warmup())
        assert sorted(each["label"] for each in answer) == labels


@pytest.mark.slow
@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_networks_with_a_second_head_load_their_own_checkpoints(name, tmp_path):
    network = torchvision.models.get_model(name, init_weights=False, num_classes=10)
    torch.save(network.state_dict(), tmp_path / "a.pth")
    for weights in (None, str(tmp_path / "a.pth")):
        model = loaded(build(f"torchvision:{name}", weights, {"num_classes": 10}))
        assert len(answers(model, model.warmup())[0]) == 5


@pytest.mark.parametrize(
    ("name", "weights", "options", "message"),
    [
        ("resnet5", None, {}, "detector or segmenter 'resnet5': did you mean resnet50"),
        ("zzz", None, {}, "detector or segmenter 'zzz': it has alexnet"),
        ("r3d_18", None, {}, "no classifier, detector or segmenter 'r3d_18'"),
        (NAME, "IMAGENET1K_V9", {}, "no weights 'IMAGENET1K_V9' .* it has IMAGENET1K_V1"),
        (NAME, None, {"labels": "/no/such/file"}, "the labels in /no/such/file cannot be read"),
        (NAME, None, {"wdth": 2}, "builder of squeezenet1_1 does not take wdth=2: .*'wdth'"),
        (NAME, "DEFAULT", {"num_classes": 3}, "does not take num_classes=3"),
    ],
)
def test_names_and_options_unknown_to_torchvision_are_refused(
    published, name, weights, options, message
):
    with pytest.raises(SourceError, match=message):
        loaded(build(f"torchvision:{name}", weights, options))


def test_every_classifier_of_torchvision_has_a_transform_that_ours_equals():
    """Holds for all weights published so far; others would go through their own transforms."""
    for name in torchvision.models.list_models(module=torchvision.models):
        for weights in torchvision.models.get_model_weights(name):
            assert type(weights.transforms()) is ImageClassification, weights


def test_other_transforms_are_called_themselves(published, weights, monkeypatch):
    preset = SqueezeNet1_1_Weights.DEFAULT.transforms()
    other = types.new_class("Other", (type(preset),))
    model = TorchvisionClassifier(NAME)
    model._preset = other(crop_size=224)
    model.load(CPU)
    data = encoded(photo("coffee"))
    assert model.preprocess(image_item(data))["image"].dtype == torch.float32
    assert_scores_as_torchvision_alone(model, weights)
