"""Folders of transformers as models, beside what transformers itself answers."""

import json
import logging
from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from inferpool.models.errors import CheckpointError, InputError, ModelError, SourceError
from inferpool.models.files.networks import FolderOptions
from inferpool.models.hugging_face.loading import PictureFolder
from inferpool.models.sources.registry import build
from tests.models.items import answers, encoded, image_item, loaded, photo

transformers = pytest.importorskip("transformers")
from tests.models.hugging_face.folders import (  # noqa: E402  # they import it
    write_segformer,
    write_vit,
    write_yolos,
)

PHOTOS = [photo("chelsea").resize((90, 60)), photo("coffee").resize((50, 70))]


def items(**parameters):
    return [image_item(encoded(each, "PNG"), **parameters) for each in PHOTOS]


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    return write_vit(tmp_path_factory.mktemp("folders") / "vit")


def test_a_classifier_answers_as_the_pipeline_of_transformers(vit, caplog):
    with caplog.at_level(logging.INFO):
        model = loaded(build(str(vit), "DEFAULT", {}))
    assert "ViTForImageClassification of transformers" in caplog.text
    assert "the folder's weights; 3 classes: cat, dog, eel" in caplog.text
    pipeline = transformers.pipeline("image-classification", str(vit))
    for found, picture in zip(answers(model, items()), PHOTOS, strict=True):
        wanted = pipeline(picture)
        assert [each["label"] for each in found] == [each["label"] for each in wanted]
        scores = [each["score"] for each in found]
        assert scores == pytest.approx([each["score"] for each in wanted], abs=1e-5)
    assert model.has_fixed_shapes


def test_a_detector_answers_with_boxes_in_the_pictures_own_pixels(tmp_path):
    folder = write_yolos(tmp_path / "yolos")
    model = loaded(build(f"transformers:{folder}", "DEFAULT", {}))
    network = transformers.AutoModelForObjectDetection.from_pretrained(folder)
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    for item, picture in zip(items(min_score=0), PHOTOS, strict=True):
        with torch.inference_mode():
            outputs = network(**processor(images=picture, return_tensors="pt"))
        (wanted,) = processor.post_process_object_detection(
            outputs, threshold=0, target_sizes=[picture.size[::-1]]
        )
        (found,) = answers(model, [item])
        order = wanted["scores"].argsort(descending=True, stable=True)
        assert torch.allclose(torch.tensor(found["boxes"]), wanted["boxes"][order], atol=1e-3)
        assert torch.allclose(torch.tensor(found["scores"]), wanted["scores"][order], atol=1e-5)
        names = [network.config.id2label[int(each)] for each in wanted["labels"][order]]
        assert found["labels"] == names
    (few,) = answers(model, items(min_score=found["scores"][0])[1:])
    assert few["scores"] == found["scores"][: len(few["scores"])]
    assert len(few["scores"]) < len(found["scores"])
    for bad in ({"min_score": 2}, {"top_k": 1}):
        with pytest.raises(InputError, match="parameter"):
            model.preprocess(items(**bad)[0])


def test_a_segmenter_answers_with_the_pixels_of_each_class(tmp_path):
    folder = write_segformer(tmp_path / "segformer")
    model = loaded(build(str(folder), "DEFAULT", {}))
    network = transformers.AutoModelForSemanticSegmentation.from_pretrained(folder)
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    batch = model.collate([model.preprocess(each) for each in items()])
    with torch.inference_mode():
        labels = model.forward(batch)["labels"].cpu()
        for found, picture in zip(labels, PHOTOS, strict=True):
            outputs = network(**processor(images=picture, return_tensors="pt"))
            (wanted,) = processor.post_process_semantic_segmentation(
                outputs, target_sizes=[picture.size[::-1]]
            )
            assert found.shape == wanted.shape
            assert (found == wanted).float().mean() > 0.999
            answer = model.render({"labels": found}, {})
            assert sum(sum(runs["counts"][1::2]) for runs in answer.values()) == wanted.numel()
            assert {*answer} <= {"cat", "dog", "eel"}
            content = model.render_content({"labels": found}, {})
            pixels = np.array(Image.open(BytesIO(content.data)))
            assert (pixels == found.numpy()).all()
            assert content.media_type == "image/png"


