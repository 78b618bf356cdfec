import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from inferpool.models.errors import CheckpointError
from inferpool.models.files.checkpoint import read_weights
from inferpool.models.vision import efficientnet
from inferpool.models.vision.efficientnet import EfficientNetLite0, packaged_weights
from inferpool.models.vision.images import decode_image
from tests.models.items import CPU, answers, encoded, image_item, photo, run, tensor_item
from tests.models.reference import ImageClassification, InterpolationMode


@pytest.fixture(scope="module")
def model():
    loaded = EfficientNetLite0()
    loaded.load(CPU)
    return loaded


def test_photographs_are_recognised(model):
    items = [image_item(encoded(photo(n)), top_k=3) for n in ("chelsea", "coffee", "rocket")]
    cat, coffee, rocket = answers(model, items)
    assert {each["label"] for each in cat} == {"tabby", "tiger cat", "Egyptian cat"}
    assert coffee[0]["label"] == "espresso"
    assert coffee[0]["score"] > 0.9
    assert rocket[0]["label"] == "missile"


def test_scores_equal_those_of_torchvisions_transforms(model):
    preset = ImageClassification(
        crop_size=224,
        resize_size=256,
        interpolation=InterpolationMode.BICUBIC,
        mean=(127 / 255,) * 3,
        std=(128 / 255,) * 3,
    )
    data = encoded(photo("astronaut"))
    with torch.inference_mode():
        expected = model.network(preset(decode_image(data))[None]).softmax(-1)[0]
    assert torch.allclose(run(model, [image_item(data)])["probabilities"][0], expected, atol=1e-5)


def test_scores_do_not_depend_on_the_batch(model):
    items = [image_item(encoded(photo(n))) for n in ("chelsea", "coffee", "rocket")]
    together = run(model, items)["probabilities"]
    for item, scores in zip(items, together, strict=True):
        assert torch.allclose(run(model, [item])["probabilities"][0], scores, atol=1e-5)


def test_pixels_score_exactly_as_their_image(model):
    data = encoded(photo("coffee"))
    pixels = torch.from_numpy(np.array(decode_image(data)))
    image, raw = run(model, [image_item(data), tensor_item({"": pixels})])["probabilities"]
    assert torch.equal(image, raw)


def test_the_network_pads_as_tensorflow_does_where_the_total_is_odd(model):
    stem = model.network._conv_stem
    x = torch.randn(1, 3, 8, 8)
    by_hand = torch.nn.functional.conv2d(
        torch.nn.functional.pad(x, (0, 1, 0, 1)), stem.weight, stride=2
    )
    assert torch.equal(stem(x), by_hand)


def test_weights_may_come_from_a_checkpoint_or_be_random(model, tmp_path):
    weights = {n: t.contiguous() for n, t in read_weights(packaged_weights()).items()}
    weights["_fc.bias"] = torch.arange(1000.0)
    save_file(weights, tmp_path / "own.safetensors")
    own = EfficientNetLite0(weights=str(tmp_path / "own.safetensors"))
    own.load(CPU)
    (answer,) = answers(own, [image_item(encoded(Image.new("RGB", (300, 300))))])
    assert answer[0]["index"] == 999
    EfficientNetLite0(weights=None).load(CPU)


def test_a_missing_package_of_weights_is_named(monkeypatch):
    monkeypatch.setattr(efficientnet, "_PACKAGE", "efficientnet_lite0_nowhere")
    with pytest.raises(CheckpointError, match="efficientnet-lite0-nowhere, which is not installed"):
        EfficientNetLite0().load(CPU)


def test_it_loads_without_torchvision():
    code = (
        "import sys; from inferpool.models.sources.registry import build;"
        "from inferpool.models.spec import Placement;"
        "build('efficientnet_lite0', 'DEFAULT', {}).load(Placement(devices=('cpu',)));"
        "sys.exit('torchvision' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
