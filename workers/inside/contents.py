"""Turns a model's `Content` into an outcome of a worker. Imported once a model returns one."""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence

from inferpool.models.accelerator.failures import lacks_resources, raised
from inferpool.models.base import Model
from inferpool.models.content import Content, bare_type, bare_types
from inferpool.models.errors import InputError, ModelError
from inferpool.models.item import Features
from inferpool.models.overrides import bad_return
from inferpool.models.texts import described
from inferpool.workers.inside.outcomes import MAX_ANSWER_BYTES
from inferpool.workers.shared.messages import ContentBlob, ItemError, ItemRef, Stored

logger = logging.getLogger(__name__)

_RenderBatch = Callable[[Features, Sequence[Mapping[str, object]]], Sequence[object]]


def outcome_of(
    value: object, keep: Callable[[memoryview], bytes | Stored], ref: ItemRef
) -> ContentBlob | ItemError:
    """Return the outcome for a `Content`; one that cannot be sent fails its instance alone.

    Args:
        value: What `render` returned.
        keep: Copies its bytes.
        ref: The instance, for the log.
    """
    if fault := fault_of(value):
        logger.error("render failed on an input: %s", fault, extra=ref.log_ids())
        return ItemError("model_error", f"render: {fault}")
    assert isinstance(value, Content)
    try:
        data = keep(memoryview(value.data).cast("B"))
    except raised() as error:
        logger.error("a Content cannot be kept: %s", described(error), extra=ref.log_ids())
        if lacks_resources(error):
            return ItemError("exhausted", "the worker ran out of memory with a Content")
        return ItemError("model_error", "the data of a Content cannot be copied")
    return ContentBlob(value.media_type, data, dict(value.headers))


def fault_of(value: object) -> str:
    """Return why a value cannot be sent as content; empty if it can."""
    if not isinstance(value, Content):
        return f"a {type(value).__name__}, which is no inferpool.Content"
    if value.fault:
        return value.fault
    num_bytes = memoryview(value.data).nbytes
    if num_bytes > MAX_ANSWER_BYTES:
        return f"a Content of {num_bytes:,} bytes; at most {MAX_ANSWER_BYTES:,} can be sent"
    return ""


def rendering_with(
    model: Model, render_batch: _RenderBatch, refs: Sequence[ItemRef]
) -> _RenderBatch:
    """Return a function that renders a batch, by `render_content` where a call prefers content.

    Args:
        model: A model that has this method.
        render_batch: Renders the others.
        refs: The instances of the batch.
    """

    def render(outputs: Features, parameters: Sequence[Mapping[str, object]]) -> Sequence[object]:
        values: list[object] = [None] * len(refs)
        others = [row for row, ref in enumerate(refs) if not ref.wants_content]
        if others:
            chosen = {name: tensor[others] for name, tensor in outputs.items()}
            rendered = render_batch(chosen, [parameters[row] for row in others])
            for row, value in zip(others, rendered, strict=True):
                values[row] = value
        for row, ref in enumerate(refs):
            if ref.wants_content:
                one = {name: tensor[row] for name, tensor in outputs.items()}
                try:
                    values[row] = model.render_content(one, parameters[row])
                except InputError as error:
                    values[row] = error
        return values

    return render


def shown_form(model: Model, value: object) -> tuple[tuple[str], object]:
    """Return a content's only media type, and a JSON value that differs where contents differ.

    Raises:
        BadReturnError: It cannot be sent.
    """
    if fault := fault_of(value):
        raise bad_return(model, "render", "a Content that can be sent", fault)
    assert isinstance(value, Content)
    digest = hashlib.sha256(value.data).hexdigest()
    return (bare_type(value.media_type),), [value.media_type, digest]


def declared_types(model: Model) -> tuple[str, ...]:
    """Return the media types that a model's class declares.

    Raises:
        ModelError: They are no media types.
    """
    try:
        return bare_types(model.media_types)
    except ValueError as error:
        own = type(model)
        raise ModelError(f"{own.__module__}.{own.__qualname__}.media_types {error}") from None
