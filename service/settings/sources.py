"""Sources of models: their forms, and hints for a text that is not one."""

import difflib
import re
from collections.abc import Sequence

DEFAULT_SOURCE = "efficientnet_lite0"
BUILT_IN_SOURCES = (DEFAULT_SOURCE, "minilm_l6", "echo")
"""Sources that need neither a file nor a package of the user's."""
MODEL_FILE_SUFFIXES = (".pt2", ".pt", ".ts", ".torchscript")
_WEIGHT_FILE_SUFFIXES = (".pth", ".safetensors")
_SOURCE_FORMS = (
    f"{', '.join(BUILT_IN_SOURCES)}, torchvision:NAME, encoder:FOLDER, package.module:Class, "
    f"or a {', '.join(MODEL_FILE_SUFFIXES[:-1])} or {MODEL_FILE_SUFFIXES[-1]} file"
)
_TORCHVISION_NAME = re.compile(
    r"alexnet|googlenet|inception_v3|(wide_)?resnet\d+(_2)?|resnext\d+_\d+x\d+d|vgg\d+(_bn)?"
    r"|densenet\d+|squeezenet1_\d|mnasnet\d_\d+|mobilenet_v\w+|shufflenet_v2_\w+"
    r"|efficientnet_(b\d|v2_[sml])|convnext_\w+|regnet_[xy]_\w+|vit_[blh]_\d+|swin_\w+|maxvit_t"
)
"""The names of torchvision's classifiers. To import torchvision for them would take seconds."""


def is_source(text: str) -> bool:
    """Return whether a text has the form of a source, which may not exist."""
    if text in BUILT_IN_SOURCES or text.endswith(MODEL_FILE_SUFFIXES):
        return True
    kind, colon, name = text.partition(":")
    return bool(kind and colon and name)


def slug(source: str) -> str:
    """Return a name fit for URLs: "torchvision:resnet18" gives "resnet18"."""
    last = re.split(r"[:/\\]", source.rstrip("/"))[-1].lower()
    for suffix in MODEL_FILE_SUFFIXES:
        last = last.removesuffix(suffix)
    return re.sub(r"[^a-z0-9._-]+", "-", last).strip("._-")[:64] or "model"


def source_hint(text: str, candidates: Sequence[str]) -> str:
    """Return a hint about a text that was meant as a source, with the nearest of the candidates."""
    if text.endswith(_WEIGHT_FILE_SUFFIXES):
        return (
            "this is a file of weights: give the network as the source, and this file as --weights"
        )
    if text.endswith(".toml"):
        return f"this is a file of settings: use --config {text}"
    if _TORCHVISION_NAME.fullmatch(text.lower()):
        near = did_you_mean(text, candidates).removeprefix("did you mean ")
        return f"did you mean torchvision:{text.lower()}{' or ' + near.rstrip() if near else '?'}"
    return f"{did_you_mean(text, candidates)}a source is {_SOURCE_FORMS}"


def did_you_mean(text: str, candidates: Sequence[str]) -> str:
    """Return a question that names the nearest candidate, and a space; empty if none is near."""
    near = next(iter(difflib.get_close_matches(text, candidates, n=1)), None)
    return f"did you mean {near}? " if near else ""
