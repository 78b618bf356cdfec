"""Folders that sentence-transformers saved, against the vectors that it computes: `recorded`."""

import json

import pytest
import torch

from inferpool.models.errors import ModelError
from inferpool.models.sources.registry import build
from inferpool.models.text.folder import read_head
from tests.models.items import answers, json_item, loaded
from tests.models.text.recorded import CASES, FILE, PROMPTS, TEXTS, write_folder

pytest.importorskip("transformers")  # imported here, since it changes the places of modules


@pytest.fixture(scope="module")
def recorded():
    return json.loads(FILE.read_text())


@pytest.mark.parametrize("name", CASES)
def test_vectors_are_those_of_sentence_transformers(name, recorded, tmp_path):
    case = recorded[name]
    folder = write_folder(tmp_path, case)
    model = loaded(build(f"encoder:{folder}", "DEFAULT", {}))
    items = [json_item(text) for text in TEXTS]
    vectors, queries = (
        torch.tensor(answers(model, [json_item(text, **given) for text in TEXTS]))
        for given in ({}, {"prompt_name": "query"})
    )
    alone = torch.tensor([answers(model, [item])[0] for item in items])
    wanted = torch.tensor(case["vectors"])
    torch.testing.assert_close(vectors, wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(alone, wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(queries, torch.tensor(case["queries"]), atol=1e-5, rtol=0)
    assert (vectors - queries).abs().max() > 1e-3 or CASES[name].get("prompt") == "query"
    assert model.text.num_dimensions == len(vectors[0])


def test_a_folder_without_prompts_or_modules_has_the_usual_head(tmp_path):
    head = read_head(tmp_path)
    assert (head.poolings, head.layers, head.normalizes) == (("mean",), (), False)
    assert (head.prompts, head.default_prompt, head.pools_prompt) == ({}, "", True)


def test_older_flags_of_the_pooling_are_joined_in_the_order_of_sentence_transformers(tmp_path):
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "a.Pooling", "path": "p"}]))
    (tmp_path / "p").mkdir()
    flags = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}
    (tmp_path / "p/config.json").write_text(json.dumps({**flags, "word_embedding_dimension": 8}))
    assert read_head(tmp_path).poolings == ("cls", "mean")
    (tmp_path / "p/config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    assert read_head(tmp_path).poolings == ("last",)


def test_texts_are_lowercased_where_the_folder_says_so(recorded, tmp_path):
    folder = write_folder(tmp_path, recorded["mean"])
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["normalizer"]["lowercase"] = False  # so that it knows no capitals
    path.write_text(json.dumps(tokenizer))
    items = [json_item("Hello World"), json_item("hello world")]
    capitals, small = answers(loaded(build(f"encoder:{folder}", "DEFAULT", {})), items)
    assert capitals != pytest.approx(small, abs=1e-3)
    (folder / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    capitals, small = answers(loaded(build(f"encoder:{folder}", "DEFAULT", {})), items)
    assert capitals == pytest.approx(small)


def test_the_network_may_lie_in_a_folder_of_its_own(recorded, tmp_path):
    folder = write_folder(tmp_path, recorded["mean"])
    (folder / "0_Transformer").mkdir()
    for name in ("config", "tokenizer", "tokenizer_config", "sentence_bert_config", "model"):
        (file,) = folder.glob(f"{name}.*")
        file.rename(folder / "0_Transformer" / file.name)
    path = folder / "modules.json"
    path.write_text(path.read_text().replace('"path": ""', '"path": "0_Transformer"', 1))
    model = loaded(build(f"encoder:{folder}", "DEFAULT", {}))
    found = torch.tensor(answers(model, [json_item(TEXTS[0])])[0])
    torch.testing.assert_close(found, torch.tensor(recorded["mean"]["vectors"][0]))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"activation_function": "my.Swish"},
            "its activation is 'Swish'; known are Identity, Tanh",
        ),
        ({"module_input_name": "token_embeddings"}, "the layer reads token_embeddings"),
        ({"use_residual": True}, "with a residual"),
        ({"in_features": 9}, "has 9 inputs, and gets 8 features"),
        ({"out_features": 6}, "does not fit _Dense"),
    ],
)
def test_a_layer_that_cannot_be_served_is_refused(changed, said, recorded, tmp_path):
    folder = write_folder(tmp_path, recorded["dense"])
    path = folder / "2_Dense" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with pytest.raises(ModelError, match=said):
        loaded(build(f"encoder:{folder}", "DEFAULT", {}))


def test_a_layer_without_weights_is_refused_unless_they_are_to_be_random(recorded, tmp_path):
    folder = write_folder(tmp_path, recorded["dense"])
    (folder / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="2_Dense has no weights"):
        loaded(build(f"encoder:{folder}", "DEFAULT", {}))
    model = loaded(build(f"encoder:{folder}", None, {}))
    assert len(answers(model, [json_item("a")])[0]) == 5


def test_a_prompt_of_no_name_is_refused_with_those_that_there_are(recorded, tmp_path):
    model = loaded(build(f"encoder:{write_folder(tmp_path, recorded['no prompt'])}", "DEFAULT", {}))
    with pytest.raises(ValueError, match="'prompt_name' is 'q', and the prompts of this") as error:
        model.preprocess(json_item("a", prompt_name="q"))
    assert all(repr(each) in str(error.value) for each in PROMPTS)
    with pytest.raises(ValueError, match="'prompt_name' is for texts"):
        model.preprocess(json_item({"ids": [101, 102]}, prompt_name="query"))
