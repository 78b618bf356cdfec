"""Takes the steps of a training: loss, gradients, optimizer, learning rate, average of weights.

Axes: B batch, C = 3 colours, H height, W width, K classes.
"""

# ruff: noqa: N806 - tensors carry their axes in their names

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel

from inferpool.models.accelerator.device import is_accelerator
from inferpool.models.sources.trained import transform_of
from inferpool.models.training.images import TrainingBatch
from inferpool.models.training.recipe import Recipe
from inferpool.models.vision.transforms import Normalize

_MOST_NORM = 5.0
"""Longest gradient; a longer one is scaled down, so that one odd batch does not throw the weights
about. A well-behaved training stays below it after its first steps."""
_NORM_STEPS = 100
"""Time constants of batch norms' averages that a run should have, or these remember the beginning.
torchvision's MobileNetV3 has one of 100 steps, and guessed at random after 264."""
_NORM_MOMENTUM = 0.1
"""torch's own, which is the most that the shortest runs get."""
_BATCH_NORMS = nn.modules.batchnorm._BatchNorm

Wrap = Callable[[nn.Module], nn.Module]
"""Makes a network average its gradients over ranks, as `DistributedDataParallel` does."""


class NotFiniteError(Exception):
    """The loss or a gradient has become NaN or infinite. The weights are those from before."""

    def __init__(self, loss: float) -> None:
        super().__init__(f"the loss is {loss}" if not math.isfinite(loss) else "a gradient is NaN")


