"""Compares a version with the one that serves: answers, outputs, time and memory.

Both compute each input alone, one after the other: first the answer as a client would get it, then
the output tensors. It goes before clients' inputs, or it would wait for ever behind a full queue;
there is never more than one.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from math import ceil, sqrt
from statistics import median

import msgspec
import numpy as np

from inferpool.models.attached import attached
from inferpool.service.api.routes.health import SwapFigures
from inferpool.service.errors import (
    DeadlineExceededError,
    GivenUpError,
    InvalidInputError,
    OverloadedError,
    ServiceError,
    UnavailableError,
)
from inferpool.service.parts.swap.inputs import SwapInput, inputs_of
from inferpool.service.parts.swap.requests import SwapOptions
from inferpool.service.queue.instance import Result
from inferpool.service.queue.pool import Pool
from inferpool.workers.shared.messages import ContentBlob, ItemRef, TensorBlob

_FIRST = 1
"""The priority of an input, which is the only one in both queues that no client waits for."""
_TIMEOUT_S = 60.0
"""How long an input may take, with all waiting for room in the queue."""
_AGAIN_AFTER_S = 0.02
_CHEAP_BYTES = 1 << 16
"""Outputs up to this size are compared in the event loop, larger ones in a thread."""
NO_ROOM = (OverloadedError, UnavailableError, DeadlineExceededError)
"""Errors that say nothing about a version while another serves on the same machine."""
_MOST_RECORDED_BYTES = 256 * 2**20
"""The most memory for recorded answers; beyond it no more are recorded."""
_LEAST_TIMED = 5
"""With fewer inputs, times say nothing."""
_SURE = 2.0
"""Standard deviations between the median of the times and what is sure: by chance, once in 40."""
_MOST_FAULTS = 10
"""With more faults than this, and than its bound allows, a version is not compared any further."""


class Comparison:
    """Gathers figures over one or several rounds of inputs."""

    def __init__(self, old: Pool, new: Pool, *, are_alike: bool = True) -> None:
        """Compare a pool with the one that serves; if `are_alike`, their outputs too."""
        self._are_alike = are_alike
        self._old = old
        self._new = new
        self._num = self._num_live = self._num_agreeing = self._num_faults = 0
        self._first_fault = ""
        self._deviation: float | None = None
        self._times_s: list[tuple[float, float]] = []
        self._recorded: dict[tuple[bytes, bool], Result | ServiceError] = {}
        self.is_old_gone = False
        """The version of now can answer nothing more than what was recorded."""
        self._recorded_bytes = 0
        self._memory_before = 0

    async def record(self, sample: SwapInput, *, with_tensors: bool = True) -> None:
        """Record what the version of now answers to an input, since it may leave before the other.

        What is kept is bounded: inputs that come later then count as inputs without an answer.
        """
        self._memory_before = self._memory_before or _memory_bytes(self._old)
        with_tensors = with_tensors and not self._are_streams
        for wants_tensors in (False, True)[: 1 + with_tensors]:
            if self._recorded_bytes > _MOST_RECORDED_BYTES:
                return
            answer = await asked(self._old, sample, wants_tensors=wants_tensors)
            self._recorded[_digest_of(sample), wants_tensors] = answer
            self._recorded_bytes += _num_bytes(answer)

    async def before(
        self, sample: SwapInput, *, wants_tensors: bool = False
    ) -> Result | ServiceError:
        """Return what the version of now answers, or has answered if that was recorded."""
        if not self.is_old_gone:
            return await asked(self._old, sample, wants_tensors=wants_tensors)
        known = self._recorded.get((_digest_of(sample), wants_tensors))
        return known or OverloadedError("its answer was not recorded")

    async def add(
        self,
        inputs: Sequence[SwapInput],
        on_progress: Callable[[int], None] = lambda num: None,
        *,
        max_fault_share: float = 1.0,
    ) -> None:
        """Compare on some inputs. Inputs that the version of now fails on do not count.

        It ends early once the share of faults will be too large in any case.
        """
        for number, sample in enumerate(inputs, 1):
            await self._add_one(sample)
            on_progress(number)
            if self._num_faults > max(_MOST_FAULTS, max_fault_share * len(inputs)):
                return

    async def _add_one(self, sample: SwapInput) -> None:
        before = await self.before(sample)
        if isinstance(before, ServiceError):
            return
        after = await asked(self._new, sample)
        if isinstance(after, OverloadedError):
            return  # there was no room for it
        self._num += 1
        self._num_live += sample.is_live
        if isinstance(after, ServiceError):
            self.note_fault(_text_of(after))
            return
        if self._are_streams:
            is_same = parts_said(before.value) == parts_said(after.value)
        else:
            is_same = await _say_the_same(before.value, after.value)
        times_s = _work_s(before), _work_s(after)
        is_measured = self._are_alike and not self._are_streams
        if is_measured and (fault := await self._compare_outputs(sample)):
            self.note_fault(fault)
            return
        self._num_agreeing += is_same
        self._times_s.append(times_s)

    async def _compare_outputs(self, sample: SwapInput) -> str:
        """Measure how far outputs are apart; return what is wrong with those of the new version."""
        exact = await self.before(sample, wants_tensors=True)
        if isinstance(exact, ServiceError):
            return ""
        other = await asked(self._new, sample, wants_tensors=True)
        if isinstance(other, OverloadedError):
            return ""
        if isinstance(other, ServiceError):
            return _text_of(other)
        deviation, fault = await _compared(exact.value, other.value)
        if deviation is not None and not fault:
            self._deviation = max(self._deviation or 0.0, deviation)
        return fault

    @property
    def _are_streams(self) -> bool:
        """Answers come in parts, and never as tensors."""
        return self._old.interface.streams or self._new.interface.streams

    def note_fault(self, text: str) -> None:
        """Count an input that the version fails on."""
        self._num_faults += 1
        self._first_fault = self._first_fault or text

    def figures(self) -> SwapFigures:
        """Return what has been found up to now."""
        memory = _memory_bytes(self._new)
        memory_before = self._memory_before or _memory_bytes(self._old)
        latency_ms = latency_ratio = latency_ratio_least = None
        ratios = [new / old for old, new in self._times_s if old]
        if len(ratios) >= _LEAST_TIMED:
            latency_ms = round(1e3 * median(new for _, new in self._times_s), 3)
            latency_ratio = round(median(ratios), 3)
            latency_ratio_least = round(median_bounds(ratios, _SURE)[0], 3)
        num_answered = self._num - self._num_faults
        return SwapFigures(
            num_inputs=self._num,
            num_live=self._num_live,
            agreement=round(self._num_agreeing / num_answered, 4) if num_answered > 0 else None,
            deviation=None if self._deviation is None else float(f"{self._deviation:.3g}"),
            latency_ms=latency_ms,
            latency_ratio=latency_ratio,
            latency_ratio_least=latency_ratio_least,
            memory_bytes=memory,
            memory_ratio=round(memory / memory_before, 3) if memory_before else None,
            num_faults=self._num_faults,
            first_fault=self._first_fault[:500],
        )


async def asked(
    pool: Pool, sample: SwapInput, *, wants_tensors: bool = False
) -> Result | ServiceError:
    """Have a version compute an input alone, as JSON or as tensors; return its error, if any.

    Waits while there is no room for it; returns why, if there is none for too long.
    """
    until = time.monotonic() + _TIMEOUT_S
    if not pool.works_for.arena.can_hold(len(sample.payload)):
        return OverloadedError("the main process has no room for it in the arena (arena_bytes)")
    while True:
        if pool.is_lost:
            return GivenUpError(f"none of its workers is left ({pool.reason})")
        ref = item_ref(sample, until - time.monotonic(), wants_tensors=wants_tensors)
        try:
            return await pool.works_for.submit(ref, (sample.payload,), is_compared=True)
        except NO_ROOM as error:
            if until - time.monotonic() < _AGAIN_AFTER_S:
                return error
        except ServiceError as error:
            return error
        await asyncio.sleep(_AGAIN_AFTER_S)


def item_ref(sample: SwapInput, timeout_s: float, *, wants_tensors: bool = False) -> ItemRef:
    """Return the ref of an input that no client waits for."""
    return ItemRef(
        sample.kind,
        0,
        len(sample.payload),
        time.monotonic() + timeout_s,
        wants_tensors=wants_tensors,
        headers=sample.headers,
        parameters=sample.parameters,
        priority=_FIRST,
    )


async def output_fault(pool: Pool) -> str:
    """Return what is wrong with a version's outputs by itself; empty if nothing is.

    It must compute the model's example, and one of the inputs that are made up: numbers by chance
    may not be inputs that make sense to it.
    """
    faults = []
    for sample in await inputs_of(pool):
        answer = await asked(pool, sample, wants_tensors=True)
        if isinstance(answer, OverloadedError | InvalidInputError):
            continue
        fault = _text_of(answer) if isinstance(answer, ServiceError) else ""
        if fault and not sample.is_made_up:
            return fault
        faults.append(fault)
    return faults[0] if all(faults) and faults else ""


def why_not(figures: SwapFigures, options: SwapOptions) -> str:
    """Return what is wrong with a version by its figures; empty if it may serve."""
    num = figures.num_inputs
    wrong = []
    if num and figures.num_faults > options.max_fault_share * num:
        wrong.append(
            f"it fails on {figures.num_faults} of {num} inputs that the version of now answers "
            f"({figures.first_fault}), max_fault_share is {options.max_fault_share:g}"
        )
    if figures.accuracy is not None and figures.accuracy_before is not None:
        if not figures.accuracy and not figures.accuracy_before:
            wrong.append(
                f"neither it nor the version of now labels any of the {figures.num_validated} "
                "inputs of the validation right: give labels that the model answers with"
            )
        if figures.accuracy < figures.accuracy_before:
            wrong.append(
                f"it labels {figures.accuracy:.2%} of the {figures.num_validated} inputs of the "
                f"validation right, the version of now {figures.accuracy_before:.2%}"
            )
    else:
        if figures.agreement is not None and figures.agreement < options.min_agreement:
            wrong.append(
                f"its answer agrees for {figures.agreement:.2%} of {num - figures.num_faults} "
                f"inputs, min_agreement is {options.min_agreement:.2%}"
            )
        if figures.deviation is not None and figures.deviation > options.max_deviation:
            wrong.append(
                f"its outputs are off by up to {figures.deviation:.3g} of the largest, "
                f"max_deviation is {options.max_deviation:g}"
            )
    least = figures.latency_ratio_least
    if least is not None and least > options.max_latency_ratio:
        wrong.append(
            f"it takes {figures.latency_ratio:.2f} times as long for an input, and surely "
            f"{least:.2f} times, max_latency_ratio is {options.max_latency_ratio:g}"
        )
    return "; ".join(wrong)


def label_of(value: object) -> object:
    """Return what an answer says: its best label, the place of the best of its scores, or itself.

    Whole numbers are no scores, but say something themselves, as tokens and classes do.
    """
    answer = msgspec.json.decode(value) if isinstance(value, bytes) else value
    if isinstance(answer, list) and answer and isinstance(answer[0], dict):
        answer = answer[0]
    if isinstance(answer, dict):
        for key in ("label", "index"):
            if key in answer:
                return answer[key]
        return {key: label_of(each) for key, each in answer.items()}
    if isinstance(answer, list):
        kinds = {type(each) for each in answer}
        if float in kinds and kinds <= {int, float}:
            return int(np.argmax(answer))
        return [label_of(each) for each in answer]
    return None if isinstance(answer, float) else answer


def parts_said(value: object) -> object:
    """Return what each part of a stream says; another number of parts is another answer."""
    parts = msgspec.json.decode(value) if isinstance(value, bytes) else value
    return [label_of(part) for part in parts] if isinstance(parts, list) else label_of(parts)


async def _say_the_same(before: object, after: object) -> bool:
    """Return whether two answers say the same; of pictures, whether they look alike."""
    if isinstance(before, ContentBlob) and isinstance(after, ContentBlob):
        return await asyncio.to_thread(attached("likeness of contents"), before, after)
    return label_of(before) == label_of(after)


async def _compared(exact: object, other: object) -> tuple[float | None, str]:
    """Call `deviation_of`, in a thread if that takes long."""
    if isinstance(exact, list) and sum(len(blob.buffer) for blob in exact) > _CHEAP_BYTES:
        return await asyncio.to_thread(deviation_of, exact, other)
    return deviation_of(exact, other)


def deviation_of(exact: object, other: object) -> tuple[float | None, str]:
    """Compare output tensors: the largest difference as a part of the largest number, or a fault.

    If all numbers were 0, it is a part of the largest one that is there now.

    Returns:
        The difference, None if there are no fractions to compare; and what is wrong with the
        other's form.
    """
    assert isinstance(exact, list), "tensors were asked for"
    assert isinstance(other, list), "tensors were asked for"
    found = {blob.name: blob for blob in other}
    worst: float | None = None
    for blob in exact:
        twin = found.get(blob.name)
        if twin is None or (twin.dtype, twin.shape) != (blob.dtype, blob.shape):
            had = "is missing" if twin is None else f"is {twin.dtype} {list(twin.shape)}"
            return None, f"output {blob.name!r} {had}, it was {blob.dtype} {list(blob.shape)}"
        if "float" not in blob.dtype:
            continue  # labels are compared, and to be off by one says nothing
        one, two = _numbers_of(blob), _numbers_of(twin)
        is_finite = np.isfinite(one)
        if not np.isfinite(two[is_finite]).all():
            return None, f"output {blob.name!r} has numbers that are not finite"
        one, two = one[is_finite], two[is_finite]
        if one.size:
            largest = float(np.abs(one).max()) or float(np.abs(two).max()) or 1.0
            worst = max(worst or 0.0, float(np.abs(one - two).max()) / largest)
    return worst, ""


def _numbers_of(blob: TensorBlob) -> np.ndarray:
    if blob.dtype == "bfloat16":  # the upper half of a float32
        bits = np.frombuffer(blob.buffer, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64)
    return np.frombuffer(blob.buffer, blob.dtype).astype(np.float64)


def _text_of(error: ServiceError) -> str:
    return f"{error.code}: {error.message}"


def median_bounds(values: Collection[float], num_deviations: float) -> tuple[float, float]:
    """Return the bounds within which the median of such values lies, by the sign test.

    Args:
        values: Measured values; there is at least one.
        num_deviations: How sure it is, in standard deviations of the number of values below it.
    """
    ranked, middle = sorted(values), len(values) / 2
    reach = num_deviations * sqrt(len(ranked)) / 2
    low, high = int(middle - reach), ceil(middle + reach)
    return ranked[max(0, low)], ranked[min(high, len(ranked) - 1)]


def _digest_of(sample: SwapInput) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(sample)).digest()


def _num_bytes(answer: Result | ServiceError) -> int:
    if isinstance(answer, ServiceError):
        return 0
    value = answer.value
    if isinstance(value, list):
        return sum(len(each.buffer) for each in value)
    return len(value.buffer if isinstance(value, ContentBlob) else value)


def _work_s(result: Result) -> float:
    return result.timing.prepare_s + result.timing.compute_s


def _memory_bytes(pool: Pool) -> int:
    return sum(slot.handle.vitals().rss_bytes for slot in pool.slots if slot.handle)