def test_other_weights_replace_those_of_the_folder(vit, tmp_path):
    path = tmp_path / "other.safetensors"
    path.write_bytes((vit / "model.safetensors").read_bytes())
    wanted = answers(loaded(build(str(vit), "DEFAULT", {})), items())
    assert answers(loaded(build(str(vit), str(path), {})), items()) == wanted
    assert answers(loaded(build(str(vit), None, {})), items()) != wanted


def _changed(vit, tmp_path, **changes):
    """Copy a folder but for files that are None, and with values of its config changed."""
    folder = tmp_path / "changed"
    folder.mkdir()
    for file in vit.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_what_is_wrong_with_a_folder_is_said(vit, tmp_path):
    folder = _changed(vit, tmp_path, hidden_size=32)
    with pytest.raises(CheckpointError, match=r"changed are not those of ViT.*other shapes there"):
        loaded(build(str(folder), "DEFAULT", {}))
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(SourceError, match=r"changed cannot be read by transformers: "):
        loaded(build(str(folder), "DEFAULT", {}))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"no model\.safetensors.*pickled_weights = true"):
        loaded(build(str(folder), "DEFAULT", {}))
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(SourceError, match=r"no preprocessor_config\.json.*save_pretrained"):
        loaded(build(str(folder), "DEFAULT", {}))
    (folder / "config.json").write_text('{"architectures": ["GptForCausalLM"]}')
    with pytest.raises(SourceError, match=r"names GptForCausalLM; served are networks of \*For"):
        build(f"transformers:{folder}", "DEFAULT", {})
    with pytest.raises(SourceError, match="no folder gone"):
        build("transformers:gone", "DEFAULT", {})


def test_code_in_a_folder_does_not_run(vit, tmp_path):
    folder = _changed(
        vit, tmp_path, model_type="mine", auto_map={"AutoConfig": "mine.Mine", "AutoModel": "m.M"}
    )
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(SourceError, match=r"only with options\.trust_remote_code = true"):
        loaded(build(str(folder), "DEFAULT", {}))
    assert not (tmp_path / "ran").exists()


def test_without_transformers_the_extra_is_named(vit, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ModelError, match=r"pip install 'inferpool\[transformers\]'"):
        loaded(build(str(vit), "DEFAULT", {}))


def test_a_picture_that_cannot_be_prepared_is_refused(tmp_path):
    model = loaded(build(str(write_yolos(tmp_path / "yolos")), "DEFAULT", {}))
    with pytest.raises(InputError, match="300 x 3 pixels cannot be prepared"):
        model.preprocess(image_item(encoded(Image.new("RGB", (300, 3)), "PNG")))


def test_a_permission_is_true_or_false():
    with pytest.raises(ModelError, match="trust_remote_code must be true or false, not 'false'"):
        FolderOptions(weights=None, trust_remote_code="false", pickled_weights=False)  # type: ignore[arg-type]  # as settings may


def test_a_picture_that_would_become_huge_is_refused(vit, tmp_path):
    options = FolderOptions(weights=None, trust_remote_code=False, pickled_weights=False)
    classifier = PictureFolder(vit, options)
    segmenter = PictureFolder(write_segformer(tmp_path / "segformer"), options)
    for folder in (classifier, segmenter):
        folder.processor = SimpleNamespace(size={"shortest_edge": 256})
    classifier.check_size((180, 1))
    for folder, size in ((classifier, (1, 5000)), (segmenter, (180, 1))):
        with pytest.raises(InputError, match="at most"):
            folder.check_size(size)
    segmenter.processor = SimpleNamespace(size={"shortest_edge": 256, "longest_edge": 512})
    segmenter.check_size((180, 1))


def test_no_weights_of_a_backbone_are_fetched(vit, tmp_path):
    folder = _changed(vit, tmp_path, use_pretrained_backbone=True)
    model = loaded(build(str(folder), "DEFAULT", {}))
    assert not getattr(model.network.inner.config, "use_pretrained_backbone", False)


def test_files_are_fetched_that_the_options_allow(vit, monkeypatch):
    asked = []

    def fetch(name, *, allow_patterns):
        asked.append((name, allow_patterns))
        return str(vit)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    build("transformers:some/vit", "DEFAULT", {"download": True})
    build("transformers:some/vit", "DEFAULT", {"download": True, "pickled_weights": True})
    assert asked == [
        ("some/vit", ["*.json", "*.safetensors"]),
        ("some/vit", ["*.json", "*.safetensors", "*.bin"]),
    ]
