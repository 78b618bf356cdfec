"""Prepares the batches of a worker: decodes, transforms and collates. Runs in a worker process.

If the preparation of an item fails, only that item fails. Items that cannot be collated together
are computed in several groups. For an accelerator, batches are laid in pinned memory, and copied to
it while it computes the batch before.
"""

import logging
import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import msgspec
import torch
from torch import Tensor

from inferpool.models.accelerator.device import HandOver
from inferpool.models.accelerator.failures import is_lost_device, is_out_of_memory, raised
from inferpool.models.attached import attached
from inferpool.models.base import Model
from inferpool.models.errors import InputError
from inferpool.models.item import Features, Item
from inferpool.workers.inside.outcomes import MAX_BATCH_BYTES, error_of
from inferpool.workers.inside.pools import started_pool
from inferpool.workers.inside.staging import Launch, Staging
from inferpool.workers.shared.config import ErrorDetail
from inferpool.workers.shared.messages import ItemError, ItemRef, Outcome

logger = logging.getLogger(__name__)

_SAMPLE_REF = ItemRef("bytes", 0, 0, math.inf, request_id="canary")
"""Reference for the item of a canary; its payload is not in the arena."""
_POOL_PAYS_S = 0.0005
"""Least preparation time per item to use other threads: a hand-over costs time."""
_PARTS_PAY_S = 0.002
"""Least preparation time of a batch for an accelerator to use other threads for parts of it.
64 tensors of 600 KB take 0.9 ms if they are only looked at, 0.7 ms in 2 to 8 parts; 29 ms if
they are checked for NaN, 15 ms in 4 parts on 2 cores. On CPUs other threads would take cores from
the forward pass."""


@dataclass(slots=True)
class ShapeGroup:
    """Instances of a batch that are computed together."""

    indices: list[int]
    batch: Features | None
    """Collated features; None if they could not be collated."""
    launch: Launch | None = None
    """Its computation on an accelerator, if it was launched."""
    memory_class: object = None
    """Names, dtypes and sizes that its memory depends on; None while nobody needs to know."""

    def classify(self, features: Sequence[Features | None], batch: Features | None = None) -> None:
        """Find the memory class, from the collated batch as long as it is there."""
        if self.memory_class is not None:
            return
        batch = self.batch if batch is None else batch
        if batch is not None:
            self.memory_class = _look_of(batch, lambda x: (x.dtype, _rounded(x.shape[1:])))
        else:
            first = features[self.indices[0]]
            self.memory_class = _look_of(first, lambda x: (x.dtype, _rounded(x.shape)))


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
    release: Callable[[Sequence[Callable[[], bool]]], None] | None = None
    """Set if its features lie in memory of a part, and called once it is computed. Each of the
    functions returns whether the device is done with copies from there."""
    handed_over: HandOver | None = None
    """Moment at which all that its preparation puts on the device is there; None on CPUs."""
    device_s: float = 0.0
    """The device's time for what was launched of it."""


