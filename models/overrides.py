"""Tells which methods of `Model` a user's class replaces, and where. Worker processes only."""

import inspect
from collections.abc import Callable, Sequence
from types import MethodType

from inferpool.models.attached import attached
from inferpool.models.base import Model
from inferpool.models.errors import BadReturnError
from inferpool.models.spec import Interface

_MOST_CLASSES = 1 << 15
"""More are no names of classes, and would burden each message about the model."""


def is_overridden(model: Model, method: str) -> bool:
    """Return whether a model replaces a method of `Model`."""
    own = inspect.unwrap(getattr(model, method))
    return getattr(own, "__func__", own) is not getattr(Model, method)


def rendering_of(model: Model) -> tuple[str, Callable[..., Sequence[object]]]:
    """Return the name of the method that renders, and a function that renders a batch with it.

    Of `render` and `render_batch` the one that is defined nearer to the model's class counts, and
    `render_batch` if one class defines both.
    """
    if _distance_of(model, "render") < _distance_of(model, "render_batch"):
        return "render", MethodType(Model.render_batch, model)
    is_own = is_overridden(model, "render_batch")
    return "render_batch" if is_own else "render", model.render_batch


def interface_of(model: Model, learned: Sequence[str] = ()) -> Interface:
    """Return how clients speak to a model; `learned` are media types that it has not declared."""
    labels = model.labels if isinstance(model.labels, (list, tuple)) else ()
    labels = labels if len(labels) <= _MOST_CLASSES else ()
    return Interface(
        media_types=attached("types of content")(model) if model.media_types else tuple(learned),
        accepts=model.accepts,
        form=model.form,
        envelope=model.envelope,
        path=model.path,
        streams=is_streaming(model),
        joins=model.joins,
        alone=model._streams_alone,
        labels=tuple(str(each).encode(errors="replace").decode() for each in labels),
        text=model.text,
        archive=model.archive,
    )


def is_streaming(model: Model) -> bool:
    """Return whether a model answers in parts: by its class's `stream`, or a generator."""
    if callable(getattr(type(model), "stream", None)):
        return True
    own = inspect.unwrap(model.forward)
    return inspect.isgeneratorfunction(own) or inspect.isasyncgenfunction(own)


def forward_can_run_ahead(model: Model) -> bool:
    """Return whether the class that defines `forward`, or one below it, says `can_run_ahead`."""
    for each in type(model).__mro__:
        if "can_run_ahead" in vars(each):
            return model.can_run_ahead
        if _defines(each, "forward"):
            return False
    return False


def place_of(model: Model, method: str) -> str:
    """Return where a method is defined, as "file:line"; empty if Python does not know."""
    own = inspect.unwrap(getattr(model, method))
    code = getattr(getattr(own, "__func__", own), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


def bad_return(model: Model, method: str, must: str, found: str) -> BadReturnError:
    """Return the error for a method that returned `found` where it must return `must`."""
    place = place_of(model, method)
    where = f" ({place})" if place else ""
    return BadReturnError(f"{method} must return {must}, got {found}{where}")


def _distance_of(model: Model, method: str) -> int:
    """Return how many classes lie between an object and the one that defines its method."""
    if method in vars(model):
        return -1
    for number, each in enumerate(type(model).__mro__):
        if _defines(each, method):
            return number
    raise AttributeError(method)


def _defines(owner: type, method: str) -> bool:
    """Return whether a class defines a method itself.

    Methods that a class inherits and `checked` has put on the class itself do not count.
    """
    return method in vars(owner) and bool(getattr(vars(owner)[method], "is_own_method", True))