class Learner:
    """A network that learns. Each rank has one, and all take the same steps.

    Args:
        network: On its device, with the weights to begin with.
        head: Its last layer, which is trained alone at first.
        recipe: What to do.
        num_steps: Steps of the whole run.
        accumulate: Forward passes of a step on this rank.
        wrap: Prepares the network for several ranks.
    """

    def __init__(
        self,
        network: nn.Module,
        head: nn.Module,
        recipe: Recipe,
        *,
        num_steps: int,
        accumulate: int = 1,
        wrap: Wrap = lambda network: network,
    ) -> None:
        self.network = network
        self.accumulate = accumulate
        self._head = head
        self._recipe = recipe
        self._wrap = wrap
        self._device = next(network.parameters()).device
        self._dtype = next(network.parameters()).dtype
        self._layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
        self._normalize = Normalize(transform_of(recipe.transform)).to(self._device)
        weights = recipe.class_weights
        self._loss = nn.CrossEntropyLoss(
            weight=None
            if weights is None
            else torch.tensor(weights, dtype=self._dtype, device=self._device),
            label_smoothing=recipe.label_smoothing,
            reduction="sum",  # weights of classes are not to depend on the images beside
        )
        self._optimizer = torch.optim.AdamW(
            [*_groups(network, recipe.weight_decay)],
            lr=recipe.learning_rate,
            fused=None if is_accelerator(self._device) else True,  # it is not the default on CPUs
        )
        self._schedule = LambdaLR(self._optimizer, _rates(num_steps, recipe.warmup))
        self._average = None
        if recipe.ema_decay:
            self._average = AveragedModel(
                network, multi_avg_fn=_averaging(recipe.ema_decay), use_buffers=True
            )
        for module in network.modules():
            if isinstance(module, _BATCH_NORMS) and module.momentum is not None:
                least = min(_NORM_MOMENTUM, _NORM_STEPS / num_steps)
                module.momentum = max(module.momentum, least)
        self._trained: nn.Module = network
        self._is_head_only: bool | None = None

    @property
    def judged(self) -> nn.Module:
        """The network to judge and to keep: the average of the weights if there is one."""
        if self._average is None:
            return self.network
        module: nn.Module = self._average.module
        return module

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        return float(self._schedule.get_last_lr()[0])

    def begin(self, *, head_only: bool) -> None:
        """Choose what the next steps train: the last layer, or all."""
        if self._is_head_only is not head_only:
            self._is_head_only = head_only
            self.network.requires_grad_(not head_only)
            self._head.requires_grad_(True)
            self._optimizer.zero_grad(set_to_none=True)
            self._trained = self._wrap(self.network)
        self._trained.train(not head_only)
        self._head.train()
        if self._recipe.freeze_norm:
            for module in self.network.modules():
                if isinstance(module, _BATCH_NORMS):
                    module.eval()

    def step(self, batches: Sequence[TrainingBatch]) -> float:
        """Run one step of the optimizer; return the mean loss of this rank's images.

        Args:
            batches: One batch of equal size for each forward pass.

        Raises:
            NotFiniteError: Nothing was changed. All ranks raise it at the same step.
        """
        loss = self.gradients(batches)
        # After the ranks have averaged them, so a NaN of one rank is in all.
        norm = nn.utils.clip_grad_norm_(self.network.parameters(), _MOST_NORM)
        if not math.isfinite(norm.item()):
            self._optimizer.zero_grad(set_to_none=True)
            raise NotFiniteError(loss)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._schedule.step()
        if self._average is not None:
            self._average.update_parameters(self.network)
        return loss

    def gradients(self, batches: Sequence[TrainingBatch]) -> float:
        """Compute the gradients of the mean loss of all ranks' images; return this rank's loss."""
        total = torch.zeros((), device=self._device, dtype=self._dtype)
        for number, batch in enumerate(batches, 1):
            with self._unless_last(number == len(batches)):
                loss = self._loss_of(batch) / len(batches)
                loss.backward()
            total += loss.detach()
        return float(total.item())

    @torch.no_grad()
    def judge(self, batch: TrainingBatch) -> tuple[float, int]:
        """Return the summed cross entropy of some images, and how many are labelled right."""
        if not len(batch.targets):
            return 0.0, 0
        network = self.judged
        was_training = network.training
        network.eval()
        try:
            logits_BK = network(self._input(batch)).float()
        finally:
            network.train(was_training)
        targets = batch.targets.to(self._device)
        loss = nn.functional.cross_entropy(logits_BK, targets, reduction="sum")
        return float(loss.item()), int((logits_BK.argmax(1) == targets).sum().item())

    def state(self) -> dict[str, Any]:
        """Return all that the next steps depend on, besides images and random numbers."""
        return {
            "network": self.network.state_dict(),
            "average": None if self._average is None else self._average.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.network.load_state_dict(state["network"])
        if self._average is not None:
            self._average.load_state_dict(state["average"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])

    def _loss_of(self, batch: TrainingBatch) -> Tensor:
        x_BCHW = self._input(batch)
        targets = batch.targets.to(self._device, non_blocking=True)
        is_mixed = self._recipe.precision == "bf16"
        with torch.autocast(self._device.type, torch.bfloat16, enabled=is_mixed):
            logits_BK = self._trained(x_BCHW)
        if is_mixed:
            logits_BK = logits_BK.float()
        loss: Tensor = self._loss(logits_BK, targets) / len(targets)
        return loss

    def _input(self, batch: TrainingBatch) -> Tensor:
        pixels = batch.pixels.to(self._device, non_blocking=True)
        x_BCHW: Tensor = self._normalize(pixels.permute(0, 2, 3, 1), self._layout)
        return x_BCHW.to(self._dtype)

    def _unless_last(self, is_last: bool) -> AbstractContextManager[None]:
        """Return a context that prevents ranks from averaging their gradients yet."""
        wait: Callable[[], AbstractContextManager[None]] | None
        wait = getattr(self._trained, "no_sync", None)
        return nullcontext() if is_last or wait is None else wait()


def _groups(network: nn.Module, weight_decay: float) -> Iterator[dict[str, Any]]:
    """Yield the parameters with decay, and those without: biases and norms have one axis."""
    parameters = [*network.parameters()]
    yield {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay}
    yield {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0}


def _rates(num_steps: int, warmup: float) -> Callable[[int], float]:
    """Return the factor of the learning rate at each step: a line up, then half a cosine down."""
    num_warmup = max(1, round(warmup * num_steps))

    def rate(step: int) -> float:
        if step < num_warmup:
            return (step + 1) / num_warmup
        done = (step - num_warmup) / max(1, num_steps - num_warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return rate


def _averaging(decay: float) -> Callable[[Any, Any, Tensor | int], None]:
    """Return what moves averages towards values. The first ones move faster.

    The warm-up of the decay is that of tf.train.ExponentialMovingAverage, (1 + n) / (10 + n).
    """

    @torch.no_grad()
    def average(averages: Any, values: Any, num: Tensor | int) -> None:
        count = int(num)
        by = 1 - min(decay, (1 + count) / (10 + count))
        floats = [a.is_floating_point() for a in averages]
        if any(floats):
            torch._foreach_lerp_(
                [a for a, is_float in zip(averages, floats, strict=True) if is_float],
                [v for v, is_float in zip(values, floats, strict=True) if is_float],
                by,
            )
        for a, v, is_float in zip(averages, values, floats, strict=True):
            if not is_float:
                a.copy_(v)

    return average
