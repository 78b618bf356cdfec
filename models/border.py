"""Checks on the values that the methods of a user's model return. Worker processes only.

If a later step would fail on a value, a `BadReturnError` says so at once; it names the method, the
value and the place where the method is defined. Values that only the model's own methods pass to
each other are not checked.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from inferpool.models.attached import attached
from inferpool.models.base import Model
from inferpool.models.errors import BadReturnError, InputError
from inferpool.models.inputs import shape_text
from inferpool.models.item import Item
from inferpool.models.overrides import bad_return, is_overridden, is_streaming
from inferpool.models.spec import DTYPE_BYTES, TensorSpec, matches

_TENSORS = "a dict of tensors by name"
_OUTPUTS = f"{_TENSORS}, or of lists with a tensor for each instance"
_SPECS = ("inputs", "outputs", "preprocessed")


def checked(model: Model) -> Model:
    """Put checks around the methods that a model overrides.

    They replace the methods on the model's class, and check the returns of this one object. Methods
    of `Model` and attributes that are no plain functions stay as they are.
    """
    own, streams = type(model), is_streaming(model)
    checks: dict[str, Callable[..., object]] = {
        "preprocess": _Preprocessed(has_own_collate=is_overridden(model, "collate")),
        "bucket": _check_hashable,
        "collate": _check_there if streams or is_overridden(model, "forward") else _check_tensors,
        "forward": _check_streamed if streams else _named_computed,
        "postprocess": _named_outputs,
        "render_batch": _check_rendered,
        "warmup": _check_items,
        "samples": _check_items,
        "encoded_samples": _check_items,
        "load": _check_loaded,
    }
    for name, check in checks.items():
        method = inspect.getattr_static(own, name)
        if isinstance(method, FunctionType) and (name == "load" or is_overridden(model, name)):
            before = vars(own).get(name)  # of an object that was built before, maybe
            is_own = getattr(before, "is_own_method", before is not None)
            method = getattr(method, "checked_method", method)
            setattr(own, name, _checking(model, method, check, name, is_own=is_own))
    return model


def _checking(
    checked_one: Model,
    method: Callable[..., Any],
    check: Callable[..., object],
    name: str,
    *,
    is_own: bool,
) -> Callable[..., Any]:
    @wraps(method)
    def call(model: Model, *args: Any, **kwargs: Any) -> object:
        result = method(model, *args, **kwargs)
        if model is checked_one:
            changed = check(model, name, result, *args)
            return result if changed is None else changed
        return result

    call.checked_method = method  # type: ignore[attr-defined]  # functions may have attributes
    call.is_own_method = is_own  # type: ignore[attr-defined]
    return call


class _Preprocessed:
    """Compares the tensors of `preprocess` with those that the loaded model declares."""

    def __init__(self, *, has_own_collate: bool) -> None:
        self._has_own_collate = has_own_collate
        """The model's own `collate` accepts anything that `preprocess` returns."""
        self._specs: list[tuple[str, torch.dtype, TensorSpec]] | None = None

    def __call__(self, model: Model, method: str, features: object, *_: object) -> None:
        if not self._has_own_collate:
            _check_tensors(model, method, features)
        elif not isinstance(features, Mapping):
            _check_there(model, method, features)
            return
        assert isinstance(features, Mapping)
        if self._specs is None:
            specs = model.inputs if model.preprocessed is None else model.preprocessed
            self._specs = [(spec.name, getattr(torch, spec.dtype), spec) for spec in specs]
        for name, dtype, spec in self._specs:
            tensor = features.get(name)
            if tensor is None:
                names = ", ".join(map(repr, features)) or "an empty dict"
                raise bad_return(model, method, f"{name!r}, which `inputs` declares", names)
            if not isinstance(tensor, Tensor):
                continue
            if tensor.dtype is not dtype:
                found = str(tensor.dtype).removeprefix("torch.")
                must = f"{name!r} as {spec.dtype}, as `inputs` declares"
                raise bad_return(model, method, must, found)
            if spec.shape and not matches(tensor.shape, spec.instance_shape):
                # It follows from what the client sent, so the client gets the error.
                raise InputError(
                    f"{name!r}: expected shape {shape_text(spec)}, found {list(tensor.shape)}"
                )


def _check_there(model: Model, method: str, result: object, *_: object) -> None:
    """Check only that there is a value, since the model's own method gets it next."""
    if result is None or inspect.iscoroutine(result):
        raise bad_return(model, method, _TENSORS, _kind_of(result))


