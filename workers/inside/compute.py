"""Computes the outcomes of a batch, so that an item at fault fails alone. Runs in a worker process.

If the preparation of an item fails, only that item fails. Items that cannot be collated together
are computed in several groups. If a forward pass fails, or its outputs are not what the model
declares, the group is halved until the items at fault are alone, so that the others succeed.
"""

import logging
import time
from collections.abc import Callable, Sequence

from inferpool.models.accelerator.device import is_accelerator, mark_here, synchronize
from inferpool.models.accelerator.failures import is_lost_device, is_out_of_memory, raised
from inferpool.models.attached import attached
from inferpool.models.base import Model
from inferpool.models.errors import InputError
from inferpool.models.item import Features, Item, Outputs
from inferpool.models.overrides import bad_return, is_overridden, rendering_of
from inferpool.models.texts import described, text_of
from inferpool.workers.inside.checks import OutputChecks
from inferpool.workers.inside.outcomes import (
    MAX_BATCH_BYTES,
    NotFiniteAnswerError,
    bounded,
    check_size,
    client_text,
    encoder,
    error_of,
    outgoing_of,
    refusal_of,
)
from inferpool.workers.inside.preparing import Prepared, Preparer, ShapeGroup, unprepared
from inferpool.workers.inside.shortage import SafeSizes, release
from inferpool.workers.inside.staging import Launch, Staging, take
from inferpool.workers.shared.config import ErrorDetail
from inferpool.workers.shared.messages import ItemError, ItemRef, Outcome, Stored

logger = logging.getLogger(__name__)

_CHEAP_BYTES = 1 << 16
"""JSON answers up to this size are not counted: no batch has enough of them to matter."""