class Preparer:
    """Prepares the batches of a loaded model. Its callers are in torch's inference mode.

    Several threads may prepare a batch each.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_threads: int,
        staging: Staging | None,
        error_detail: ErrorDetail,
        pool_pays_s: float = _POOL_PAYS_S,
        parts_pay_s: float = _PARTS_PAY_S,
    ) -> None:
        """Start the threads.

        Args:
            model: The model.
            num_threads: Number of preparations that may run at once.
            staging: The way to the accelerator; None if batches stay on the host.
            error_detail: Detail of the model's exceptions in answers.
            pool_pays_s: Least seconds per item to have another thread prepare each.
            parts_pay_s: Least seconds of a batch for an accelerator to share it among threads.
        """
        self._model = model
        self._staging = staging
        self._error_detail = error_detail
        self._cut = attached("cut by tokens")(model) if model._runtime.max_batch_tokens else None
        self._errors: Any = None
        """The `PreprocessErrors`; the first error makes them."""
        # Its threads share the OpenMP threads of this one: 8 with 16 each took 64 ms to check 64
        # tensors of 600 KB for NaN (16 cores, with an H200).
        self._pool = (
            started_pool(num_threads, "prepare", shares_openmp=True) if num_threads > 1 else None
        )
        self.num_threads = num_threads
        self._pool_pays_s, self._parts_pay_s = pool_pays_s, parts_pay_s
        self._item_s = 0.0

    def prepare(
        self, prepared: Prepared, preprocess: Callable[[Prepared], None] | None = None
    ) -> Prepared:
        """Decode, transform and collate. May run while another batch is computed.

        Args:
            prepared: The batch, before any preparation.
            preprocess: Decodes and transforms all its items; by default here and in the threads.
        """
        prepared.began = time.monotonic()
        preprocess = preprocess or self.preprocess
        if self._staging is None:
            preprocess(prepared)
            self._group(prepared)
        else:
            there = self._staging.there
            with there.in_use():
                preprocess(prepared)
                self._group(prepared)
                prepared.handed_over = there.mark()
        prepared.prepare_s = time.monotonic() - prepared.began
        return prepared

    def group(self, prepared: Prepared) -> None:
        """Collate what is preprocessed already."""
        self.prepare(prepared, lambda _: None)

    def prepare_sample(self, id: int, sample: Item | None) -> Prepared:
        """Prepare a canary: a sample of the model, or nothing if it has none."""
        prepared = (
            _prepared(id, [], []) if sample is None else _prepared(id, [_SAMPLE_REF], [sample])
        )
        prepared.is_canary = True
        return self.prepare(prepared)

    def collate(self, prepared: Prepared, indices: Sequence[int]) -> Features:
        """Collate some instances to one batch."""
        chosen = [features for i in indices if (features := prepared.features[i]) is not None]
        prepared.step = "collate"
        batch = self._model.collate(chosen)
        if self._staging is not None and isinstance(batch, Mapping):
            return self._staging.stage(batch)
        return batch

    def _group(self, prepared: Prepared) -> None:
        if live := [i for i, outcome in enumerate(prepared.outcomes) if outcome is None]:
            if self._cut is not None:
                self._cut.rename(prepared.buckets, prepared.features, live)
            prepared.groups = grouped(
                live, prepared.features, prepared.buckets, partial(self.collate, prepared)
            )

    def preprocess(self, prepared: Prepared, indices: Sequence[int] | None = None) -> None:
        """Preprocess items, or all, in this thread, or in those of the pool if that pays."""
        indices = range(len(prepared.items)) if indices is None else indices
        num_items = len(indices)
        if self._pool is None:
            self.preprocess_here(prepared, indices)
        elif num_items > 1 and self._item_s > self._pool_pays_s:
            self._preprocess_apart(prepared, [(i,) for i in indices])
        elif self._staging is not None and num_items * self._item_s > self._parts_pay_s:
            num_parts = self.num_threads
            self._preprocess_apart(prepared, [indices[k::num_parts] for k in range(num_parts)])
        elif num_items:
            began = time.monotonic()
            self.preprocess_here(prepared, indices)
            self._item_s = (time.monotonic() - began) / num_items

    def _preprocess_apart(self, prepared: Prepared, parts: Iterable[Sequence[int]]) -> None:
        """Preprocess items in the threads of the pool, each part in one of them."""
        there = None if self._staging is None else self._staging.there

        def preprocess(indices: Sequence[int]) -> None:
            # What it puts on the device goes on the stream that the batch is handed over from.
            with torch.inference_mode(), there.in_use() if there else nullcontext():
                self.preprocess_here(prepared, indices)

        assert self._pool is not None
        for _ in self._pool.map(preprocess, parts):
            pass

    def preprocess_here(self, prepared: Prepared, indices: Iterable[int]) -> None:
        """Preprocess items in this thread, and find their buckets. Features that it has stay."""
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
            except raised() as error:
                if is_lost_device(error):
                    raise
                if self._errors is None:
                    self._errors = attached("errors of preprocess")(self._model, self._error_detail)
                prepared.outcomes[i] = outcome = (
                    self._errors.outcome_of(error, items[i], refs[i])
                    if step == "preprocess"
                    else error_of(error, step, refs[i], self._error_detail)
                )
                if isinstance(outcome, bytes):
                    prepared.num_bytes = MAX_BATCH_BYTES + 1  # then `bounded` counts it


def unprepared(id: int, refs: Sequence[ItemRef], payloads: Sequence[memoryview]) -> Prepared:
    """Return a received batch before any preparation."""
    items = [item_of(ref, payload) for ref, payload in zip(refs, payloads, strict=True)]
    return _prepared(id, refs, items)


def item_of(ref: ItemRef, payload: memoryview) -> Item:
    """Return an instance as its model sees it."""
    is_form, is_document = ref.kind == "fields", ref.kind == "document"
    return Item(
        kind="json" if is_form or is_document else ref.kind,
        payload=payload,
        headers=ref.headers,
        parameters=msgspec.json.decode(ref.parameters) if ref.parameters else {},
        is_document=is_document,
        is_form=is_form,
    )


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


def grouped(
    indices: Sequence[int],
    features: Sequence[Features | None],
    buckets: Sequence[Hashable],
    collate: Callable[[Sequence[int]], Features],
) -> list[ShapeGroup]:
    """Collate instances: all of a bucket together if possible, else similar ones.

    Similar means the same names, dtypes and ranks, since a model may pad shapes; if these cannot be
    collated either, the same shapes.

    Args:
        indices: Instances to group.
        features: Features of all instances of the batch.
        buckets: Return values of the model's `bucket` for all instances of the batch.
        collate: Makes one batch of some instances, or raises.
    """
    return [
        group
        for part in _alike(indices, buckets.__getitem__)
        for group in _collated(part, features, collate)
    ]


def _collated(
    indices: list[int],
    features: Sequence[Features | None],
    collate: Callable[[Sequence[int]], Features],
) -> list[ShapeGroup]:
    try:
        return [ShapeGroup(indices, collate(indices))]
    except raised() as error:
        if is_lost_device(error):
            raise
        # An input is at fault, and not the shapes. Those of encoded pictures all differ.
        is_for_halves = is_out_of_memory(error) or isinstance(error, InputError)
        logger.debug("%d instances could not be collated", len(indices), exc_info=True)
    if is_for_halves:
        return [ShapeGroup(indices, None)]  # to be halved
    for look_of in (_layout_of, _signature_of):
        parts = _alike(indices, lambda i: look_of(features[i]))  # noqa: B023 - called at once
        if len(parts) > 1:
            return [group for part in parts for group in _collated(part, features, collate)]
    return [ShapeGroup(indices, None)]


def _alike(indices: Iterable[int], name_of: Callable[[int], object]) -> list[list[int]]:
    """Group indices by name, in the order of each name's first index."""
    parts: dict[object, list[int]] = {}
    for i in indices:
        parts.setdefault(name_of(i), []).append(i)
    return list(parts.values())


def _rounded(shape: torch.Size) -> tuple[int, ...]:
    """Round sizes up to powers of two, so that texts of 60 and of 61 tokens count as alike."""
    return tuple(1 << (size - 1).bit_length() if size else 0 for size in shape)


def _signature_of(features: Features | None) -> object:
    return _look_of(features, lambda tensor: (tensor.dtype, tensor.shape))


def _layout_of(features: Features | None) -> object:
    return _look_of(features, lambda tensor: (tensor.dtype, tensor.dim()))


def _look_of(features: Features | None, of_tensor: Callable[[Tensor], object]) -> object:
    # A user's `preprocess` may return anything; errors are reported elsewhere.
    if not isinstance(features, Mapping):
        return type(features)
    return frozenset(
        (name, of_tensor(value) if _has_sizes(value) else type(value))
        for name, value in features.items()
    )


def _has_sizes(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and not value.is_nested
