"""Computes instances that no client sent: for the warm-up, and to check a model. In workers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inferpool.models.accelerator.device import mark_here
from inferpool.models.accelerator.failures import is_out_of_memory
from inferpool.models.errors import ModelError
from inferpool.models.item import Features, Item, Outputs
from inferpool.models.speed_names import LONG_S
from inferpool.workers.inside.checks import BrokenPromiseError
from inferpool.workers.inside.compute import Computer
from inferpool.workers.inside.shortage import release
from inferpool.workers.inside.staging import take


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The result of one pass of instances that no client sent, as far as the first of them goes."""

    outputs: Outputs
    """Outputs of the first instance, after `postprocess`, with the batch dimension."""
    is_finite: bool
    """They are finite, or need not be."""
    took_s: float


class OwnPasses:
    """Passes of one model, which is loaded. Its callers are in the thread that computes."""

    def __init__(self, computer: Computer) -> None:
        self._model = computer.model
        self._staging = computer.staging
        self._checks = computer.checks

    def warm_up(
        self,
        samples: Sequence[Item],
        sizes: Sequence[int],
        *,
        needed: int | None = None,
        on_pass: Callable[[int, Pass], None] = lambda size, one: None,
    ) -> float:
        """Compute batches of samples in some sizes.

        Args:
            samples: The samples.
            sizes: The sizes, in rising order.
            needed: Larger sizes are computed only as far as they fit into memory, and until one
                takes long; None for all.
            on_pass: Called with the size and the result of each pass.

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
                chosen = [features[i % len(features)] for i in range(size)]
                may_end = needed is not None and needed <= size < sizes[-1]
                try:
                    on_pass(size, one := self.try_out(chosen))
                    took_s = one.took_s
                    if may_end:  # the first of a size is no measure
                        took_s = min(took_s, self.try_out(chosen).took_s)
                except (RuntimeError, MemoryError) as error:
                    if needed is None or size <= needed or not is_out_of_memory(error):
                        raise
                    release(error)
                    break
                longest_s = max(longest_s, prepare_s * size + took_s)
                if may_end and took_s > LONG_S:
                    break
            if self._staging is not None and self._staging.runs_ahead:
                single = features[:1]
                outputs = [model.forward(model.collate(single)) for _ in range(2)]
                self._staging.compare(*outputs)
        return longest_s

    def try_out(self, chosen: Sequence[Features]) -> Pass:
        """Compute features that are no batch of a client.

        Raises:
            ModelError: The outputs have another form than the model declares.
        """
        began = time.monotonic()
        outputs = dict(self._model.postprocess(self._once(chosen)))
        took_s = time.monotonic() - began
        try:
            is_finite = 0 not in self._checks.non_finite_rows(outputs, len(chosen))
        except BrokenPromiseError as error:
            raise ModelError(str(error)) from error
        first = {name: _first_of(output) for name, output in outputs.items()}
        return Pass(outputs=first, is_finite=is_finite, took_s=took_s)

    def _once(self, chosen: Sequence[Features]) -> Outputs:
        """Compute features that are no batch of a client, in the way of batches."""
        model, staging = self._model, self._staging
        if staging is None:
            return {name: out.cpu() for name, out in model.forward(model.collate(chosen)).items()}
        with staging.there.in_use():
            batch = staging.stage(model.collate(chosen))
            handed_over = staging.there.mark()
        take(handed_over, batch)
        return staging.launch(mark_here(), model.forward(batch)).outputs()


def _first_of(output: Any) -> Any:
    """Copy the first row, since the model may reuse the memory."""
    if isinstance(output, list):  # with a tensor for each instance
        ragged: Any = output[:1]
        return ragged.clone()
    if not isinstance(output, Tensor):  # its own `render` reads anything that has a shape
        return output[:1]
    return (output if output.layout is torch.strided else output.to_dense())[:1].clone()
