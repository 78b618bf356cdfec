"""Kinds of folders in Hugging Face's form, by their small files."""

import json

import pytest

from inferpool.models.files.hugging_face import (
    form_of,
    needs_transformers,
    why_no_reranker,
    why_no_task,
)
from inferpool.models.files.kinds import is_served

ONE, THREE = ({str(number): "x" for number in range(num)} for num in (1, 3))
POOLED = [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1_Pooling"}]


@pytest.mark.parametrize(
    ("form", "files"),
    [
        ("transformers", {"config": {"architectures": ["ViTForImageClassification"]}}),
        (
            "reranker",
            {"config": {"architectures": ["XForSequenceClassification"], "id2label": ONE}},
        ),
        (
            "transformers",
            {"config": {"architectures": ["XForSequenceClassification"], "id2label": THREE}},
        ),
        ("transformers", {"config": {"architectures": ["XForSequenceClassification"]}}),
        (
            "encoder",
            {"modules": POOLED, "config": {"architectures": ["XForSequenceClassification"]}},
        ),
        (
            "reranker",  # a CrossEncoder of sentence-transformers
            {
                "modules": POOLED[:1],
                "config": {"architectures": ["XForSequenceClassification"], "num_labels": 1},
            },
        ),
        ("encoder", {"config": {"architectures": ["XLMRobertaModel"]}, "tokenizer": {}}),
        ("encoder", {"config": {"architectures": ["XForMaskedLM"]}, "tokenizer": {}}),
        (None, {"config": {"architectures": ["ViTModel"]}}),
        (
            None,
            {
                "config": {"architectures": ["CLIPModel"]},
                "tokenizer": {},
                "preprocessor_config": {},
            },
        ),
        (
            None,
            {
                "config": {"architectures": ["T5Model"], "is_encoder_decoder": True},
                "tokenizer": {},
            },
        ),
        (None, {"config": {"architectures": ["GptForCausalLM"]}, "tokenizer": {}}),
        (None, {"config": {"architectures": ["GPT2LMHeadModel"]}, "tokenizer": {}}),
        (None, {"config": {"architectures": 3}}),
        (None, {"config": []}),
        (None, {}),
    ],
)
def test_a_folder_is_served_by_what_its_files_say(tmp_path, form, files):
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    assert form_of(tmp_path) == form
    assert is_served(tmp_path) == (form is not None)


@pytest.mark.parametrize(
    ("config", "needs"),
    [
        ({"model_type": "bert", "architectures": ["BertModel"]}, False),
        ({"model_type": "bert", "architectures": ["BertForSequenceClassification"]}, False),
        ({"model_type": "bert"}, False),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, True),
        ({"model_type": "mpnet", "architectures": ["MPNetModel"]}, True),
    ],
)
def test_networks_of_ours_need_no_library(tmp_path, config, needs):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert needs_transformers(tmp_path) == needs


def test_what_cannot_be_a_path_is_no_folder(tmp_path):
    assert form_of(tmp_path / ("x" * 5000)) is None
    assert form_of(tmp_path / "\0") is None


def test_a_folder_with_its_parts_in_folders_of_their_own_is_served(tmp_path):
    (tmp_path / "modules.json").write_text(json.dumps(POOLED))
    assert (form_of(tmp_path), is_served(tmp_path)) == ("encoder", True)


def test_other_folders_hear_what_is_served(tmp_path):
    assert "has no config.json" in why_no_task(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json cannot be read as the JSON" in why_no_task(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["GptForCausalLM"]}')
    text = why_no_task(tmp_path)
    assert "names GptForCausalLM; served are networks of *ForImageClassification" in text
    assert "*ForSequenceClassification, and encoders of texts as encoder:FOLDER" in text
    assert "; a reranker is a *ForSequenceClassification with one" in why_no_reranker(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["XForSequenceClassification"]}')
    assert "has 2 labels, and a reranker has one" in why_no_reranker(tmp_path)
