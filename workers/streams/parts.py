"""Makes the JSON of a part from what a model yields. Worker processes only."""

import base64
import logging
from collections.abc import Mapping, Sequence
from typing import TypeGuard

from torch import Tensor

from inferpool.models.accelerator.failures import is_lost_device, raised
from inferpool.models.content import Content
from inferpool.models.errors import InputError
from inferpool.models.item import Features, Item
from inferpool.models.overrides import bad_return, is_overridden, rendering_of
from inferpool.models.texts import text_of
from inferpool.workers.inside.checks import BrokenPromiseError
from inferpool.workers.inside.compute import Computer
from inferpool.workers.inside.outcomes import (
    NotFiniteAnswerError,
    encoder,
    error_of,
    refusal_of,
)
from inferpool.workers.shared.messages import ItemError, ItemRef

logger = logging.getLogger(__name__)

MAX_PART_BYTES = 1 << 24
"""Largest part of a stream, as JSON."""


class PartMaker:
    """Maker of the parts of one model. Use it in the thread that computes."""

    def __init__(self, computer: Computer) -> None:
        model = computer.model
        self.step = "postprocess"
        """Method of the model that runs, or that failed."""
        self._model = model
        self._checks = computer.checks
        self._detail = computer.error_detail
        self._renders_values = is_overridden(model, "render")
        self._renders_in, self._render_batch = rendering_of(model)
        self._encode = encoder(are_finite=model.finite_outputs)

    def part_of(self, value: object, item: Item, ref: ItemRef) -> bytes | ItemError:
        """Return a part as JSON, or the error that its stream ends with; log what is no input's.

        Raises:
            torch.AcceleratorError: The device's context is lost.
        """
        try:
            return self.encoded(value, item)
        except raised() as error:
            if is_lost_device(error):
                raise
            if not isinstance(error, InputError) and (refusal := refusal_of(item)):
                return refusal
            if isinstance(error, NotFiniteAnswerError):
                logger.error("the model's %s", error, extra=ref.log_ids())
                return ItemError("non_finite_output", f"the model's {error}")
            return error_of(error, self.step, ref, self._detail)

    def encoded(self, value: object, item: Item) -> bytes:
        """Return a part as JSON.

        Raises:
            InputError: `render` refuses a parameter.
            NotFiniteAnswerError: It has NaN or an infinity in it.
            Exception: A method of the model raises, or the part cannot be sent.
        """
        shown = self._rendered(value, item)
        if isinstance(shown, Content):
            shown = _with_content(shown)
        try:
            text = self._encode(shown)
        except NotFiniteAnswerError as error:
            raise NotFiniteAnswerError(f"part of an {error}") from None
        except (TypeError, ValueError, RecursionError) as error:
            must, found = "a value that JSON can say", text_of(error)
            method = self.step if self.step.startswith("render") else "a part"
            if method == "a part":
                raise BrokenPromiseError(f"{method} must be {must}, got {found}") from None
            raise bad_return(self._model, method, must, found) from None
        if len(text) > MAX_PART_BYTES:
            raise BrokenPromiseError(
                f"a part has {len(text):,} bytes as JSON; at most {MAX_PART_BYTES:,} can be sent"
            )
        return text

    def _rendered(self, value: object, item: Item) -> object:
        if is_tensors(value):
            outputs = self.outputs_of(value)
            self.step = self._renders_in
            (shown,) = self._render_batch(outputs, [item.parameters])
        elif self._renders_values:
            self.step = "render"
            shown = self._model.render(value, item.parameters)  # type: ignore[arg-type]  # a part may be any value, which its own `render` reads
        else:
            self.step = "a part"
            return value
        if isinstance(shown, InputError):
            raise shown
        return shown

    def outputs_of(self, part: Features) -> Features:
        """Return the outputs of a part, after `postprocess`.

        Raises:
            BrokenPromiseError: They are not those of a batch of one, or not as declared.
            NotFiniteAnswerError: They have NaN or an infinity in them.
        """
        self.step = "postprocess"
        outputs = self._model.postprocess({name: each.cpu() for name, each in part.items()})
        if self._checks.non_finite_rows(outputs, 1):
            raise NotFiniteAnswerError("output for this input has NaN or an infinity in it")
        return outputs


def _with_content(content: Content) -> object:
    """Return a content as it stands in JSON: its headers have no place there.

    Raises:
        BrokenPromiseError: It is none that can be sent.
    """
    if content.fault:
        raise BrokenPromiseError(content.fault)
    data = base64.b64encode(content.data).decode()
    return {"b64": data, "media_type": content.media_type}


def is_tensors(value: object) -> TypeGuard[Features]:
    """Return whether a part is a dict of tensors."""
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(each, Tensor) for each in value.values())
    )


def sizes_cut(sizes: Sequence[int], most: int) -> list[int]:
    """Return the lengths of runs of parts that are at most so large, or that have one part."""
    runs, left = [0], most
    for size in sizes:
        left -= size
        if left < 0 and runs[-1]:
            runs.append(0)
            left = most - size
        runs[-1] += 1
    return runs
