"""Ways of batches to an accelerator, and of outputs back, beside what it computes. In workers.

Several streams of a device work at the same time. Each thread that prepares batches has one, which
copies them and does that thread's other work. On the main thread's own the model computes. On
another the outputs go back. Events keep them in order, so that the host waits for outputs alone.
"""

import logging
import threading
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from inferpool.models.accelerator.device import (
    HandOver,
    SideStream,
    mark_here,
    pinned,
    stack_pinned,
)
from inferpool.models.base import Model
from inferpool.models.item import Features, Outputs
from inferpool.models.overrides import forward_can_run_ahead

logger = logging.getLogger(__name__)


class Staging:
    """The ways between the host and the device of one model."""

    def __init__(self, model: Model, device: str) -> None:
        self.runs_ahead = forward_can_run_ahead(model)
        """Batches are copied to the device before it computes them, and computed before the outputs
        of the batch before are read. `compare` may find that this model cannot do it."""
        model.stack_instances = stack_pinned
        self._device = torch.device(device)
        self._there = threading.local()
        self._back = SideStream(device)

    @property
    def there(self) -> SideStream:
        """The stream for what this thread prepares."""
        stream: SideStream | None = getattr(self._there, "stream", None)
        if stream is None:
            stream = self._there.stream = SideStream(self._device)
        return stream

    def stage(self, batch: Features) -> Features:
        """Lay a batch in pinned memory, and begin to copy it to the device if that may be done."""
        return {name: self._staged(value) for name, value in batch.items()}

    def launch(self, began: HandOver, outputs: Outputs) -> "Launch":
        """Begin to copy outputs back, while this thread's stream goes on.

        Args:
            began: When the device began with them.
            outputs: Return value of `forward`.
        """
        computed = mark_here()
        with self._back.in_use():
            computed.take(_tensors_in(outputs))
            copied = {name: out.to("cpu", non_blocking=True) for name, out in outputs.items()}
            return Launch(copied, began, self._back.mark())

    def compare(self, first: Outputs, second: Outputs) -> None:
        """Do not run ahead if two calls of `forward` have returned the same memory.

        The later call would write over outputs that are not yet copied, or not yet rendered.
        """
        if _memory_of(first) & _memory_of(second):
            self.runs_ahead = False
            logger.warning(
                "`forward` returns the same memory each time, so batches are computed one by one"
            )

    def _staged(self, value: Tensor) -> Tensor:
        value = pinned(value)
        if not self.runs_ahead or not isinstance(value, Tensor):
            return value
        try:
            return value.to(self._device, non_blocking=True)
        except torch.OutOfMemoryError:  # `forward` copies it, once the batch before is done
            return value


class Launch:
    """Items that were launched on a device, and their outputs on the way to the host."""

    def __init__(self, outputs: Outputs, began: HandOver, done: HandOver) -> None:
        self._outputs = outputs
        self._began = began
        self._done = done
        self._is_over = False
        self._error: Exception | None = None

    def wait(self) -> None:
        """Wait, asleep, until the outputs are there, or it has failed. Any thread may call it."""
        if self._is_over:
            return
        try:
            self._done.wait()
        except Exception as error:  # for the thread that reads the outputs
            self._error = error
        self._is_over = True

    def outputs(self) -> Outputs:
        """Wait for the outputs, and return them.

        Raises:
            Exception: The device has failed, at this or at another task.
        """
        self.wait()
        if self._error is not None:
            raise self._error
        return self._outputs

    @property
    def device_s(self) -> float:
        """The device's time for it, if it is over and has not failed; else 0."""
        if not self._is_over or self._error is not None:
            return 0.0
        return self._done.seconds_since(self._began)


def _memory_of(outputs: Outputs) -> set[int]:
    """Return where outputs begin that have memory of their own."""
    plain = [out for out in _tensors_in(outputs) if out.layout is torch.strided and out.numel()]
    return {out.untyped_storage().data_ptr() for out in plain}


def _tensors_in(outputs: Outputs) -> Iterator[Tensor]:
    for output in outputs.values():
        yield from output if isinstance(output, list) else (output,)


def take(handed_over: HandOver, features: Features | None) -> None:
    """Have this thread's stream wait for features that another one put on the device."""
    handed_over.take(features.values() if isinstance(features, Mapping) else ())
