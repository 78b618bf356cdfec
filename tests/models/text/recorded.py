"""Folders of sentence-transformers with small networks, and vectors that it computes from them.

`python -m tests.models.text.recorded` lets sentence-transformers save each folder and encode some
texts, and writes `sentence_transformers.json`: the small files of the folders, and the vectors. It
needs `pip install sentence-transformers`, which the tests do not. The weights are numbers by
chance from their names, so that no file has them.

Vectors were made by sentence-transformers 6.2.0 with transformers 5.24.0 and torch 2.15.0, one text
at a time, on a CPU in float32.
"""

# mypy: disable-error-code="import-not-found"

import json
import shutil
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from inferpool.models.text.encoder import packaged_folder

FILE = Path(__file__).parent / "sentence_transformers.json"
TEXTS = (
    "How do I get there?",
    "",
    "Größe: 3 m², naïve café, 東京 🦔",
    "The quick brown fox jumps over the lazy dog, " * 4,
)
SIZES: Mapping[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
}
PROMPTS = {"query": "search query: ", "passage": "passage: "}
CASES: Mapping[str, Mapping[str, Any]] = {
    "mean": {"network": "Bert", "max_seq_length": 24, "normalizes": True},
    "dense": {"network": "Bert", "pooling": "cls", "dense": 5, "prompt": "query"},
    "joined": {
        "network": "Bert",
        "pooling": ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"],
    },
    "no prompt": {
        "network": "Bert",
        "pooling": ["cls", "max", "mean", "weightedmean", "lasttoken"],
        "include_prompt": False,
        "prompt": "passage",
        "normalizes": True,
    },
    "roberta": {"network": "Roberta", "pooling": "lasttoken", "dense": 4, "normalizes": True},
    "mpnet": {"network": "MPNet"},
    "modernbert": {"network": "ModernBert", "pooling": "cls"},
}


def numbers(name: str, shape: Sequence[int]) -> torch.Tensor:
    """Return the weights of a name."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    is_scale = len(shape) == 1 and "norm" in name.lower() and name.endswith("weight")
    return drawn / 4 + 1 if is_scale else drawn / 2


def write_folder(path: Path, recorded: Mapping[str, Any]) -> Path:
    """Write a folder that was recorded, with its weights."""
    shutil.copy(packaged_folder() / "tokenizer.json", path)
    for name, value in recorded["files"].items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(json.dumps(value))
    for name, shapes in recorded["weights"].items():
        save_file({each: numbers(each, shape) for each, shape in shapes.items()}, path / name)
    return path


def record(case: Mapping[str, Any], raw: Path, saved: Path) -> dict[str, Any]:
    """Let sentence-transformers save a folder and encode the texts."""
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base import modules as base
    from sentence_transformers.sentence_transformer import modules

    name = case["network"]
    ids = {"pad_token_id": 0, "bos_token_id": 101, "cls_token_id": 101, "eos_token_id": 102}
    more = {**ids, "sep_token_id": 102} if name == "ModernBert" else {}
    config = getattr(transformers, f"{name}Config")(**SIZES, **more)
    network = getattr(transformers, f"{name}Model")(config)
    network.load_state_dict(
        {each: numbers(each, value.shape) for each, value in network.state_dict().items()}
    )
    network.save_pretrained(raw)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(packaged_folder() / file, raw)
    pooling = case.get("pooling", "mean")
    width = SIZES["hidden_size"] * (1 if isinstance(pooling, str) else len(pooling))
    parts: list[Any] = [
        base.Transformer(str(raw), max_seq_length=case.get("max_seq_length", 48)),
        modules.Pooling(
            SIZES["hidden_size"],
            pooling_mode=pooling,
            include_prompt=case.get("include_prompt", True),
        ),
    ]
    if "dense" in case:
        dense = base.Dense(width, case["dense"], activation_function=torch.nn.Tanh())
        for each, value in dense.state_dict().items():
            value.copy_(numbers(each, value.shape))
        parts.append(dense)
    if case.get("normalizes"):
        parts.append(base.Normalize())
    model = SentenceTransformer(
        modules=parts, prompts=PROMPTS, default_prompt_name=case.get("prompt")
    )
    model.save(str(saved))
    model = SentenceTransformer(str(saved), device="cpu")
    return {
        "files": {
            str(file.relative_to(saved)): json.loads(file.read_text())
            for file in sorted(saved.rglob("*.json"))
            if file.name != "tokenizer.json"
        },
        "weights": {
            str(file.relative_to(saved)): _shapes(file) for file in saved.rglob("*.safetensors")
        },
        "vectors": [_rounded(model.encode(text)) for text in TEXTS],
        "queries": [_rounded(model.encode(text, prompt_name="query")) for text in TEXTS],
    }


def _rounded(vector: Any) -> list[float]:
    return [round(each, 7) for each in vector.tolist()]


def _shapes(path: Path) -> dict[str, list[int]]:
    with safe_open(path, "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}


def main() -> None:
    """Record all cases."""
    found = {}
    for name, case in CASES.items():
        with TemporaryDirectory() as raw, TemporaryDirectory() as saved:
            found[name] = record(case, Path(raw), Path(saved))
            keep = Path(sys.argv[1]) / name if len(sys.argv) > 1 else None
            if keep:
                shutil.copytree(saved, keep, dirs_exist_ok=True)
    FILE.write_text(json.dumps(found, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
