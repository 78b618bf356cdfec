"""Converts a model's return values and errors to outcomes that a worker can send.

Outputs are checked for their number, names and size before any of them is copied, and the texts of
errors are limited before they are formatted. An instance that exceeds a limit fails alone.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from inferpool.models.accelerator.failures import lacks_resources
from inferpool.models.attached import attached
from inferpool.models.base import MAX_JSON_NUMBERS
from inferpool.models.errors import InputError
from inferpool.models.inputs import non_finite_input
from inferpool.models.item import Features, Item, Outputs
from inferpool.models.json_errors import first_in, placed
from inferpool.models.texts import described, name_of, text_of, traceback_of
from inferpool.workers.inside.checks import BrokenPromiseError
from inferpool.workers.shared.config import ErrorDetail
from inferpool.workers.shared.messages import (
    ContentBlob,
    ItemError,
    ItemRef,
    Outcome,
    Stored,
    TensorBlob,
)

logger = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 1 << 28
"""Largest answer to one instance; the front end needs memory for several copies of it."""
MAX_BATCH_BYTES = 1 << 29
"""Approximate limit of the answers to a batch in one message; it may reach twice as much."""
MAX_OUTPUTS = 1024
_MAX_NAME_CHARS = 256

Keep = Callable[[memoryview], bytes | Stored]
"""Function that copies the bytes of an output: the model may reuse its memory."""


class TensorOutputs:
    """Outputs of some instances of a batch, to be sent as tensors."""

    def __init__(self, outputs: Mapping[str, Tensor], num_rows: int) -> None:
        """Check that they can be sent.

        Raises:
            BrokenPromiseError: They cannot be sent.
        """
        if len(outputs) > MAX_OUTPUTS:
            raise BrokenPromiseError(
                f"the model returned {len(outputs):,} outputs; at most {MAX_OUTPUTS:,} can be sent"
            )
        plain = [(name, _plain_of(name, tensor)) for name, tensor in outputs.items()]
        self.row_bytes = sum(tensor.nbytes for _, tensor in plain) // max(1, num_rows)
        """Bytes of the outputs of one instance."""
        check_size(self.row_bytes)
        self._found = [
            (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:]), tensor)
            for name, tensor in plain
        ]

    def row(self, row: int, keep: Keep) -> list[TensorBlob]:
        """Copy the outputs of one instance."""
        # Do everything that may fail before `keep`: nobody would free what it stores.
        found = [
            (name, dtype, shape, _bytes_of(tensor[row]))
            for name, dtype, shape, tensor in self._found
        ]
        return [TensorBlob(name, dtype, shape, keep(data)) for name, dtype, shape, data in found]


def outgoing_of(outputs: Outputs, num_rows: int) -> TensorOutputs:
    """Check that the outputs of some instances can be sent as tensors, and return them.

    Raises:
        BrokenPromiseError: They cannot be sent.
    """
    outputs = {name: out for name, out in outputs.items() if not str(name).startswith("_")}
    has_lists = any(isinstance(output, list) for output in outputs.values())
    make = attached("lists to send") if has_lists else TensorOutputs
    outgoing: TensorOutputs = make(outputs, num_rows)
    return outgoing


def bounded(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Replace outcomes that are too much for one message by errors."""
    found: list[Outcome] = []
    left = MAX_BATCH_BYTES
    for outcome in outcomes:
        left -= _num_inline(outcome)
        if left >= 0:
            found.append(outcome)
            continue
        left += _num_inline(outcome)
        text = "the answers of its batch are too large to be sent together; try it again"
        found.append(ItemError("exhausted", text))
    return found


def check_size(num_bytes: int) -> None:
    """Check the size of an answer.

    Raises:
        BrokenPromiseError: It is too large to be sent.
    """
    if num_bytes > MAX_ANSWER_BYTES:
        raise BrokenPromiseError(
            f"the model's answer to one input has {num_bytes:,} bytes; at most "
            f"{MAX_ANSWER_BYTES:,} can be sent: return less in `postprocess`"
        )


def error_of(error: BaseException, step: str, ref: ItemRef, detail: ErrorDetail) -> ItemError:
    """Return the outcome for an error, and log it unless the input is to blame.

    Args:
        error: The error.
        step: Method of the model that raised it.
        ref: The instance.
        detail: Detail of the error in the answer.
    """
    if isinstance(error, InputError):
        return ItemError("invalid_input", text_of(error))
    logger.error(
        "%s failed on an input: %s", step, described(error), exc_info=error, extra=ref.log_ids()
    )
    if lacks_resources(error):
        text = f"the worker ran out of memory or descriptors in {step}; another try may succeed"
        return ItemError("exhausted", text)
    return ItemError("model_error", f"{step} raised {client_text(error, detail)}")


