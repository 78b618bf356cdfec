"""From the items of a batch to their outcomes, whatever some of them do. Runs in a worker process.

Preparation that fails, fails its own item. A forward pass that fails is halved until the items at
fault stand alone, so their neighbours succeed.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from models.base import Features, Item, Model
from models.errors import InputError
from workers.messages import ItemError, ItemRef, Outcome, TensorBlob

logger = logging.getLogger(__name__)

_MAX_MESSAGE_CHARS = 500
_POOL_PAYS_S = 0.0005
"""A preparation per item that is shorter than this is not worth a hand-over to another thread."""


@dataclass(slots=True, kw_only=True)
class Prepared:
    """A batch on its way: one entry per item in each list."""

    id: int
    refs: Sequence[ItemRef]
    items: list[Item]
    features: list[Features | None]
    outcomes: list[Outcome | None]
    batch: Features | None = None
    """The collated features of the `live` items, if they could be collated."""
    live: list[int] = field(default_factory=list)
    prepare_s: float = 0.0


class Computer:
    """Runs a loaded model on batches of items."""

    def __init__(self, model: Model, *, num_threads: int, pin_memory: bool) -> None:
        self._model = model
        self._pin_memory = pin_memory
        self._pool = ThreadPoolExecutor(num_threads, "prepare") if num_threads > 1 else None
        self._item_s = 0.0
        self._encode = msgspec.json.Encoder(enc_hook=_plain).encode

    def prepare(self, id: int, refs: Sequence[ItemRef], payloads: Sequence[memoryview]) -> Prepared:
        """Decode, transform and collate. May run while another batch is in `compute`."""
        began = time.monotonic()
        prepared = Prepared(
            id=id, refs=refs, items=[], features=[None] * len(refs), outcomes=[None] * len(refs)
        )
        for ref, payload in zip(refs, payloads, strict=True):
            prepared.items.append(
                Item(
                    kind=ref.kind,
                    payload=payload,
                    headers=ref.headers,
                    parameters=msgspec.json.decode(ref.parameters) if ref.parameters else None,
                )
            )
        if self._pool and len(refs) > 1 and self._item_s > _POOL_PAYS_S:
            list(self._pool.map(lambda i: self._prepare_some(prepared, (i,)), range(len(refs))))
        else:
            self._prepare_some(prepared, range(len(refs)))
            self._item_s = (time.monotonic() - began) / len(refs)
        prepared.live = [i for i, outcome in enumerate(prepared.outcomes) if outcome is None]
        try:
            prepared.batch = self._collate(prepared, prepared.live) if prepared.live else None
        except Exception:
            # Some of the items do not go together: `compute` finds out which.
            logger.debug("a batch of %d could not be collated", len(prepared.live), exc_info=True)
        prepared.prepare_s = time.monotonic() - began
        return prepared

    def compute(self, prepared: Prepared) -> list[Outcome]:
        """Run the model on what was prepared, and render the answers."""
        now = time.monotonic()
        live = [i for i in prepared.live if prepared.refs[i].deadline > now]
        if len(live) != len(prepared.live):
            prepared.batch = None
        if live:
            self._compute_some(prepared, live, prepared.batch)
        late = ItemError("deadline_exceeded", "the deadline passed before it was computed")
        return [late if outcome is None else outcome for outcome in prepared.outcomes]

    @torch.inference_mode()
    def _prepare_some(self, prepared: Prepared, indices: Iterable[int]) -> None:
        preprocess = self._model.preprocess
        for i in indices:
            if prepared.refs[i].deadline <= time.monotonic():
                prepared.outcomes[i] = ItemError(
                    "deadline_exceeded", "the deadline passed before it was prepared"
                )
                continue
            try:
                prepared.features[i] = preprocess(prepared.items[i])
            except Exception as error:
                prepared.outcomes[i] = _error_of(error, "preprocess", prepared.refs[i])

    def _collate(self, prepared: Prepared, indices: Sequence[int]) -> Features:
        chosen = [features for i in indices if (features := prepared.features[i]) is not None]
        with torch.inference_mode():
            batch = self._model.collate(chosen)
            if self._pin_memory:
                return {name: tensor.pin_memory() for name, tensor in batch.items()}
        return batch

    def _compute_some(self, prepared: Prepared, indices: list[int], batch: Features | None) -> None:
        try:
            self._compute_once(prepared, indices, batch)
            return
        except torch.OutOfMemoryError as error:  # before AcceleratorError: both are RuntimeErrors
            torch.cuda.empty_cache()
            failure: Exception = error
        except torch.AcceleratorError:
            raise  # the context is lost: this incarnation is over
        except Exception as error:
            failure = error
        if len(indices) == 1:
            prepared.outcomes[indices[0]] = _error_of(failure, "forward", prepared.refs[indices[0]])
            return
        logger.warning(
            "a batch of %d failed (%s): computing it in halves", len(indices), _describe(failure)
        )
        middle = len(indices) // 2
        self._compute_some(prepared, indices[:middle], None)
        self._compute_some(prepared, indices[middle:], None)

    def _compute_once(self, prepared: Prepared, indices: list[int], batch: Features | None) -> None:
        model = self._model
        with torch.inference_mode():
            outputs = model.forward(batch or self._collate(prepared, indices))
            outputs = model.postprocess({name: out.cpu() for name, out in outputs.items()})
            for name, output in outputs.items():
                if len(output) != len(indices):
                    raise RuntimeError(
                        f"the model returned {len(output)} rows of {name!r} "
                        f"for a batch of {len(indices)}"
                    )
            wants_json = [i for i in indices if not prepared.refs[i].wants_tensors]
            if wants_json:
                self._render(prepared, indices, wants_json, outputs)
            for row, i in enumerate(indices):
                if prepared.refs[i].wants_tensors:
                    prepared.outcomes[i] = [
                        blob_of(name, tensor[row]) for name, tensor in outputs.items()
                    ]

    def _render(
        self, prepared: Prepared, indices: list[int], wants_json: list[int], outputs: Features
    ) -> None:
        if len(wants_json) != len(indices):
            rows = [row for row, i in enumerate(indices) if not prepared.refs[i].wants_tensors]
            outputs = {name: tensor[rows] for name, tensor in outputs.items()}
        parameters = [prepared.items[i].parameters for i in wants_json]
        for i, value in zip(wants_json, self._model.render_batch(outputs, parameters), strict=True):
            if isinstance(value, InputError):
                prepared.outcomes[i] = _error_of(value, "render", prepared.refs[i])
            else:
                prepared.outcomes[i] = self._encode(value)


def blob_of(name: str, tensor: Tensor) -> TensorBlob:
    """Say one CPU tensor as bytes."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return TensorBlob(
        name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy().tobytes()
    )


def _plain(value: object) -> object:
    """What msgspec cannot say by itself, as plain values: tensors and NumPy scalars and arrays."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"the model rendered a {type(value).__name__}, which JSON has no form for")


def printable(text: str) -> str:
    """A text that can be encoded, whatever a path or a model put into it."""
    return text.encode("utf-8", "backslashreplace").decode()


def _error_of(error: Exception, step: str, ref: ItemRef) -> ItemError:
    if isinstance(error, InputError):
        return ItemError("invalid_input", printable(str(error))[:_MAX_MESSAGE_CHARS])
    extra = {"request_id": ref.request_id}
    logger.error("%s failed on an input: %s", step, _describe(error), exc_info=error, extra=extra)
    return ItemError("model_error", f"{step} raised {_describe(error)}")


def _describe(error: Exception) -> str:
    return printable(f"{type(error).__name__}: {error}")[:_MAX_MESSAGE_CHARS]
