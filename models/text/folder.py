"""Reads folders of text encoders in the Hugging Face layout. Runs in workers only.

`config.json`, the tokenizer and the weights are the transformers library's; `modules.json`, the
pooling's folder and `sentence_bert_config.json` are those of sentence-transformers. Without the
latter, the mean is used, as in that library.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, get_args

import msgspec

from inferpool.models.errors import ModelError
from inferpool.models.text.bert import BertConfig, Pooling

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
_POOLINGS = {"mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max"}
"""Poolings by their names in older files: `pooling_mode_mean_tokens` and so on."""

_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFolder:
    """Contents of an encoder's folder, but for the weights."""

    config: BertConfig
    tokenizer: Path
    weights: Path | None
    max_tokens: int
    pooling: Pooling
    normalizes: bool
    """True if embeddings have length 1."""
    lowercases: bool
    """True if texts are lowercased before the tokenizer gets them."""
    prompt: str
    """Beginning of each text."""


class _Module(msgspec.Struct):
    type: str
    path: str = ""


class _Limits(msgspec.Struct):
    max_seq_length: int | None = None
    do_lower_case: bool = False


class _TokenizerConfig(msgspec.Struct):
    model_max_length: float = float("inf")


class _Prompts(msgspec.Struct):
    prompts: Mapping[str, str] = {}
    default_prompt_name: str | None = None


def read_folder(folder: Path) -> EncoderFolder:
    """Read a folder, but for its weights.

    Raises:
        ModelError: A file is missing or of an unknown kind.
    """
    if not folder.is_dir():
        raise ModelError(f"there is no folder {folder} (looked for from {Path.cwd()})")
    modules = _read(folder / "modules.json", list[_Module]) or [_Module(type="Transformer")]
    paths = {module.type.rpartition(".")[2]: folder / module.path for module in modules}
    if unknown := [kind for kind in paths if kind not in ("Transformer", "Pooling", "Normalize")]:
        raise ModelError(f"{folder}/modules.json has a module {unknown[0]}, which is not known")
    root = paths.get("Transformer", folder)
    config = _read(root / "config.json", BertConfig)
    if config is None:
        raise ModelError(f"{folder} has no config.json: an encoder is a folder that has one")
    if complaint := config.complaint():
        raise ModelError(f"{root}/config.json: {complaint}")
    tokenizer = root / "tokenizer.json"
    if not tokenizer.is_file():
        raise ModelError(f"{folder} has no tokenizer.json")
    limits = _read(root / "sentence_bert_config.json", _Limits) or _Limits()
    by_tokenizer = _read(root / "tokenizer_config.json", _TokenizerConfig) or _TokenizerConfig()
    prompts = _read(folder / "config_sentence_transformers.json", _Prompts) or _Prompts()
    return EncoderFolder(
        config=config,
        tokenizer=tokenizer,
        weights=next((root / name for name in _WEIGHTS if (root / name).is_file()), None),
        max_tokens=limits.max_seq_length
        or int(min(config.max_position_embeddings, by_tokenizer.model_max_length)),
        pooling=_pooling(paths["Pooling"] / "config.json") if "Pooling" in paths else "mean",
        normalizes="Normalize" in paths,
        lowercases=limits.do_lower_case,
        prompt=prompts.prompts.get(prompts.default_prompt_name or "", ""),
    )


def _pooling(path: Path) -> Pooling:
    fields = _read(path, dict[str, object]) or {}
    named = str(fields.get("pooling_mode"))
    prefix = "pooling_mode_"
    modes = [
        _POOLINGS.get(name.removeprefix(prefix), name)
        for name, is_on in fields.items()
        if name.startswith(prefix) and is_on is True
    ] or [named]
    for known in get_args(Pooling):
        if modes == [known]:
            pooling: Pooling = known
            return pooling
    raise ModelError(
        f"{path}: it pools by {' and '.join(modes)}; known are "
        f"{', '.join(get_args(Pooling))}, each alone"
    )


def _read(path: Path, type: type[_Read]) -> _Read | None:
    """Return the file as a value of a type; None if there is no file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=type)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
