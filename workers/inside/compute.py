"""Computes the outcomes of a batch, so that an item at fault fails alone. Runs in a worker process.

If the preparation of an item fails, only that item fails. Items that cannot be collated together
are computed in several groups. If a forward pass fails, or its outputs are not what the model
declares, the group is halved until the items at fault are alone, so that the others succeed.
"""

import logging
import math
import time
from asyncio import CancelledError
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import torch

from inferpool.models.accelerator.device import pinned, synchronize
from inferpool.models.accelerator.out_of_memory import is_out_of_memory
from inferpool.models.base import Model
from inferpool.models.border import bad_return, is_overridden
from inferpool.models.errors import InputError, ModelError
from inferpool.models.item import Features, Item
from inferpool.models.texts import described, text_of
from inferpool.workers.config import ErrorDetail
from inferpool.workers.inside.checks import BrokenPromiseError, OutputChecks
from inferpool.workers.inside.decoding import Decoding, MoreWork
from inferpool.workers.inside.outcomes import (
    MAX_BATCH_BYTES,
    TensorOutputs,
    bounded,
    check_size,
    client_text,
    error_of,
    plain_value,
)
from inferpool.workers.inside.pools import started_pool
from inferpool.workers.inside.shapes import ShapeGroup, grouped, signature_of
from inferpool.workers.inside.shortage import SafeSizes, release
from inferpool.workers.messages import ItemError, ItemRef, Outcome, Stored

logger = logging.getLogger(__name__)

_SAMPLE_REF = ItemRef("bytes", 0, 0, math.inf, request_id="canary")
"""Reference for the item of a canary, whose payload is not in the arena."""
_RAISED = (Exception, CancelledError)
"""Errors that fail an instance. `CancelledError` is no Exception, but asyncio code raises it."""
_CHEAP_BYTES = 1 << 16
"""JSON answers up to this size are not counted: no batch has enough of them to matter."""
_POOL_PAYS_S = 0.0005
"""Preparation time per item from which on other threads are used: a hand-over costs time."""


@dataclass(slots=True, kw_only=True)
class Prepared:
    """A prepared batch. Each list but `groups` has one entry per item."""

    id: int
    refs: Sequence[ItemRef]
    items: Sequence[Item]
    features: list[Features | None]
    buckets: list[Hashable]
    """Return values of the model's `bucket`: equal items are computed together."""
    outcomes: list[Outcome | None]
    groups: list[ShapeGroup] = field(default_factory=list)
    began: float = 0.0
    """Begin of its preparation."""
    prepare_s: float = 0.0
    is_canary: bool = False
    step: str = "collate"
    """Method of the model that is running, or that failed."""
    num_bytes: int = 0
    """Bytes of the answers so far."""
    decoding: Decoding | None = None
    """The part that decoders prepare, if there is one."""