def refusal_of(item: Item, features: Features | None = None) -> ItemError | None:
    """Return the error for an item that failed if its client sent NaN or an infinity, else None.

    Nobody looks for them before: some models want them, and to search all tensors costs more than
    to compute a small network. For the features see `non_finite_input`.
    """
    if (found := non_finite_input(item, features)) is None:
        return None
    return ItemError("invalid_input", f"{found}: this model computes no answer from it")


def client_text(error: BaseException, detail: ErrorDetail) -> str:
    """Describe an exception of the model to a client, maybe a stranger."""
    if detail == "name":
        return f"{name_of(error)}; the service's log has the rest"
    return text_for(error, detail)


def text_for(error: BaseException, detail: ErrorDetail) -> str:
    """Return as much of an exception as clients may see."""
    match detail:
        case "name":
            return name_of(error)
        case "text":
            return described(error)
        case "traceback":
            return f"{described(error)}\n{traceback_of(error)}"


def plain_value(value: object) -> object:
    """Convert tensors, NumPy scalars and NumPy arrays to plain values for msgspec."""
    if not hasattr(value, "tolist"):
        hint = getattr(value, "json_hint", "which JSON has no form for")
        raise TypeError(f"a {type(value).__name__}, {hint}")
    num = value.numel() if isinstance(value, Tensor) else getattr(value, "size", 1)
    if num > MAX_JSON_NUMBERS:
        raise ValueError(f"a {type(value).__name__} of {num:,} numbers, too many for JSON")
    return value.tolist()


class NotFiniteAnswerError(Exception):
    """An answer has NaN or an infinity in it, which JSON has no form for."""


def encoder(*, are_finite: bool) -> Callable[[object], bytes]:
    """Return a function that renders answers as JSON.

    If these are to be finite, it raises `NotFiniteAnswerError` for one that is not. Else null
    stands in the place of NaN and infinities.
    """
    encode = msgspec.json.Encoder(enc_hook=plain_value).encode

    def encode_finite(value: object) -> bytes:
        text = encode(value)
        if b"null" in text and (found := _non_finite_in(value)):  # few have it, few are searched
            raise NotFiniteAnswerError(
                f"answer to this input has {found}, for which JSON has no form"
            )
        return text

    return encode_finite if are_finite else encode


def _non_finite_in(value: object) -> str | None:
    plain = msgspec.to_builtins(value, str_keys=True, enc_hook=_plain_or_none)
    found = first_in(plain, lambda each: isinstance(each, float) and not math.isfinite(each))
    return found and placed(*found)


def _plain_or_none(value: object) -> object:
    return None if isinstance(value, msgspec.Raw) else plain_value(value)


def _num_inline(outcome: Outcome) -> int:
    """Return the bytes of an answer that go into the message itself."""
    if isinstance(outcome, bytes):
        return len(outcome)
    if isinstance(outcome, ItemError):
        return 0
    blobs = [outcome] if isinstance(outcome, ContentBlob) else outcome
    return sum(len(blob.data) for blob in blobs if not isinstance(blob.data, Stored))


def _plain_of(name: str, tensor: Tensor) -> Tensor:
    """Return a dense tensor without pending conjugation or negation.

    Raises:
        BrokenPromiseError: It is sparse or quantized, or its name cannot be sent.
    """
    if not isinstance(name, str) or len(name) > _MAX_NAME_CHARS or _has_surrogates(name):
        raise BrokenPromiseError(
            f"the model returned an output named {str(name)[:80]!r}; a name must be a string of "
            f"at most {_MAX_NAME_CHARS} characters"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise BrokenPromiseError(
            f"the model returned {name!r} as a sparse or quantized tensor, which cannot be sent: "
            "`to_dense` or `dequantize` it in `postprocess`"
        )
    return tensor.resolve_conj().resolve_neg()


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.contiguous().reshape(-1)
    if flat.stride() != (1,):  # a single number counts as contiguous, with any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    data: memoryview = flat.view(torch.uint8).numpy().data
    return data


def _has_surrogates(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return True
    return False
