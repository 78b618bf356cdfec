"""Folders of transformers with tiny networks of random weights that score texts."""

import json
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers.processors import TemplateProcessing

from inferpool.models.text.encoder import packaged_folder

VOCAB = tokenizers.Tokenizer.from_file(str(packaged_folder() / "tokenizer.json")).get_vocab_size()
_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 66,
    "pad_token_id": 0,
}
FAMILIES = {
    "Bert": {},
    "Electra": {"embedding_size": 16},
    "Roberta": {"type_vocab_size": 1},
    "XLMRoberta": {"type_vocab_size": 1},
    "DistilBert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 16},
    "DebertaV2": {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 8,
        "type_vocab_size": 0,
    },
    "MPNet": {},
    "ModernBert": {"cls_token_id": 101, "sep_token_id": 102, "local_attention": 16},
}
"""Fields of each family's configuration, besides the common ones."""
_DECODERS = {"Qwen3": {"head_dim": 8, "num_key_value_heads": 2, "pad_token_id": None}}
_WITH_TYPES = ("Bert", "Electra")


def write_scorer(folder: Path, family: str = "Bert", **config: object) -> Path:
    """Write a folder with a network of a family, its tokenizer, and fields of its config.json."""
    folder.mkdir(exist_ok=True)
    kind = getattr(transformers, f"{family}Config")
    given = _SMALL | (FAMILIES | _DECODERS)[family]
    if family == "DistilBert":
        given = {**FAMILIES[family], "vocab_size": VOCAB, "max_position_embeddings": 66}
    torch.manual_seed(0)
    network = getattr(transformers, f"{family}ForSequenceClassification")(kind(**given, **config))
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "norm" not in name.lower():  # so that each text has a score of its own
                parameter.normal_(std=0.4)
    network.save_pretrained(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(packaged_folder() / "tokenizer.json"))
    if family not in _WITH_TYPES:
        tokenizer.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] [SEP] $B [SEP]",
            special_tokens=[("[CLS]", 101), ("[SEP]", 102)],
        )
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 64}))
    return folder


def logits_of(folder: Path, *texts: str) -> torch.Tensor:
    """Return what transformers computes for a text or a pair of texts, alone in its batch."""
    network = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    tokens = tokenizer(
        *texts,
        truncation=True,
        max_length=64,
        return_tensors="pt",
        return_token_type_ids=type(network).__name__.startswith(_WITH_TYPES),
    )
    with torch.inference_mode():
        found: torch.Tensor = network(**tokens).logits[0]
    return found
