"""Builds the model that the settings name as the source. Runs in worker processes only."""

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from inferpool.models.base import Model
from inferpool.models.border import checked
from inferpool.models.errors import SourceError
from inferpool.models.files.run_folder import is_run, why_no_run
from inferpool.models.sources.classes import check_options, construct, find_class
from inferpool.models.sources.modules import ModuleModel, specs_of

_BUILT_IN = ("efficientnet_lite0", "minilm_l6", "echo")
_FORMS = (
    "efficientnet_lite0, minilm_l6, echo, torchvision:NAME, encoder:FOLDER, package.module:Class, "
    "the folder of a training run, or a file: .pt2 (torch.export), .pt, .ts or .torchscript "
    "(TorchScript)"
)
_WRAPPER_OPTIONS = ("inputs", "outputs", "finite_outputs", "repeatable", "alone_as_in_batch")
"""Options of `ModuleModel`; the others go to the user's network."""
_SCRIPT_SUFFIXES = (".pt", ".ts", ".torchscript")
_WEIGHT_SUFFIXES = (".pth", ".safetensors")


def build(source: str, weights: str | None, options: Mapping[str, object]) -> Model:
    """Build the model that a source names; `Model.load` then reads its weights.

    Args:
        source: `efficientnet_lite0`, `minilm_l6`, `echo`, `torchvision:NAME`, `encoder:FOLDER`,
            `package.module:Class` (a `Model`, or an `nn.Module` whose forward takes and returns
            tensors), the folder of a training run, or an archive's path.
        weights: "DEFAULT" for the source's own, a named weight of torchvision, a checkpoint's path,
            or None for random weights.
        options: Keyword arguments of the class. For networks and TorchScript, `inputs` and
            `outputs` declare the tensors; for archives too, `finite_outputs`, `repeatable` and
            `alone_as_in_batch` are those of `Model`.

    Raises:
        SourceError: The source names nothing that can be built; the message says what would.
        ModelError: The model cannot be built.
    """
    suffix = Path(source).suffix
    if source in _BUILT_IN:
        return _built_in(source, weights, options)
    if is_run(Path(source)):
        return _trained(source, weights, options)
    if suffix == ".pt2" or suffix in _SCRIPT_SUFFIXES:
        return _archive(Path(source), weights, options)
    if suffix in _WEIGHT_SUFFIXES:
        raise SourceError(
            f"{source} is a file of weights: name the network as the source, and this file as "
            "its weights"
        )
    prefix, colon, name = source.partition(":")
    if prefix == "torchvision" and name:
        from inferpool.models.vision.zoo import TorchvisionClassifier

        return construct(partial(TorchvisionClassifier, name, weights=weights), options, source)
    if prefix == "encoder" and name:
        from inferpool.models.text.encoder import SentenceEncoder

        return construct(partial(SentenceEncoder, Path(name), weights=weights), options, source)
    if colon and prefix and name:
        return _users(prefix, name, weights, options)
    if "/" in source:
        raise SourceError(why_no_run(Path(source)))
    near = get_close_matches(source, _BUILT_IN, 1)
    hint = f"did you mean {near[0]}?" if near else f"a source is {_FORMS}"
    raise SourceError(f"there is no source {source!r}: {hint}")


def _built_in(source: str, weights: str | None, options: Mapping[str, object]) -> Model:
    if source == "echo":
        from inferpool.models.sources.echo import Echo

        _refuse_weights(source, weights)
        return construct(Echo, options, source)
    if source == "minilm_l6":
        from inferpool.models.text.encoder import SentenceEncoder, packaged_folder

        encoder = partial(SentenceEncoder, packaged_folder(), weights=weights)
        return construct(encoder, options, source)
    from inferpool.models.vision.efficientnet import EfficientNetLite0

    return construct(partial(EfficientNetLite0, weights=weights), options, source)


def _trained(source: str, weights: str | None, options: Mapping[str, object]) -> Model:
    from inferpool.models.sources.trained import TrainedClassifier

    return construct(lambda: TrainedClassifier(Path(source), weights=weights), options, source)


def _archive(path: Path, weights: str | None, options: Mapping[str, object]) -> Model:
    from inferpool.models.sources.archives import ExportedModel, ScriptedModel

    if not path.is_file():
        raise SourceError(f"there is no file {path} (looked for from {Path.cwd()})")
    _refuse_weights(str(path), weights)
    if path.suffix == ".pt2":
        return construct(partial(ExportedModel, path), options, str(path))
    return construct(partial(ScriptedModel, path), _with_specs(options), str(path))


def _users(
    module_name: str, class_name: str, weights: str | None, options: Mapping[str, object]
) -> Model:
    source = f"{module_name}:{class_name}"
    found = find_class(module_name, class_name)
    if not issubclass(found, Model | nn.Module):
        raise SourceError(f"{source} is no subclass of inferpool.Model or torch.nn.Module")
    checkpoint = None if weights == "DEFAULT" else weights
    if issubclass(found, nn.Module):
        specs = {k: v for k, v in options.items() if k in _WRAPPER_OPTIONS}
        rest = {k: v for k, v in options.items() if k not in specs}
        check_options(found, rest, source)
        return ModuleModel(
            lambda: construct(found, rest, source), weights=checkpoint, **_with_specs(specs)
        )
    if checkpoint is None:
        return checked(construct(found, options, source))
    if "weights" not in inspect.signature(found).parameters:
        raise SourceError(
            f"{source} takes no weights: give its constructor a `weights` argument, or leave "
            "them out of the settings"
        )
    return checked(construct(found, {"weights": checkpoint, **options}, source))


def _with_specs(options: Mapping[str, object]) -> dict[str, Any]:
    return {
        name: specs_of(value, name) if name in ("inputs", "outputs") else value
        for name, value in options.items()
    }


def _refuse_weights(source: str, weights: str | None) -> None:
    if weights not in (None, "DEFAULT"):
        raise SourceError(f"{source} takes no weights, but was given {weights!r}")
