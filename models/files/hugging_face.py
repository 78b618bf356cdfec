"""Says what the network of a folder in Hugging Face's form is for. No torch.

`config.json` names the network's class: that of transformers for the task that it was trained for.
`modules.json` is that of sentence-transformers.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from inferpool.models.files.kinds import ARCHIVE_MANIFEST
from inferpool.models.files.reading import read_file

CONFIG_FILE = "config.json"
_MODULES_FILE = "modules.json"
_TOKENIZER_FILE = "tokenizer.json"
_PICTURES_FILE = "preprocessor_config.json"
Task = Literal["classification", "detection", "segmentation"]
_TASKS: dict[str, Task] = {
    "ForImageClassification": "classification",
    "ForObjectDetection": "detection",
    "ForSemanticSegmentation": "segmentation",
}
TEXT_SUFFIX = "ForSequenceClassification"
"""End of the names of networks that score texts, or pairs of texts."""
_ENCODER_SUFFIXES = ("Model", "ForMaskedLM", "ForPreTraining")
"""Ends of the names of networks that encode texts: they have no part for a task of their own."""
_GENERATOR_SUFFIX = "LMHeadModel"
"""End of the names of some networks that write texts; others end in `ForCausalLM`."""
_OF_OURS = ("BertModel", f"Bert{TEXT_SUFFIX}")
"""Networks that are served by our own code."""
FolderForm: TypeAlias = Literal["transformers", "encoder", "reranker", "torchserve"]
"""Prefix of the source that serves a folder."""


class _Config(msgspec.Struct):
    model_type: str | None = None
    architectures: Sequence[str] | None = None
    id2label: Mapping[str, Any] | None = None
    num_labels: int | None = None
    is_encoder_decoder: bool = False

    @property
    def num_classes(self) -> int:
        """The number of labels; transformers writes none if there are two of no names."""
        return len(self.id2label) if self.id2label else self.num_labels or 2


class _Module(msgspec.Struct):
    type: str


def architectures_of(folder: Path) -> Sequence[str]:
    """Return the classes that the folder's `config.json` names; none if it cannot be read."""
    return _config_of(folder).architectures or ()


def task_of(architecture: str) -> Task | None:
    """Return what a network of transformers for pictures is for; None if it is not for those."""
    found = (task for suffix, task in _TASKS.items() if architecture.endswith(suffix))
    return next(found, None)


def form_of(folder: Path) -> FolderForm | None:
    """Return how a folder is served if it is named as a source alone; None if it is not."""
    if os.path.isfile(folder / ARCHIVE_MANIFEST):  # which may have a config.json too
        return "torchserve"
    if "Pooling" in _modules_of(folder):
        return "encoder"
    config = _config_of(folder)
    names = config.architectures or ()
    if any(task_of(each) for each in names):
        return "transformers"
    if any(each.endswith(TEXT_SUFFIX) for each in names):
        return "reranker" if config.num_classes == 1 else "transformers"
    is_encoder = any(
        each.endswith(_ENCODER_SUFFIXES) and not each.endswith(_GENERATOR_SUFFIX) for each in names
    )
    if not is_encoder or config.is_encoder_decoder:
        return None
    # os.path's never raise, for any text.
    has_texts = os.path.isfile(folder / _TOKENIZER_FILE)
    return "encoder" if has_texts and not os.path.isfile(folder / _PICTURES_FILE) else None


def is_scorer(folder: Path) -> bool:
    """Return whether a folder has a network that scores texts."""
    return any(each.endswith(TEXT_SUFFIX) for each in architectures_of(folder))


def has_task(folder: Path) -> bool:
    """Return whether a folder has a network that `transformers:FOLDER` serves."""
    return is_scorer(folder) or any(task_of(each) for each in architectures_of(folder))


def needs_transformers(folder: Path) -> bool:
    """Return whether a served folder's network is one of the library transformers."""
    config = _config_of(folder)
    return config.model_type not in (None, "bert") or any(
        each not in _OF_OURS for each in config.architectures or ()
    )


def why_no_task(folder: Path) -> str:
    """Return why `transformers:FOLDER` does not serve a folder."""
    suffixes = ", ".join(f"*{suffix}" for suffix in (*_TASKS, TEXT_SUFFIX))
    served = f"served are networks of {suffixes}, and encoders of texts as encoder:FOLDER"
    return f"{_what_it_names(folder)}; {served}"


def why_no_reranker(folder: Path) -> str:
    """Return why `reranker:FOLDER` does not serve a folder; empty if it may."""
    if not is_scorer(folder):
        return f"{_what_it_names(folder)}; a reranker is a *{TEXT_SUFFIX} with one label"
    num = _config_of(folder).num_classes
    if num == 1:
        return ""
    return (
        f"{folder} has {num} labels, and a reranker has one: serve it as a classifier, "
        f"transformers:{folder}"
    )


def _what_it_names(folder: Path) -> str:
    if not os.path.isfile(folder / CONFIG_FILE):
        return f"{folder} has no {CONFIG_FILE}: a folder of transformers is one that has it"
    if _read(folder / CONFIG_FILE, _Config) is None:
        return f"{folder}/{CONFIG_FILE} cannot be read as the JSON of a configuration"
    found = architectures_of(folder)
    called = f"names {', '.join(found)}" if found else "names no class in `architectures`"
    return f"{folder}/{CONFIG_FILE} {called}"


def _config_of(folder: Path) -> _Config:
    return _read(folder / CONFIG_FILE, _Config) or _Config()


def _modules_of(folder: Path) -> list[str]:
    found = _read(folder / _MODULES_FILE, list[_Module]) or []
    return [each.type.rpartition(".")[2] for each in found]


def _read(path: Path, type: Any) -> Any:
    """Return the file as a value of a type; None if it cannot be read."""
    try:
        if not path.is_file():
            return None
        return msgspec.json.decode(read_file(path), type=type)
    except (OSError, ValueError, RecursionError):  # msgspec's are ValueErrors
        return None