def _check_tensors(model: Model, method: str, result: object, *_: object) -> None:
    _check_each(model, method, result, lambda value: isinstance(value, Tensor))


def _named_computed(model: Model, method: str, result: object, *_: object) -> object:
    """Check that the values can be copied to the CPU; return them by name if they are not yet."""
    return _named(model, method, result, lambda value: hasattr(value, "cpu"))


def _check_streamed(model: Model, method: str, result: object, *_: object) -> None:
    """Check nothing: each part is, when it comes."""


def _named_outputs(model: Model, method: str, result: object, *_: object) -> object:
    if model.finite_outputs or not _renders_itself(model):
        return _named(model, method, result, lambda value: isinstance(value, Tensor))
    # Nothing else of ours looks at more than the shapes.
    return _named(model, method, result, lambda value: hasattr(value, "shape"))


def _named(
    model: Model, method: str, result: object, is_right: Callable[[object], bool]
) -> dict[str, Any] | None:
    """Return outputs in the form that workers use; None if they have it, as nearly all do."""
    if isinstance(result, Mapping) and all(map(is_right, result.values())):
        return None
    if not isinstance(result, Mapping | Tensor | list | tuple):
        raise bad_return(model, method, _OUTPUTS, _kind_of(result))
    try:
        found: dict[str, Any] = attached("named outputs")(result, model.outputs)
    except BadReturnError as error:
        raise bad_return(model, method, _OUTPUTS, str(error)) from None
    _check_each(
        model, method, found, lambda value: isinstance(value, list) or is_right(value), _OUTPUTS
    )
    return found


def _check_each(
    model: Model,
    method: str,
    result: object,
    is_right: Callable[[object], bool],
    must: str = _TENSORS,
) -> None:
    if not isinstance(result, Mapping):
        raise bad_return(model, method, must, _kind_of(result))
    for name, value in result.items():
        if not is_right(value):
            raise bad_return(model, method, must, f"{_kind_of(value)} as {name!r}")


def _renders_itself(model: Model) -> bool:
    return is_overridden(model, "render") or is_overridden(model, "render_batch")


def _check_hashable(model: Model, method: str, result: object, *_: object) -> None:
    try:
        hash(result)
    except TypeError:
        must = "something hashable, such as a number"
        raise bad_return(model, method, must, _kind_of(result)) from None


def _check_rendered(
    model: Model,
    method: str,
    result: object,
    outputs: object = None,
    parameters: Sequence[object] | None = None,
) -> None:
    if parameters is None:
        return  # the model's own call, with keywords
    must = f"a list of {len(parameters)} values, one for each instance"
    if not isinstance(result, Iterable) or isinstance(result, str | bytes | Mapping):
        raise bad_return(model, method, must, _kind_of(result))
    if isinstance(result, Sized) and len(result) != len(parameters):
        raise bad_return(model, method, must, f"{len(result)} of them")


def _check_items(model: Model, method: str, result: object, *_: object) -> None:
    must = "a list of inferpool.models.base.Item"
    if isinstance(result, Iterator):
        return  # to look at it would use it up
    if not isinstance(result, Iterable) or isinstance(result, str | bytes):
        raise bad_return(model, method, must, _kind_of(result))
    for each in result:
        if not isinstance(each, Item):
            raise bad_return(model, method, must, f"{_kind_of(each)} in it")


def _check_loaded(model: Model, method: str, result: object, *_: object) -> None:
    """Check that `load` has run, and the specs that the model declares now."""
    if inspect.iscoroutine(result):
        must = "None (the model keeps what it loads, as in `self.network = ...`)"
        raise bad_return(model, method, must, _kind_of(result))
    for name in _SPECS:
        _check_specs(model, name, getattr(model, name))


def _check_specs(model: Model, name: str, specs: object) -> None:
    if specs is None and name == "preprocessed":
        return
    place = f"{type(model).__module__}.{type(model).__qualname__}.{name}"
    like = 'such as [TensorSpec(name="x", dtype="float32", shape=(-1, 3))]'
    if not isinstance(specs, Collection) or isinstance(specs, str):
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
        if spec.batch_fault:
            raise BadReturnError(f"{place}: {spec.batch_fault}")
        if name == "outputs" and "." in spec.name:
            raise BadReturnError(f"{place}: the name {spec.name!r} must have no '.' in it")


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
