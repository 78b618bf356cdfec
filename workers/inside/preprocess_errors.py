"""Finds the outcome of an instance whose `preprocess` raised. In worker processes and decoders.

Imported with the first such instance.
"""

import logging
from collections.abc import Mapping
from traceback import walk_tb

from inferpool.models.accelerator.failures import lacks_resources, raised
from inferpool.models.base import Model
from inferpool.models.errors import Answered, InputError
from inferpool.models.example import example_item
from inferpool.models.item import Item
from inferpool.models.json_errors import number_out_of_range
from inferpool.models.overrides import place_of
from inferpool.models.spec import Kind
from inferpool.models.texts import described, name_of
from inferpool.workers.inside.outcomes import check_size, encoder, error_of, refusal_of, text_for
from inferpool.workers.shared.config import ErrorDetail
from inferpool.workers.shared.messages import ItemError, ItemRef

logger = logging.getLogger(__name__)

_OF_JSON = (KeyError, IndexError, TypeError, ValueError, OverflowError)
"""Errors that code raises on JSON of another form than it expects."""
_OF_CLIENTS: Mapping[Kind, tuple[type[Exception], ...]] = {
    "json": _OF_JSON,
    "form": (*_OF_JSON, AttributeError),
}
"""Errors that `preprocess` raises on what a client sent. In a form, a text may be in the place of
an `Upload`, or the other way round."""
_MOST_WHOLE = 2.0**63
"""Larger numbers fit into no integer of torch."""


class PreprocessErrors:
    """Tells whether the client or the model is at fault where `preprocess` raises."""

    def __init__(self, model: Model, detail: ErrorDetail) -> None:
        self._model = model
        self._detail = detail
        self._encode = encoder(are_finite=model.finite_outputs)
        self._is_own: dict[tuple[str, str], bool] = {}
        """True for an error that the model's example raises too, by its type and its line."""

    def outcome_of(self, error: BaseException, item: Item, ref: ItemRef) -> bytes | ItemError:
        """Return the outcome for an item on which `preprocess` raised; log what is worth it."""
        if isinstance(error, Answered):
            return self._answer_of(error, ref)
        if not isinstance(error, InputError) and not lacks_resources(error):
            if refusal := refusal_of(item):
                return refusal
            if item.kind == "json" and (
                not isinstance(error, LookupError)  # which is about a name or a place
                and (found := number_out_of_range(item.payload, most_whole=_MOST_WHOLE))
            ):
                return ItemError("invalid_input", f"instance: {found} is out of range")
            expected = _OF_CLIENTS.get("form" if item.is_form else item.kind)
            is_of_client = expected is not None and isinstance(error, expected)
            if is_of_client and not self._is_models_own(error, item, ref):
                text = text_for(error, self._detail)
                return ItemError("unfit_input", f"instance: preprocess raised {text}")
        return error_of(error, "preprocess", ref, self._detail)

    def _answer_of(self, answered: Answered, ref: ItemRef) -> bytes | ItemError:
        if ref.wants_tensors:
            return ItemError("invalid_input", "this answer is JSON, and has no form as tensors")
        try:
            text = self._encode(answered.value)
            check_size(len(text))
        except raised() as error:
            return error_of(error, "preprocess", ref, self._detail)
        return text

    def _is_models_own(self, error: BaseException, item: Item, ref: ItemRef) -> bool:
        """Return whether the example raises the error too; log each type of each line once."""
        key = name_of(error), self._line_of(error)
        if key not in self._is_own:
            self._is_own[key] = is_own = self._example_raises(key)
            if not is_own:
                logger.warning(
                    "preprocess raised %s on a client's %s at %s; a %s of this line is not "
                    "logged again",
                    described(error),
                    "form" if item.kind == "form" else "JSON",
                    key[1],
                    key[0],
                    exc_info=error,
                    extra=ref.log_ids(),
                )
        return self._is_own[key]

    def _example_raises(self, key: tuple[str, str]) -> bool:
        try:
            item = example_item(self._model)
            if item is not None:
                self._model.preprocess(item)
        except raised() as error:
            return key == (name_of(error), self._line_of(error))
        return False

    def _line_of(self, error: BaseException) -> str:
        """Return the last line that ran in the file of the model's `preprocess`, as "file:line"."""
        file = place_of(self._model, "preprocess").rpartition(":")[0]
        lines = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
        own = [each for each in lines if each[0] == file]
        found, line = (own or lines or [(file, 0)])[-1]
        return f"{found}:{line}"
