"""Builds the model that the settings name as the source. Runs in worker processes only."""

import inspect
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from inferpool.models.accelerator.failures import raised
from inferpool.models.attached import (
    BUILT_IN_SOURCES,
    CARD_FILE,
    MODEL_FILE_SUFFIXES,
    SOURCES,
    WEIGHT_FILE_SUFFIXES,
    attached,
)
from inferpool.models.base import Model
from inferpool.models.errors import ModelError, SourceError
from inferpool.models.spec import DTYPE_BYTES, TensorSpec

_FORMS = (
    f"{', '.join(BUILT_IN_SOURCES)}, torchvision:NAME, encoder:FOLDER, reranker:FOLDER, "
    "package.module:Class, the folder of a training run or of transformers, or a file: .pt2 "
    "(torch.export, AOTInductor), .onnx, .skops, .mar (TorchServe), .pt, .ts or .torchscript "
    "(TorchScript)"
)
_OURS = {
    str(Path(__file__).with_name(name)) for name in ("classes.py", "importing.py", "registry.py")
}
_Built = TypeVar("_Built")


def build(source: str, weights: str | None, options: Mapping[str, object]) -> Model:
    """Build the model that a source names; `Model.load` then reads its weights.

    Args:
        source: `efficientnet_lite0`, `minilm_l6`, `echo`, `torchvision:NAME`, `encoder:FOLDER`,
            `reranker:FOLDER`, `transformers:FOLDER`, `package.module:Class` (a `Model`, or an
            `nn.Module` with a forward of tensors to tensors), the folder of a training run or of
            transformers, or a file's path.
        weights: "DEFAULT" for the source's own, a named weight of torchvision, a checkpoint's path,
            or None for random weights.
        options: Keyword arguments of the class. For networks and TorchScript, `inputs` and
            `outputs` declare the tensors; for archives too, `finite_outputs`, `repeatable` and
            `alone_as_in_batch` are those of `Model`.

    Raises:
        SourceError: The source names nothing that can be built; the message says what would.
        ModelError: The model cannot be built.
    """
    path = Path(source)
    prefix, colon, name = source.partition(":")
    if source in BUILT_IN_SOURCES:
        first = [attached("folder of minilm_l6")()] if source == "minilm_l6" else []
        return _built(source, first, source, weights, options)
    if os.path.isfile(path / CARD_FILE):  # never raises, for any text
        trained: Callable[..., Model] = attached(CARD_FILE)
        return construct(lambda: trained(path, weights=weights), options, source)
    if path.suffix in MODEL_FILE_SUFFIXES:
        if not path.is_file():
            raise SourceError(f"there is no file {path} (looked for from {Path.cwd()})")
        is_package = path.suffix == ".pt2" and attached("package of AOTInductor")(path)
        kind = "AOTInductor" if is_package else path.suffix
        return _built(kind, [path], str(path), weights, options)
    if form := attached("form of a folder")(path):
        prefix, name = form, source
    if path.suffix in WEIGHT_FILE_SUFFIXES:
        raise SourceError(
            f"{source} is a file of weights: name the network as the source, and this file as "
            "its weights"
        )
    if f"{prefix}:" in SOURCES and name:
        return _built(f"{prefix}:", [name], source, weights, options)
    if colon and prefix and name:
        users: Callable[..., Model] = attached("package.module:Class")
        return users(prefix, name, weights, options)
    if "/" in source:
        raise SourceError(attached("fault of a folder")(path))
    near = get_close_matches(source, BUILT_IN_SOURCES, 1)
    hint = f"did you mean {near[0]}?" if near else f"a source is {_FORMS}"
    raise SourceError(f"there is no source {source!r}: {hint}")


def construct(factory: Callable[..., _Built], options: Mapping[str, object], source: str) -> _Built:
    """Call a class with options.

    Raises:
        SourceError: It does not accept them, or it fails; the message has its line.
        ModelError: Raised by the class.
    """
    check_options(factory, options, source)
    try:
        return factory(**options)
    except ModelError:
        raise
    except raised() as error:  # a user's constructor may raise anything
        raise SourceError(f"{source} cannot be constructed: {last_line(error)}") from error


def check_options(
    factory: Callable[..., object], options: Mapping[str, object], source: str
) -> None:
    """Check that a class takes some options.

    Raises:
        SourceError: It does not; the message lists what it accepts.
    """
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


def specs_of(value: object, option: str) -> list[TensorSpec]:
    """Read specs from settings: `[{name, dtype, shape}]`, with the batch dimension first.

    Raises:
        SourceError: They are malformed.
    """
    try:
        specs = msgspec.convert(value, list[TensorSpec])
    except msgspec.ValidationError as error:
        raise SourceError(
            f"option {option!r} must be a list like "
            f'[{{name = "x", dtype = "float32", shape = [-1, 3]}}]: {error}'
        ) from None
    for spec in specs:
        if spec.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise SourceError(f"option {option!r}: no dtype {spec.dtype!r}; known are {known}")
        if spec.batch_fault:
            raise SourceError(f"option {option!r}: {spec.batch_fault}")
        if option == "outputs" and "." in spec.name:
            raise SourceError(f"option {option!r}: the name {spec.name!r} must have no '.' in it")
    return specs


def with_specs(options: Mapping[str, object]) -> dict[str, Any]:
    """Return options with the specs in them read: see `specs_of`."""
    return {
        name: specs_of(value, name) if name in ("inputs", "outputs") else value
        for name, value in options.items()
    }


def _built(
    name: str,
    first: Sequence[object],
    source: str,
    weights: str | None,
    options: Mapping[str, object],
) -> Model:
    """Build a model of ours, with weights if it has any."""
    factory: Callable[..., Model] = partial(attached(name), *first)
    if "weights" in inspect.signature(factory).parameters:
        factory = partial(factory, weights=weights)
    elif weights not in (None, "DEFAULT"):
        raise SourceError(f"{source} takes no weights, but was given {weights!r}")
    has_specs = "inputs" in inspect.signature(factory).parameters
    return construct(factory, with_specs(options) if has_specs else options, source)


def last_line(error: BaseException) -> str:
    """Return the error's last line, and the line of the user's code that raised it."""
    text = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError) and error.filename and os.path.isfile(error.filename):
        return f"{text} ({error.filename}:{error.lineno})"  # no frame runs what cannot be parsed
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename not in _OURS and "importlib" not in f.filename]
    return f"{text} ({own[-1].filename}:{own[-1].lineno})" if own else text
