"""Reads folders of text models in the Hugging Face layout. Runs in worker processes only.

`config.json`, the tokenizer and the weights are the transformers library's; `modules.json`, the
folders that it names and `sentence_bert_config.json` are those of sentence-transformers, in the
forms that its releases 2 to 6 write. Without them, the mean is used, as in that library.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from inferpool.models.errors import ModelError
from inferpool.models.files.reading import read_file

POOLINGS = ("mean", "cls", "max", "last", "weightedmean", "mean_sqrt_len_tokens")
"""Ways in which the vectors of tokens become one; see `models.text.pooling`."""
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Poolings of folders before release 5.4, in the order in which their vectors are joined
(`_LEGACY_POOLING_MODE_KWARGS` in sentence_transformer/modules/pooling.py)."""
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")
"""Activations of `Dense` by the last word of their names: classes of torch.nn."""

_Read = TypeVar("_Read")


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of config.json that say which network a folder has."""

    model_type: str
    architectures: Sequence[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFolder:
    """Files of a text model's folder."""

    path: Path
    root: Path
    """The folder with config.json, which may be one in `path`."""
    config: TextConfig
    tokenizer: Path
    weights: Path | None
    max_tokens: int | None
    """Most tokens of a text, if the folder says so."""
    lowercases: bool
    """True if texts are lowercased before the tokenizer gets them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayer:
    """A layer after the pooling: a folder with config.json and weights."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str
    """The name of a class of torch.nn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderHead:
    """Steps of sentence-transformers before and after the network."""

    poolings: tuple[str, ...] = ("mean",)
    """Names of `POOLINGS`; the vectors of several are joined."""
    pools_prompt: bool = True
    """False if tokens of the prompt do not count in the pooling."""
    layers: tuple[DenseLayer, ...] = ()
    normalizes: bool = False
    """True if embeddings have length 1."""
    prompts: Mapping[str, str]
    """Beginnings of texts by their names."""
    default_prompt: str = ""


class _Module(msgspec.Struct):
    type: str
    path: str = ""

    @property
    def kind(self) -> str:
        return self.type.rpartition(".")[2]


class _Limits(msgspec.Struct):
    max_seq_length: int | None = None
    do_lower_case: bool = False


class _TokenizerConfig(msgspec.Struct):
    model_max_length: float | None = None


class _Pooling(msgspec.Struct):
    pooling_mode: str | Sequence[str] | None = None
    include_prompt: bool = True


class _Dense(msgspec.Struct):
    in_features: int
    out_features: int
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"
    module_input_name: str = "sentence_embedding"
    module_output_name: str | None = None
    use_residual: bool = False


class _Prompts(msgspec.Struct):
    prompts: Mapping[str, str | None] = {}
    default_prompt_name: str | None = None


def read_folder(path: Path) -> TextFolder:
    """Find the files of a text model.

    Raises:
        ModelError: A file is missing or cannot be read.
    """
    if not path.is_dir():
        raise ModelError(f"there is no folder {path} (looked for from {Path.cwd()})")
    roots = [each.path for each in _modules(path) if each.kind == "Transformer"]
    root = path / (roots or [""])[0]
    config = _read(root / "config.json", TextConfig)
    if config is None:
        raise ModelError(f"{path} has no config.json: a model of texts is a folder that has one")
    tokenizer = root / "tokenizer.json"
    if not tokenizer.is_file():
        raise ModelError(
            f"{path} has no tokenizer.json: write it with transformers, "
            f'`AutoTokenizer.from_pretrained("{path}").save_pretrained("{path}")`'
        )
    limits = _read(root / "sentence_bert_config.json", _Limits) or _Limits()
    by_tokenizer = _read(root / "tokenizer_config.json", _TokenizerConfig) or _TokenizerConfig()
    longest = by_tokenizer.model_max_length
    # Tokenizers without a limit write 1e30.
    of_tokenizer = int(longest) if longest and longest < 1 << 31 else None
    return TextFolder(
        path=path,
        root=root,
        config=config,
        tokenizer=tokenizer,
        weights=next((root / name for name in _WEIGHTS if (root / name).is_file()), None),
        max_tokens=limits.max_seq_length or of_tokenizer,
        lowercases=limits.do_lower_case,
    )


def read_head(path: Path) -> EncoderHead:
    """Read what comes before and after the network of an encoder.

    Raises:
        ModelError: A file is missing or of an unknown kind.
    """
    poolings: tuple[str, ...] = ("mean",)
    pools_prompt, layers, normalizes = True, [], False
    for module in _modules(path):
        folder = path / module.path
        if module.kind not in _MODULES:
            raise ModelError(f"{path}/modules.json has a module {module.kind}, which is not known")
        if module.kind == "Pooling":
            poolings, pools_prompt = _pooling(folder / "config.json")
        if module.kind == "Dense":
            if normalizes:
                raise ModelError(f"{path}/modules.json has a Dense after Normalize: not known")
            layers.append(_dense(folder))
        normalizes = normalizes or module.kind == "Normalize"
    found = _read(path / "config_sentence_transformers.json", _Prompts) or _Prompts()
    prompts = {name: text or "" for name, text in found.prompts.items()}
    name = found.default_prompt_name
    if name and name not in prompts:
        raise ModelError(f"{path} has no prompt {name!r}, which is its default_prompt_name")
    return EncoderHead(
        poolings=poolings,
        pools_prompt=pools_prompt,
        layers=tuple(layers),
        normalizes=normalizes,
        prompts=prompts,
        default_prompt=prompts.get(name or "", ""),
    )


def _modules(path: Path) -> list[_Module]:
    return _read(path / "modules.json", list[_Module]) or [_Module(type="Transformer")]


def _pooling(path: Path) -> tuple[tuple[str, ...], bool]:
    fields = _read(path, _Pooling) or _Pooling()
    flags = _read(path, dict[str, object]) or {}
    found = fields.pooling_mode or [name for flag, name in _FLAGS.items() if flags.get(flag)]
    modes = [found] if isinstance(found, str) else found or ["mean"]
    poolings = tuple("last" if mode == "lasttoken" else mode for mode in modes)
    for each in poolings:
        if each not in POOLINGS:
            raise ModelError(f"{path}: it pools by {each!r}; known are {', '.join(POOLINGS)}")
    return poolings, fields.include_prompt


def _dense(folder: Path) -> DenseLayer:
    path = folder / "config.json"
    found = _read(path, _Dense)
    if found is None:
        raise ModelError(f"there is no file {path}, which describes a layer of modules.json")
    name = found.activation_function.rpartition(".")[2]
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ModelError(f"{path}: its activation is {name!r}; known are {known}")
    names = (found.module_input_name, found.module_output_name or found.module_input_name)
    if names != ("sentence_embedding", "sentence_embedding") or found.use_residual:
        raise ModelError(
            f"{path}: the layer reads {names[0]} and writes {names[1]}"
            f"{' with a residual' if found.use_residual else ''}; known are layers from "
            "sentence_embedding to sentence_embedding"
        )
    return DenseLayer(
        folder=folder,
        in_features=found.in_features,
        out_features=found.out_features,
        bias=found.bias,
        activation=name,
    )


def _read(path: Path, type: type[_Read]) -> _Read | None:
    """Return the file as a value of a type; None if there is no file."""
    try:
        return msgspec.json.decode(read_file(path), type=type)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:  # msgspec's are ValueErrors
        raise ModelError(f"{path} cannot be read: {error}") from error