class Computer:
    """Runner of a loaded model on batches. Its callers are in torch's inference mode."""

    def __init__(
        self,
        model: Model,
        *,
        num_threads: int,
        device: str = "cpu",
        sample: Item | None = None,
        on_progress: Callable[[], None] = lambda: None,
        keep: Callable[[memoryview], bytes | Stored] = bytes,
        error_detail: ErrorDetail = "name",
    ) -> None:
        """Store a loaded model, and start the threads that prepare for it.

        Args:
            model: The model.
            num_threads: Number of preparations that may run at once.
            device: Device that the model computes on.
            sample: Item that canaries compute.
            on_progress: Called before each part but the first of a batch computed in parts.
            keep: Copies the bytes of an output: the model may reuse its memory.
            error_detail: Detail of the model's exceptions in answers.
        """
        self.model = model
        self._sample = sample
        self.on_progress = on_progress
        """See above. A loop that computes several batches at once replaces it."""
        self._keep = keep
        self.error_detail = error_detail
        self._is_sample_finite: bool | None = None
        self.checks = OutputChecks(model)
        self._preprocesses_itself = is_overridden(model, "preprocess")
        self._renders_in, self._render_batch = rendering_of(model)
        self._has_content = is_overridden(model, "render_content")
        self._safe_sizes = SafeSizes()
        self.staging = Staging(model, device) if is_accelerator(device) else None
        self.preparer = Preparer(
            model, num_threads=num_threads, staging=self.staging, error_detail=error_detail
        )
        self._encode = encoder(are_finite=model.finite_outputs)

    def prepare(self, id: int, refs: Sequence[ItemRef], payloads: Sequence[memoryview]) -> Prepared:
        """Decode, transform and collate. May run while another batch is in `compute`."""
        return self.preparer.prepare(unprepared(id, refs, payloads))

    def use_sample(self, sample: Item | None, is_finite: bool | None) -> None:
        """Use an instance for canaries; `is_finite` says whether its outputs are, if known."""
        self._sample, self._is_sample_finite = sample, is_finite

    def prepare_sample(self, id: int) -> Prepared:
        """Prepare a canary: the model's sample, or nothing if it has none."""
        return self.preparer.prepare_sample(id, self._sample)

    def judge_sample(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Return the error of a canary, if there is one.

        A good model may return NaN for a sample that was made up, so non-finite outputs count as an
        error only if the model once had finite ones for it.
        """
        errors = [outcome for outcome in outcomes if isinstance(outcome, ItemError)]
        is_finite = not any(error.code == "non_finite_output" for error in errors)
        if self._is_sample_finite is None:
            self._is_sample_finite = is_finite
            if not is_finite:
                logger.warning("the model's output for a sample of its own is not finite")
        return [*errors] if is_finite or self._is_sample_finite else []

    @property
    def runs_ahead(self) -> bool:
        """Batches may be launched before the previous one is answered."""
        return self.staging is not None and self.staging.runs_ahead

    def launch(self, prepared: Prepared) -> None:
        """Start a batch on the device, and do not wait: `compute` does the rest.

        `compute` also does anew what fails here, when the batch before needs no more memory.

        Raises:
            torch.AcceleratorError: The device's context is lost.
        """
        assert self.staging is not None
        assert prepared.handed_over is not None
        for group in prepared.groups:
            live, batch = _in_time(prepared, group.indices), group.batch
            if batch is None or len(live) < len(group.indices):
                continue
            group.classify(prepared.features, batch)
            if len(self._pieces(prepared, group, live)) > 1:
                continue
            group.batch = None
            try:
                began = mark_here()
                take(prepared.handed_over, batch)
                prepared.step = "forward"
                outputs = self.model.forward(batch)
                group.launch = self.staging.launch(began, outputs)
            except raised() as error:
                if is_lost_device(error):
                    raise
                logger.debug("a launch failed", exc_info=True)

    def wait(self, prepared: Prepared) -> None:
        """Wait, asleep, until the device is done with what was launched. Any thread may wait."""
        launches = [group.launch for group in prepared.groups if group.launch is not None]
        for number, launch in enumerate(launches):
            if number:
                self.on_progress()
            launch.wait()

    def compute(self, prepared: Prepared) -> list[Outcome]:
        """Run the model on a prepared batch, and render the answers."""
        for number, group in enumerate(prepared.groups):
            if number:
                self.on_progress()
            self._compute_group(prepared, group)
        if prepared.release is not None:
            copies = []
            if prepared.handed_over is not None:  # it may have failed with a copy under way
                copies = [prepared.handed_over.is_over, mark_here().is_over]
            prepared.release(copies)
        late = ItemError("deadline_exceeded", "the deadline passed before it was computed")
        outcomes = [late if outcome is None else outcome for outcome in prepared.outcomes]
        return bounded(outcomes) if prepared.num_bytes > MAX_BATCH_BYTES else outcomes

    def _compute_group(self, prepared: Prepared, group: ShapeGroup) -> None:
        if group.launch is not None:
            pieces = [group.indices]
        else:
            live = _in_time(prepared, group.indices)
            if not live:
                return
            pieces = [live] if self._safe_sizes.are_all else self._pieces(prepared, group, live)
        is_whole = len(pieces[0]) == len(group.indices)
        if not is_whole:
            group.batch = None
        for piece in pieces:
            is_good = self._compute_some(prepared, piece, group, is_whole=is_whole)
            if is_good and not self._safe_sizes.are_all:
                self._safe_sizes.record_good(group.memory_class, len(piece))

    def _pieces(self, prepared: Prepared, group: ShapeGroup, indices: list[int]) -> list[list[int]]:
        """Return items of a group in pieces that should fit into memory."""
        group.classify(prepared.features)
        return self._safe_sizes.split(indices, group.memory_class)

    def _compute_some(
        self, prepared: Prepared, indices: list[int], group: ShapeGroup, *, is_whole: bool = False
    ) -> bool:
        """Compute some items; halve them while they fail together.

        Args:
            prepared: Their batch.
            indices: The items.
            group: Their group.
            is_whole: They are all of it: it is collated already, or even launched.

        Returns:
            True if each of them fitted into memory alone. An item that does not fit alone says
            nothing about how many others fit together.
        """
        batch: Features | None = None
        launch: Launch | None = None
        if is_whole:
            # A batch that does not fit must not take up memory while it is halved.
            batch, group.batch = group.batch, None
            launch, group.launch = group.launch, None
        else:
            self.on_progress()
            indices = _in_time(prepared, indices)
            if not indices:
                return True
        is_shortage = False
        try:
            again = self._compute_once(prepared, indices, batch, launch)
        except raised() as error:
            if is_lost_device(error):
                raise
            is_shortage = is_out_of_memory(error)
            if is_shortage:
                group.classify(prepared.features, batch)
            del batch, launch
            again = self._survive(prepared, indices, error)
        else:
            del batch, launch
        if not again:
            return not is_shortage
        middle = len(again) // 2
        has_first_fitted = self._compute_some(prepared, again[:middle], group)
        has_second_fitted = self._compute_some(prepared, again[middle:], group)
        has_fitted = has_first_fitted and has_second_fitted
        if is_shortage and has_fitted:
            size = self._safe_sizes.note(group.memory_class, len(again))
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
            failure = self._refusal(prepared, first) or self._error_of(
                error, prepared.step, prepared.refs[first]
            )
            if is_shortage:
                text = f"out of memory on this input alone: {client_text(error, self.error_detail)}"
                failure = ItemError("model_error", text)
            prepared.outcomes[first] = failure
        else:
            level = logging.DEBUG if isinstance(error, InputError) else logging.WARNING
            text = "a batch of %d failed (%s): computing it in halves"
            logger.log(level, text, len(indices), described(error))
        if is_shortage:
            release(error)
        synchronize()  # a library's error may hide that the context is lost
        return indices if len(indices) > 1 else []

    def _compute_once(
        self,
        prepared: Prepared,
        indices: list[int],
        batch: Features | None,
        launch: Launch | None,
    ) -> list[int]:
        """Compute some items together; return those that must be computed in halves."""
        if launch is not None:
            prepared.step = "forward"
            outputs = launch.outputs()
            prepared.device_s += launch.device_s
        else:
            if batch is None:
                batch = self._collate_again(prepared, indices)
            if prepared.handed_over is not None:
                take(prepared.handed_over, batch)
            prepared.step = "forward"
            outputs = self.model.forward(batch)
            del batch  # the following steps need the memory
            prepared.step = "postprocess"
            outputs = {name: out.cpu() for name, out in outputs.items()}
        prepared.step = "postprocess"
        outputs = self.model.postprocess(outputs)
        if rows := self.checks.non_finite_rows(outputs, len(indices)):
            return self._leave_out(prepared, indices, rows, outputs)
        self._settle(prepared, indices, outputs)
        return []

    def _collate_again(self, prepared: Prepared, indices: Sequence[int]) -> Features:
        """Collate items that did not fit together with others, in this thread."""
        if prepared.handed_over is not None:
            for i in indices:
                take(prepared.handed_over, prepared.features[i])
        return self.preparer.collate(prepared, indices)

    def _leave_out(
        self, prepared: Prepared, indices: list[int], rows: list[int], outputs: Outputs
    ) -> list[int]:
        """Answer the finite rows; return the others if there are several: one may spoil all."""
        good = [row for row in range(len(indices)) if row not in rows]
        if good:
            chosen = {name: tensor[good] for name, tensor in outputs.items()}
            self._settle(prepared, [indices[row] for row in good], chosen)
        if len(rows) > 1:
            return [indices[row] for row in rows]
        i = indices[rows[0]]
        what = "output for this input has NaN or an infinity in it"
        prepared.outcomes[i] = self._non_finite(prepared, i, what)
        return []

    def _non_finite(self, prepared: Prepared, i: int, what: str) -> ItemError:
        """Return the error for an item with an output or answer that is not finite."""
        if refusal := self._refusal(prepared, i):
            return refusal
        if not prepared.is_canary:  # which the host reports
            logger.error("the model's %s", what, extra=prepared.refs[i].log_ids())
        return ItemError("non_finite_output", f"the model's {what}")

    def _refusal(self, prepared: Prepared, i: int) -> ItemError | None:
        """Return the error for a failed item if its client sent NaN or an infinity, else None."""
        features = None if self._preprocesses_itself else prepared.features[i]
        return None if prepared.is_canary else refusal_of(prepared.items[i], features)

    def _settle(self, prepared: Prepared, indices: list[int], outputs: Outputs) -> None:
        if prepared.is_canary:  # nobody reads its answer, which may not be serialisable
            prepared.outcomes = [b""] * len(prepared.outcomes)
            return
        refs = prepared.refs
        as_tensors = [row for row, i in enumerate(indices) if refs[i].wants_tensors]
        if not as_tensors:
            self._render(prepared, indices, outputs)
            return
        outgoing = outgoing_of(outputs, len(indices))  # before content is stored: it may raise
        if rest := [row for row, i in enumerate(indices) if not refs[i].wants_tensors]:
            chosen = {name: tensor[rest] for name, tensor in outputs.items()}
            self._render(prepared, [indices[row] for row in rest], chosen)
        prepared.num_bytes += outgoing.row_bytes * len(as_tensors)
        for row in as_tensors:
            i = indices[row]
            try:
                prepared.outcomes[i] = outgoing.row(row, self._keep)
            except Exception as error:
                # Fail it alone: to compute the others again would store their outputs twice.
                prepared.outcomes[i] = self._error_of(error, "postprocess", refs[i])

    def _render(self, prepared: Prepared, indices: list[int], outputs: Outputs) -> None:
        items, outcomes, encode = prepared.items, prepared.outcomes, self._encode
        prepared.step = self._renders_in
        render = self._render_batch
        if self._has_content and any(prepared.refs[i].wants_content for i in indices):
            refs = [prepared.refs[i] for i in indices]
            render = attached("rendering of content")(self.model, render, refs)
        values = render(outputs, [items[i].parameters for i in indices])
        for i, value in zip(indices, values, strict=True):
            if isinstance(value, InputError):
                outcomes[i] = self._error_of(value, "render", prepared.refs[i])
                continue
            try:
                outcomes[i] = text = encode(value)
                if (size := len(text)) > _CHEAP_BYTES:
                    prepared.num_bytes += size
                    check_size(size)
            except NotFiniteAnswerError as error:
                outcomes[i] = self._non_finite(prepared, i, str(error))
            except (TypeError, ValueError, RecursionError) as error:
                outcomes[i] = self._other_than_json(prepared, i, value, error)
            except raised() as error:  # it is too large, or an object in it raises
                outcomes[i] = self._error_of(error, "render", prepared.refs[i])

    def _other_than_json(
        self, prepared: Prepared, i: int, value: object, error: Exception
    ) -> Outcome:
        """Return the outcome for a rendered value that is no JSON: content, or an error."""
        ref = prepared.refs[i]
        if hasattr(value, "json_hint"):
            outcome: Outcome = attached("content")(value, self._keep, ref)
            prepared.num_bytes = MAX_BATCH_BYTES + 1  # then `bounded` counts it
            return outcome
        wrong = bad_return(self.model, "render", "a value that JSON can say", text_of(error))
        return self._error_of(wrong, "render", ref)

    def _error_of(self, error: BaseException, step: str, ref: ItemRef) -> ItemError:
        return error_of(error, step, ref, self.error_detail)


def _in_time(prepared: Prepared, indices: Sequence[int]) -> list[int]:
    """Return the items that are still within their deadline."""
    now = time.monotonic()
    return [i for i in indices if prepared.refs[i].deadline > now]
