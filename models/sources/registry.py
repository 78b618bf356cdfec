"""Builds the model that the settings name as the source. Runs in worker processes only."""

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from torch import nn

from inferpool.models.base import Model
from inferpool.models.border import checked
from inferpool.models.errors import ModelError, SourceError
from inferpool.models.sources import importing
from inferpool.models.sources.modules import ModuleModel, specs_of

_BUILT_IN = ("efficientnet_lite0", "minilm_l6", "echo")
_FORMS = (
    "efficientnet_lite0, minilm_l6, echo, torchvision:NAME, encoder:FOLDER, package.module:Class, "
    "or a file: .pt2 (torch.export), .pt, .ts or .torchscript (TorchScript)"
)
_WRAPPER_OPTIONS = ("inputs", "outputs", "finite_outputs")
"""Options of `ModuleModel`; the others go to the user's network."""
_SCRIPT_SUFFIXES = (".pt", ".ts", ".torchscript")
_WEIGHT_SUFFIXES = (".pth", ".safetensors")

_Built = TypeVar("_Built")


def build(source: str, weights: str | None, options: Mapping[str, object]) -> Model:
    """Build the model that a source names; `Model.load` then reads its weights.

    Args:
        source: `efficientnet_lite0`, `minilm_l6`, `echo`, `torchvision:NAME`, `encoder:FOLDER`,
            `package.module:Class` (a `Model`, or an `nn.Module` whose forward takes and returns
            tensors), or an archive's path.
        weights: "DEFAULT" for the source's own, a named weight of torchvision, a checkpoint's path,
            or None for random weights.
        options: Keyword arguments of the class. For networks and TorchScript, `inputs` and
            `outputs`
            declare the tensors; all that take tensors allow NaN with `finite_outputs = false`.

    Raises:
        SourceError: The source names nothing that can be built; the message says what would.
        ModelError: The model cannot be built.
    """
    suffix = Path(source).suffix
    if source in _BUILT_IN:
        return _built_in(source, weights, options)
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

        return _construct(partial(TorchvisionClassifier, name, weights=weights), options, source)
    if prefix == "encoder" and name:
        from inferpool.models.text.encoder import SentenceEncoder

        return _construct(partial(SentenceEncoder, Path(name), weights=weights), options, source)
    if colon and prefix and name:
        return _users(prefix, name, weights, options)
    near = get_close_matches(source, _BUILT_IN, 1)
    hint = f"did you mean {near[0]}?" if near else f"a source is {_FORMS}"
    raise SourceError(f"there is no source {source!r}: {hint}")


def _built_in(source: str, weights: str | None, options: Mapping[str, object]) -> Model:
    if source == "echo":
        from inferpool.models.sources.echo import Echo

        _refuse_weights(source, weights)
        return _construct(Echo, options, source)
    if source == "minilm_l6":
        from inferpool.models.text.encoder import SentenceEncoder, packaged_folder

        encoder = partial(SentenceEncoder, packaged_folder(), weights=weights)
        return _construct(encoder, options, source)
    from inferpool.models.vision.efficientnet import EfficientNetLite0

    return _construct(partial(EfficientNetLite0, weights=weights), options, source)


def _archive(path: Path, weights: str | None, options: Mapping[str, object]) -> Model:
    from inferpool.models.sources.archives import ExportedModel, ScriptedModel

    if not path.is_file():
        raise SourceError(f"there is no file {path} (looked for from {Path.cwd()})")
    _refuse_weights(str(path), weights)
    if path.suffix == ".pt2":
        return _construct(partial(ExportedModel, path), options, str(path))
    return _construct(partial(ScriptedModel, path), _with_specs(options), str(path))