class Computer:
    """Runner of a loaded model on batches. Its callers are in torch's inference mode."""

    def __init__(
        self,
        model: Model,
        *,
        num_threads: int,
        pin_memory: bool,
        sample: Item | None = None,
        on_progress: Callable[[], None] = lambda: None,
        keep: Callable[[memoryview], bytes | Stored] = bytes,
        error_detail: ErrorDetail = "name",
    ) -> None:
        """Take over a loaded model.

        Args:
            model: The model.
            num_threads: Number of preparations that may run at once.
            pin_memory: True if batches go to a GPU.
            sample: Item that canaries compute.
            on_progress: Called before each part but the first of a batch computed in parts.
            keep: Copies the bytes of an output, whose memory the model may reuse.
            error_detail: Detail of the model's exceptions in answers.
        """
        self._model = model
        self._pin_memory = pin_memory
        self._sample = sample
        self.on_progress = on_progress
        """See above. A loop that computes several batches at once replaces it."""
        self.give_decoders: Callable[[Sequence[ItemRef]], Decoding | None] | None = None
        """Gives the decoders of this worker, if it has some, what they can prepare of a batch."""
        self._keep = keep
        self._error_detail = error_detail
        self._is_sample_finite: bool | None = None
        self._checks = OutputChecks(model)
        self._renders_in = "render_batch" if is_overridden(model, "render_batch") else "render"
        self._safe_sizes = SafeSizes()
        self._pool = started_pool(num_threads, "prepare") if num_threads > 1 else None
        self._item_s = 0.0
        self._encode = msgspec.json.Encoder(enc_hook=plain_value).encode

    def warm_up(self, samples: Sequence[Item], sizes: Sequence[int]) -> float:
        """Compute batches of samples in some sizes.

        Returns:
            Seconds of the longest batch, including the preparation of its samples.

        Raises:
            ModelError: The outputs are not what the model declares.
        """
        model = self._model
        longest_s = 0.0
        with torch.inference_mode():
            began = time.monotonic()
            features = [model.preprocess(item) for item in samples]
            prepare_s = (time.monotonic() - began) / len(samples)
            for size in sizes:
                began = time.monotonic()
                batch = model.collate([features[i % len(features)] for i in range(size)])
                outputs = {name: out.cpu() for name, out in model.forward(batch).items()}
                outputs = dict(model.postprocess(outputs))
                try:
                    self._checks.check_shapes(outputs, size)
                except BrokenPromiseError as error:
                    raise ModelError(str(error)) from error
                longest_s = max(longest_s, prepare_s * size + time.monotonic() - began)
        return longest_s

    def prepare(self, id: int, refs: Sequence[ItemRef], payloads: Sequence[memoryview]) -> Prepared:
        """Decode, transform and collate. May run while another batch is in `compute`."""
        return self.finish(self.begin(id, refs, payloads))

    def begin(self, id: int, refs: Sequence[ItemRef], payloads: Sequence[memoryview]) -> Prepared:
        """Let decoders begin with a batch. `finish` prepares it, in the order of these calls."""
        items = [
            Item(
                kind=ref.kind,
                payload=payload,
                headers=ref.headers,
                parameters=msgspec.json.decode(ref.parameters) if ref.parameters else {},
            )
            for ref, payload in zip(refs, payloads, strict=True)
        ]
        prepared = _prepared(id, refs, items)
        if self.give_decoders is not None:
            prepared.decoding = self.give_decoders(refs)
        return prepared

    def finish(self, prepared: Prepared, more: MoreWork | None = None) -> Prepared:
        """Prepare a batch; `more` may begin the next while decoders have nothing else to do."""
        return self._prepare(prepared, time.monotonic(), more)

    def prepare_sample(self, id: int) -> Prepared:
        """Prepare a canary: the model's sample, or nothing if it has none."""
        sample = self._sample
        prepared = (
            _prepared(id, [], []) if sample is None else _prepared(id, [_SAMPLE_REF], [sample])
        )
        prepared.is_canary = True
        return self._prepare(prepared, time.monotonic())

    def judge_sample(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Return the error of a canary, if there is one.

        A good model may return NaN for a sample of zeros, so non-finite outputs count as an error
        only if an earlier canary had finite ones.
        """
        errors = [outcome for outcome in outcomes if isinstance(outcome, ItemError)]
        is_finite = not any(error.code == "non_finite_output" for error in errors)
        if self._is_sample_finite is None:
            self._is_sample_finite = is_finite
            if not is_finite:
                logger.warning("the model's output for a sample of its own is not finite")
        return [*errors] if is_finite or self._is_sample_finite else []

    def compute(self, prepared: Prepared) -> list[Outcome]:
        """Run the model on a prepared batch, and render the answers."""
        for number, group in enumerate(prepared.groups):
            if number:
                self.on_progress()
            self._compute_group(prepared, group)
        if prepared.decoding is not None:
            prepared.decoding.release()
        late = ItemError("deadline_exceeded", "the deadline passed before it was computed")
        outcomes = [late if outcome is None else outcome for outcome in prepared.outcomes]
        return bounded(outcomes) if prepared.num_bytes > MAX_BATCH_BYTES else outcomes

    def _prepare(self, prepared: Prepared, began: float, more: MoreWork | None = None) -> Prepared:
        prepared.began = began
        if prepared.decoding is None:
            self._preprocess_all(prepared, range(len(prepared.items)))
        else:
            self._preprocess_all(prepared, prepared.decoding.others)
            prepared.decoding.finish(more)
            decoded = prepared.decoding.store(prepared.features, prepared.outcomes)
            self._preprocess(prepared, decoded)
            self._preprocess_all(prepared, prepared.decoding.others)
        if live := [i for i, outcome in enumerate(prepared.outcomes) if outcome is None]:
            prepared.groups = grouped(
                live, prepared.features, prepared.buckets, partial(self._collate, prepared)
            )
        prepared.prepare_s = time.monotonic() - began
        return prepared

    def _preprocess_all(self, prepared: Prepared, indices: Sequence[int]) -> None:
        """Preprocess items in this thread, or in those of the pool if that pays."""
        num_items = len(indices)
        if self._pool and num_items > 1 and self._item_s > _POOL_PAYS_S:
            list(self._pool.map(partial(self._preprocess_apart, prepared), indices))
        elif num_items:
            began = time.monotonic()
            self._preprocess(prepared, indices)
            self._item_s = (time.monotonic() - began) / num_items

    def _preprocess_apart(self, prepared: Prepared, index: int) -> None:
        """Preprocess one item, in a thread of the pool."""
        with torch.inference_mode():
            self._preprocess(prepared, (index,))

    def _preprocess(self, prepared: Prepared, indices: Iterable[int]) -> None:
        preprocess, bucket = self._model.preprocess, self._model.bucket
        refs, items, features = prepared.refs, prepared.items, prepared.features
        for i in indices:
            if refs[i].deadline <= time.monotonic():
                prepared.outcomes[i] = ItemError(
                    "deadline_exceeded", "the deadline passed before it was prepared"
                )
                continue
            step = "preprocess"
            try:
                features[i] = found = features[i] or preprocess(items[i])
                step = "bucket"
                prepared.buckets[i] = name = bucket(found)
                hash(name)  # fail this item, not the batch, if it cannot be hashed
            except _RAISED as error:
                prepared.outcomes[i] = self._error_of(error, step, refs[i])

    def _collate(self, prepared: Prepared, indices: Sequence[int]) -> Features:
        chosen = [features for i in indices if (features := prepared.features[i]) is not None]
        prepared.step = "collate"
        batch = self._model.collate(chosen)
        if self._pin_memory and isinstance(batch, Mapping):
            return {name: pinned(value) for name, value in batch.items()}
        return batch

    def _compute_group(self, prepared: Prepared, group: ShapeGroup) -> None:
        live = _in_time(prepared, group.indices)
        if not live:
            return
        pieces = self._safe_sizes.split(live, prepared.features)
        is_whole = len(pieces[0]) == len(group.indices)
        for piece in pieces:
            if self._compute_some(prepared, piece, group if is_whole else None):
                self._safe_sizes.note_good(piece, prepared.features)

    def _compute_some(
        self, prepared: Prepared, indices: list[int], whole: ShapeGroup | None
    ) -> bool:
        """Compute some items; halve them while they fail together.

        Args:
            prepared: Their batch.
            indices: The items.
            whole: Their group, if they are all of it: it is collated already.

        Returns:
            True if each of them fitted into memory alone. An item that does not fit alone says
            nothing about how many others fit together.
        """
        batch: Features | None = None
        if whole is not None:
            # A batch that does not fit must not take up memory while it is halved.
            batch, whole.batch = whole.batch, None
        else:
            self.on_progress()
            indices = _in_time(prepared, indices)
            if not indices:
                return True
        is_shortage = False
        try:
            again = self._compute_once(prepared, indices, batch)
        except torch.AcceleratorError as error:
            if not is_out_of_memory(error):
                raise  # the context is lost: this worker must end
            is_shortage = True
            again = self._survive(prepared, indices, error)
        except _RAISED as error:
            is_shortage = is_out_of_memory(error)
            again = self._survive(prepared, indices, error)
        del batch
        if not again:
            return not is_shortage
        middle = len(again) // 2
        has_first_fitted = self._compute_some(prepared, again[:middle], None)
        has_second_fitted = self._compute_some(prepared, again[middle:], None)
        has_fitted = has_first_fitted and has_second_fitted
        if is_shortage and has_fitted:
            size = self._safe_sizes.note(signature_of(prepared.features[again[0]]), len(again))
            logger.warning("from now on at most %d inputs of this shape at once", size)
        return has_fitted

    def _survive(self, prepared: Prepared, indices: list[int], error: BaseException) -> list[int]:
        """Handle a failed computation; return the items to compute in halves.

        Raises:
            torch.AcceleratorError: The device's context is lost, even if the error was another.
        """
        is_shortage = is_out_of_memory(error)
        first = indices[0]
        if len(indices) == 1:
            failure = self._error_of(error, prepared.step, prepared.refs[first])
            if is_shortage:
                text = (
                    f"out of memory on this input alone: {client_text(error, self._error_detail)}"
                )
                failure = ItemError("model_error", text)
            prepared.outcomes[first] = failure
        else:
            text = "a batch of %d failed (%s): computing it in halves"
            logger.warning(text, len(indices), described(error))
        if is_shortage:
            release(error)
        else:
            synchronize()  # a library's error may hide that the context is lost
        return indices if len(indices) > 1 else []

    def _compute_once(
        self, prepared: Prepared, indices: list[int], batch: Features | None
    ) -> list[int]:
        """Compute some items together; return those that must be computed in halves."""
        model = self._model
        if batch is None:
            batch = self._collate(prepared, indices)
        prepared.step = "forward"
        outputs = model.forward(batch)
        del batch  # the following steps need the memory
        prepared.step = "postprocess"
        outputs = model.postprocess({name: out.cpu() for name, out in outputs.items()})
        self._checks.check_shapes(outputs, len(indices))
        if rows := self._checks.non_finite_rows(outputs):
            return self._leave_out(prepared, indices, rows, outputs)
        self._settle(prepared, indices, outputs)
        return []

    def _leave_out(
        self, prepared: Prepared, indices: list[int], rows: list[int], outputs: Features
    ) -> list[int]:
        """Answer the finite rows; return the others if there are several: one may spoil all."""
        good = [row for row in range(len(indices)) if row not in rows]
        if good:
            chosen = {name: tensor[good] for name, tensor in outputs.items()}
            self._settle(prepared, [indices[row] for row in good], chosen)
        if len(rows) > 1:
            return [indices[row] for row in rows]
        i = indices[rows[0]]
        extra = prepared.refs[i].log_ids()
        logger.error("the model's output for an input is not finite", extra=extra)
        prepared.outcomes[i] = ItemError(
            "non_finite_output", "the model's output for this input has NaN or an infinity in it"
        )
        return []

    def _settle(self, prepared: Prepared, indices: list[int], outputs: Features) -> None:
        if prepared.is_canary:  # nobody reads its answer, which may not be serialisable
            prepared.outcomes = [b""] * len(prepared.outcomes)
            return
        refs = prepared.refs
        as_tensors = [row for row, i in enumerate(indices) if refs[i].wants_tensors]
        if not as_tensors:
            self._render(prepared, indices, outputs)
            return
        if rest := [row for row, i in enumerate(indices) if not refs[i].wants_tensors]:
            chosen = {name: tensor[rest] for name, tensor in outputs.items()}
            self._render(prepared, [indices[row] for row in rest], chosen)
        outgoing = TensorOutputs(outputs, len(indices))
        prepared.num_bytes += outgoing.row_bytes * len(as_tensors)
        for row in as_tensors:
            i = indices[row]
            try:
                prepared.outcomes[i] = outgoing.row(row, self._keep)
            except Exception as error:
                # Fail it alone: to compute the others again would store their outputs twice.
                prepared.outcomes[i] = self._error_of(error, "postprocess", refs[i])

    def _render(self, prepared: Prepared, indices: list[int], outputs: Features) -> None:
        items, outcomes, encode = prepared.items, prepared.outcomes, self._encode
        prepared.step = self._renders_in
        values = self._model.render_batch(outputs, [items[i].parameters for i in indices])
        for i, value in zip(indices, values, strict=True):
            if isinstance(value, InputError):
                outcomes[i] = self._error_of(value, "render", prepared.refs[i])
                continue
            try:
                outcomes[i] = text = encode(value)
                if (size := len(text)) > _CHEAP_BYTES:
                    prepared.num_bytes += size
                    check_size(size)
            except (TypeError, ValueError, RecursionError) as error:
                must, found = "a value that JSON can say", text_of(error)
                wrong = bad_return(self._model, "render", must, found)
                outcomes[i] = self._error_of(wrong, "render", prepared.refs[i])
            except Exception as error:  # it is too large, or an object in it raises
                outcomes[i] = self._error_of(error, "render", prepared.refs[i])

    def _error_of(self, error: BaseException, step: str, ref: ItemRef) -> ItemError:
        return error_of(error, step, ref, self._error_detail)


def _prepared(id: int, refs: Sequence[ItemRef], items: Sequence[Item]) -> Prepared:
    num_items = len(refs)
    return Prepared(
        id=id,
        refs=refs,
        items=items,
        features=[None] * num_items,
        buckets=[None] * num_items,
        outcomes=[None] * num_items,
    )


def _in_time(prepared: Prepared, indices: Sequence[int]) -> list[int]:
    """Return the items whose deadline has not passed."""
    now = time.monotonic()
    return [i for i in indices if prepared.refs[i].deadline > now]
