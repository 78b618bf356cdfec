"""The instance that a model shows people to try, as JSON. Worker processes only."""

import base64
import logging
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch

from inferpool.models.attached import attached
from inferpool.models.base import Model
from inferpool.models.errors import BadReturnError
from inferpool.models.item import Item
from inferpool.models.overrides import bad_return, is_overridden
from inferpool.models.texts import described

logger = logging.getLogger(__name__)

MAX_EXAMPLE_BYTES = 16 * 1024
"""The longest example as JSON: `/health` carries it, and people copy it."""
_MAX_SAMPLE_BYTES = 200
"""A sample of the warm-up is shown only if it is no longer than this."""
_MUST = "an instance that JSON can say, or (bytes, content type)"


def reads_own_form(model: Model) -> bool:
    """Return whether the model reads a form of its own, which `inputs` may not describe."""
    return is_overridden(model, "preprocess") and model.preprocessed is None


class Example(NamedTuple):
    """An instance of the model's own."""

    item: Item | None
    """The instance as the model gets it; None if it cannot be read."""
    text: bytes
    """The instance as JSON."""


def own_example(model: Model) -> Example | None:
    """Return a loaded model's `example`; None if it has none.

    If it cannot be read, the log says why: the attribute may mean something else to the model.
    """
    try:
        return _read(model)
    except Exception as error:  # the model is the user's: it may raise anything
        logger.warning("the model's example is not shown: %s", described(error))
        return Example(None, b"")


def shown_example(model: Model, example: Example | None, samples: Sequence[Item]) -> bytes:
    """Return the example as JSON, else a short JSON sample of the warm-up, else nothing.

    An example that the model's own `preprocess` refuses is left out, and the log says why.
    """
    if example is None:
        return _short_sample(samples)
    item, text = example
    if item is None:
        return b""
    if len(text) > MAX_EXAMPLE_BYTES:
        logger.warning(
            "the model's example takes %d bytes as JSON and is not shown; at most %d are",
            len(text),
            MAX_EXAMPLE_BYTES,
        )
        return b""
    try:
        with torch.inference_mode():
            model.preprocess(item)
    except Exception as error:  # the model is the user's: it may raise anything
        logger.warning(
            "the model's own preprocess refuses its example, which is not shown: %s", error
        )
        return b""
    return text


def example_item(model: Model) -> Item | None:
    """Return a model's `example` as its `preprocess` would get it; None if it has none.

    Raises:
        Exception: It cannot be read.
    """
    found = _read(model)
    return found and found.item


def _read(model: Model) -> Example | None:
    """Return the example as the model would get it, and as JSON; None if there is none."""
    value = model.example() if callable(model.example) else model.example
    match value:
        case None:
            return None
        case (bytes() as data, str() as content_type):
            bare = content_type.partition(";")[0].strip().lower()
            if bare == "application/json":
                return Example(Item(kind="json", payload=memoryview(data)), data)
            if bare == "text/plain":
                text = msgspec.json.encode(data.decode("utf-8", "replace"))
                return Example(Item(kind="json", payload=memoryview(text)), text)
            if bare.startswith("image/") or bare == "application/octet-stream":
                item = Item(
                    kind="image" if bare.startswith("image/") else "bytes",
                    payload=memoryview(data),
                )
                text = msgspec.json.encode({"b64": base64.b64encode(data).decode()})
                return Example(item, text)
            types = "image/*, application/octet-stream, text/plain or application/json"
            raise BadReturnError(f"the content type of `example` must be {types}, not {bare!r}")
        case bytes():
            raise _bad(model, "bytes without a content type")
    is_form = isinstance(value, dict) and model.form == "instance"
    if is_form and (found := attached("example of form")(value)) is not None:
        return Example(*found)
    try:
        text = msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise _bad(model, f"{type(value).__name__}: {error}") from None
    if isinstance(value, str) and model.accepts:
        return Example(Item(kind=model.accepts, payload=memoryview(base64.b64decode(value))), text)
    item = Item(
        kind="json",
        payload=memoryview(text),
        is_document=not model.envelope,
        is_form=is_form,
    )
    return Example(item, text)


def _bad(model: Model, found: str) -> BadReturnError:
    if callable(model.example):
        return bad_return(model, "example", _MUST, found)
    return BadReturnError(f"{type(model).__qualname__}.example must be {_MUST}, not {found}")


def _short_sample(samples: Sequence[Item]) -> bytes:
    short = (
        each.payload.tobytes()
        for each in samples
        if each.kind == "json" and len(each.payload) <= _MAX_SAMPLE_BYTES
    )
    return next(short, b"")
