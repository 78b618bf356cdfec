"""Networks of many families, with random weights, against transformers itself."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import save_file

from inferpool.models.errors import ModelError
from inferpool.models.sources.registry import build
from inferpool.models.text.bert import Bert
from inferpool.models.text.encoder import packaged_folder
from tests.models.items import json_item, loaded, run

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
IDS = {"pad_token_id": 3, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2}
DECODER = {"num_key_value_heads": 2, "head_dim": 8}
LENGTHS = (3, 17, 40, 9, 60)


def folder_with(path, name, **more):
    """Write a folder of an architecture; return its encoder, as transformers makes it."""
    torch.manual_seed(1)  # others than those that are drawn without a checkpoint
    family = name.partition("Model")[0].partition("For")[0].removesuffix("Encoder")
    sizes = SIZES if family != "DistilBert" else {"vocab_size": 1000, "dim": 32, "n_layers": 2}
    if family == "T5":
        sizes = {"vocab_size": 1000, "d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8}
    network = getattr(transformers, name)(
        getattr(transformers, f"{family}Config")(**{**sizes, **more})
    )
    network.save_pretrained(path)
    shutil.copy(packaged_folder() / "tokenizer.json", path)
    return (network if family == "T5" else network.base_model).eval()


def ids_of_texts():
    drawn = torch.Generator().manual_seed(1)
    return [torch.randint(5, 1000, (n,), generator=drawn).tolist() for n in LENGTHS]


@pytest.mark.parametrize(
    ("name", "more", "max_tokens"),
    [
        ("BertForMaskedLM", {}, 64),
        ("BertModel", {"hidden_act": "silu"}, 64),
        ("RobertaModel", {}, 62),
        ("RobertaForMaskedLM", {}, 62),
        ("XLMRobertaModel", {}, 62),
        ("MPNetForMaskedLM", {}, 62),
        ("DistilBertModel", {"n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 64}, 64),
        ("ModernBertModel", {**IDS, "num_hidden_layers": 4, "local_attention": 8}, 64),
        ("ElectraModel", {"embedding_size": 16}, 64),
        pytest.param(
            *("NomicBertModel", {}, 64),
            marks=pytest.mark.skipif(
                not hasattr(transformers, "NomicBertModel"), reason="transformers is older"
            ),
        ),
        ("Qwen3ForCausalLM", DECODER, 64),
        ("T5EncoderModel", {"d_ff": 64}, 512),
        ("SqueezeBertModel", {"embedding_size": 32}, 64),
    ],
)
def test_vectors_are_those_of_transformers_whoever_shares_the_batch(
    name, more, max_tokens, tmp_path
):
    theirs = folder_with(tmp_path, name, **more)
    texts = ids_of_texts()
    with torch.inference_mode():
        states = [theirs(input_ids=torch.tensor([ids])).last_hidden_state[0] for ids in texts]
    model = loaded(build(f"encoder:{tmp_path}", "DEFAULT", {}))
    assert not isinstance(model.network, Bert)
    assert model.text.max_tokens == max_tokens
    last = loaded(build(f"encoder:{tmp_path}", "DEFAULT", {"pooling": "last"}))
    items = [json_item({"ids": ids}) for ids in texts]
    for found, wanted in (
        (run(model, items)["embedding"], [each.mean(0) for each in states]),
        (run(last, items)["embedding"], [each[-1] for each in states]),
    ):
        torch.testing.assert_close(found, torch.stack(wanted), atol=1e-5, rtol=0)


def test_a_bert_is_our_own_and_equals_that_of_transformers(tmp_path):
    theirs = folder_with(tmp_path, "BertModel")
    model = loaded(build(f"encoder:{tmp_path}", "DEFAULT", {}))
    assert isinstance(model.network, Bert)
    ids = torch.tensor(ids_of_texts()[-1:])
    with torch.inference_mode():
        wanted = theirs(input_ids=ids).last_hidden_state
        found = model.network(ids, torch.ones_like(ids, dtype=torch.bool))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_places_that_padding_takes_are_no_tokens_of_a_text(tmp_path):
    folder_with(tmp_path, "RobertaModel", vocab_size=30522)
    model = loaded(build(f"encoder:{tmp_path}", "DEFAULT", {}))
    assert len(model.preprocess(json_item({"ids": [7] * 100}))["ids"]) == 62  # of 64 places
    assert run(model, model.warmup()[1:])["embedding"].isfinite().all()
    with pytest.raises(ModelError, match="max_tokens must be from 3 to 62, not 64"):
        build(f"encoder:{tmp_path}", "DEFAULT", {"max_tokens": 64})


def test_a_checkpoint_or_random_weights_may_take_the_place_of_the_folders(tmp_path):
    folder_with(tmp_path, "RobertaModel")
    item = [json_item({"ids": [7, 8, 9]})]
    own, other, random, again = (
        run(loaded(build(f"encoder:{tmp_path}", weights, {})), item)["embedding"]
        for weights in ("DEFAULT", str(tmp_path / "model.safetensors"), None, None)
    )
    assert torch.equal(own, other)
    assert torch.equal(random, again)
    assert not torch.allclose(own, random)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"model_type": "none"}', "cannot be read by transformers: .*`none`"),
        ('{"model_type": "convbert", "vocab_size": 9}', "convbert mixes tokens without a mask"),
        ('{"model_type": "yoso", "vocab_size": 9}', "yoso mixes tokens without a mask"),
        ('{"model_type": "bart"}', "bart is an encoder with a decoder"),
        (
            '{"model_type": "electra", "position_embedding_type": "relative_key_query"}',
            "'relative_key_query', which transformers ignores",
        ),
    ],
)
def test_networks_that_cannot_encode_texts_are_refused(config, said, tmp_path):
    folder_with(tmp_path, "ElectraModel")
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match=said):
        build(f"encoder:{tmp_path}", "DEFAULT", {})


CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

class Config(PretrainedConfig):
    model_type = "mine"

class Network(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.table = torch.nn.Embedding(1000, config.hidden_size)
        self.post_init()

    def forward(self, input_ids, attention_mask):
        return BaseModelOutput(last_hidden_state=self.table(input_ids))
"""


def test_code_in_a_folder_runs_only_if_the_options_allow_it(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "c"))
    shutil.copy(packaged_folder() / "tokenizer.json", tmp_path)
    (tmp_path / "mine.py").write_text(CODE)
    table = torch.randn(1000, 4)
    save_file({"table.weight": table}, tmp_path / "model.safetensors", {"format": "pt"})
    auto = {"AutoConfig": "mine.Config", "AutoModel": "mine.Network"}
    config = {"model_type": "mine", "hidden_size": 4, "vocab_size": 1000, "auto_map": auto}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"runs only with options\.trust_remote_code = true"):
        build(f"encoder:{tmp_path}", "DEFAULT", {})
    options = {"trust_remote_code": True}
    model = loaded(build(f"encoder:{tmp_path}", "DEFAULT", options))
    torch.testing.assert_close(
        run(model, [json_item({"ids": [7, 9]})])["embedding"][0], table[[7, 9]].mean(0)
    )
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": "4"}))
    with pytest.raises(ModelError, match="of a mine says no hidden_size"):
        build(f"encoder:{tmp_path}", "DEFAULT", options)