def _users(
    module_name: str, class_name: str, weights: str | None, options: Mapping[str, object]
) -> Model:
    source = f"{module_name}:{class_name}"
    found = _attribute(_import(module_name, class_name), class_name)
    if not isinstance(found, type):
        raise SourceError(
            f"{source} is no class: it must be a subclass of inferpool.Model or torch.nn.Module"
        )
    if not issubclass(found, Model | nn.Module):
        raise SourceError(f"{source} is no subclass of inferpool.Model or torch.nn.Module")
    checkpoint = None if weights == "DEFAULT" else weights
    if issubclass(found, nn.Module):
        specs = {k: v for k, v in options.items() if k in _WRAPPER_OPTIONS}
        rest = {k: v for k, v in options.items() if k not in specs}
        _check_options(found, rest, source)
        return ModuleModel(
            lambda: _construct(found, rest, source), weights=checkpoint, **_with_specs(specs)
        )
    if checkpoint is None:
        return checked(_construct(found, options, source))
    if "weights" not in inspect.signature(found).parameters:
        raise SourceError(
            f"{source} takes no weights: give its constructor a `weights` argument, or leave "
            "them out of the settings"
        )
    return checked(_construct(found, {"weights": checkpoint, **options}, source))


def _import(name: str, wanted: str) -> ModuleType:
    folder = os.getcwd()
    if folder not in sys.path:  # as `python -m` does
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        return importing.import_for_model(name, wanted)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise SourceError(f"module {name!r} fails on import: {_last_line(error)}") from error
        if name.endswith(".py"):
            module = name.removesuffix(".py").replace("/", ".")
            raise SourceError(f"a module is named without .py: {module}:CLASS") from error
        raise SourceError(
            f"there is no module {error.name!r}: it must be installed, or lie under {folder}"
            f"{_near_modules(error.name, folder)}"
        ) from error
    except (Exception, SystemExit) as error:  # a user's module may do anything
        raise SourceError(f"module {name!r} fails on import: {_last_line(error)}") from error


def _near_modules(name: str, folder: str) -> str:
    names = [path.stem for path in Path(folder).iterdir() if path.suffix == ".py" or path.is_dir()]
    near = get_close_matches(name, names)
    return f", which has {', '.join(near)}" if near else ""


def _attribute(module: ModuleType, name: str) -> object:
    try:
        found: object = attrgetter(name)(module)
    except AttributeError:
        classes = [n for n, value in vars(module).items() if isinstance(value, type)]
        own = [n for n in classes if getattr(module, n).__module__ == module.__name__]
        near = get_close_matches(name, classes) or own
        hint = f": it has {', '.join(near)}" if near else ", nor any class"
        raise SourceError(f"module {module.__name__!r} has no {name!r}{hint}") from None
    return found


def _construct(
    factory: Callable[..., _Built], options: Mapping[str, object], source: str
) -> _Built:
    _check_options(factory, options, source)
    try:
        return factory(**options)
    except ModelError:
        raise
    except Exception as error:  # a user's constructor may raise anything
        raise SourceError(f"{source} cannot be constructed: {_last_line(error)}") from error


def _check_options(
    factory: Callable[..., object], options: Mapping[str, object], source: str
) -> None:
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        taken = [
            p.name
            for p in inspect.signature(factory).parameters.values()
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "weights"
        ]
        knows = f"it takes {', '.join(taken)}" if taken else "it takes none"
        raise SourceError(f"{source} does not take these options: {error}; {knows}") from None


def _with_specs(options: Mapping[str, object]) -> dict[str, Any]:
    return {
        name: specs_of(value, name) if name in ("inputs", "outputs") else value
        for name, value in options.items()
    }


def _refuse_weights(source: str, weights: str | None) -> None:
    if weights not in (None, "DEFAULT"):
        raise SourceError(f"{source} takes no weights, but was given {weights!r}")


def _last_line(error: BaseException) -> str:
    """Return the error's last line, and the line of the user's code that raised it."""
    text = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError) and error.filename and os.path.isfile(error.filename):
        return f"{text} ({error.filename}:{error.lineno})"  # no frame runs what cannot be parsed
    frames = traceback.extract_tb(error.__traceback__)
    ours = (__file__, importing.__file__)
    own = [f for f in frames if f.filename not in ours and "importlib" not in f.filename]
    return f"{text} ({own[-1].filename}:{own[-1].lineno})" if own else text
