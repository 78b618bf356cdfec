"""The border to a user's model: checks what each of its methods returns. Worker processes only.

A method that returns something else than `Model` says raises a `BadReturnError` at once, which
names the method, what it returned and where it is defined. Without this, some later step of ours
would fail on it and be blamed.
"""

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from models.base import Item, Model
from models.errors import BadReturnError, InputError
from models.inputs import shape_text
from models.spec import DTYPE_BYTES, TensorSpec, matches

_SPECS = ("inputs", "outputs", "preprocessed")


def checked(model: Model) -> Model:
    """Put checks around the methods that a model overrides, for every caller.

    The object gets a subclass of its class. Methods of `Model` itself are left alone.
    """
    checks: dict[str, Callable[..., None]] = {
        "preprocess": _Preprocessed(),
        "bucket": _check_hashable,
        "collate": _check_tensors,
        "forward": _check_tensors,
        "postprocess": _check_tensors,
        "render_batch": _check_rendered,
        "warmup": _check_items,
        "samples": _check_items,
        "encoded_samples": _check_items,
    }
    own = type(model)
    methods = {
        name: _checking(getattr(own, name), check, name)
        for name, check in checks.items()
        if is_overridden(model, name)
    }
    methods["load"] = _checking(own.load, _check_loaded, "load")
    about = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    model.__class__ = types.new_class(
        own.__name__, (own,), {}, lambda to: to.update(about, **methods)
    )
    return model


def is_overridden(model: Model, method: str) -> bool:
    """Whether a model has a method of its own in the place of `Model`'s."""
    own = inspect.unwrap(getattr(model, method))
    return getattr(own, "__func__", own) is not getattr(Model, method)


def place_of(model: Model, method: str) -> str:
    """Where a method is defined, as "file:line"; empty where Python does not know."""
    own = inspect.unwrap(getattr(model, method))
    code = getattr(getattr(own, "__func__", own), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


def bad_return(model: Model, method: str, must: str, found: str) -> BadReturnError:
    """The error for a method that has returned the wrong thing.

    Args:
        model: Whose method it is.
        method: Its name.
        must: What it must return.
        found: What it returned.
    """
    place = place_of(model, method)
    where = f" ({place})" if place else ""
    return BadReturnError(f"{method} must return {must}, got {found}{where}")


def _checking(
    method: Callable[..., Any], check: Callable[..., None], name: str
) -> Callable[..., Any]:
    @wraps(method)
    def call(model: Model, *args: Any, **kwargs: Any) -> object:
        result = method(model, *args, **kwargs)
        check(model, name, result, *args)
        return result

    return call


class _Preprocessed:
    """Checks what `preprocess` yields against what the model declares, once it is loaded."""

    def __init__(self) -> None:
        self._specs: list[tuple[str, torch.dtype, TensorSpec]] | None = None

    def __call__(self, model: Model, method: str, features: object, *_: object) -> None:
        _check_tensors(model, method, features)
        assert isinstance(features, Mapping)
        if self._specs is None:
            specs = model.inputs if model.preprocessed is None else model.preprocessed
            self._specs = [(spec.name, getattr(torch, spec.dtype), spec) for spec in specs]
        for name, dtype, spec in self._specs:
            tensor = features.get(name)
            if tensor is None:
                names = ", ".join(map(repr, features)) or "an empty dict"
                raise bad_return(model, method, f"{name!r}, which `inputs` declares", names)
            if tensor.dtype is not dtype:
                found = str(tensor.dtype).removeprefix("torch.")
                must = f"{name!r} as {spec.dtype}, as `inputs` declares"
                raise bad_return(model, method, must, found)
            if spec.shape and not matches(tensor.shape, spec.instance_shape):
                # It follows from what the client sent, so the client is told.
                raise InputError(
                    f"{name!r}: expected shape {shape_text(spec)}, found {list(tensor.shape)}"
                )


def _check_tensors(model: Model, method: str, result: object, *_: object) -> None:
    must = "a dict of tensors by name"
    if not isinstance(result, Mapping):
        raise bad_return(model, method, must, _kind_of(result))
    for name, value in result.items():
        if not isinstance(value, Tensor):
            raise bad_return(model, method, must, f"{_kind_of(value)} as {name!r}")
        if not isinstance(name, str):
            raise bad_return(model, method, must, f"a name of type {type(name).__name__}")


def _check_hashable(model: Model, method: str, result: object, *_: object) -> None:
    try:
        hash(result)
    except TypeError:
        must = "something hashable, such as a number"
        raise bad_return(model, method, must, _kind_of(result)) from None


def _check_rendered(
    model: Model, method: str, result: object, outputs: object, parameters: Sequence[object]
) -> None:
    must = f"a list of {len(parameters)} values, one for each instance"
    if not isinstance(result, Sequence) or isinstance(result, str | bytes):
        raise bad_return(model, method, must, _kind_of(result))
    if len(result) != len(parameters):
        raise bad_return(model, method, must, f"{len(result)} of them")


def _check_items(model: Model, method: str, result: object, *_: object) -> None:
    must = "a list of models.base.Item"
    if not isinstance(result, Sequence) or isinstance(result, str | bytes):
        raise bad_return(model, method, must, _kind_of(result))
    for each in result:
        if not isinstance(each, Item):
            raise bad_return(model, method, must, f"{_kind_of(each)} in it")


def _check_loaded(model: Model, method: str, result: object, *_: object) -> None:
    """Check what `load` returned, and what the model declares now."""
    if result is not None:
        must = "None (the model keeps what it loads, as in `self.network = ...`)"
        raise bad_return(model, method, must, _kind_of(result))
    for name in _SPECS:
        _check_specs(model, name, getattr(model, name))


def _check_specs(model: Model, name: str, specs: object) -> None:
    if specs is None and name == "preprocessed":
        return
    place = f"{type(model).__module__}.{type(model).__qualname__}.{name}"
    like = 'such as [TensorSpec(name="x", dtype="float32", shape=(-1, 3))]'
    if not isinstance(specs, Sequence) or isinstance(specs, str):
        raise BadReturnError(f"{place} must be a list of specs {like}, not {_kind_of(specs)}")
    for spec in specs:
        if not isinstance(spec, TensorSpec):
            raise BadReturnError(f"{place} must be a list of specs {like}, not of {_kind_of(spec)}")
        if not isinstance(spec.name, str):
            raise BadReturnError(f"{place}: a name must be a string, not {spec.name!r}")
        if not isinstance(spec.dtype, str) or spec.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise BadReturnError(
                f"{place}: the dtype of {spec.name!r} must be one of {known}, not {spec.dtype!r}"
            )
        if not isinstance(spec.shape, Sequence) or not all(
            type(size) is int and size >= -1 for size in spec.shape
        ):
            raise BadReturnError(
                f"{place}: the shape of {spec.name!r} must be whole numbers, -1 for any length, "
                f"not {spec.shape!r}"
            )


def _kind_of(value: object) -> str:
    if value is None:
        return "None"
    if inspect.iscoroutine(value):
        value.close()  # or Python warns that nobody awaited it
        return "a coroutine (write `def`, not `async def`)"
    if inspect.isgenerator(value):
        return "a generator (it has a `yield` in it)"
    kind = type(value)
    module = kind.__module__.partition(".")[0]
    name = kind.__name__
    return f"{module}.{name}" if module in ("numpy", "PIL") else name
