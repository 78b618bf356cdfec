"""The course of a training run in one rank: epochs of steps, trials, checkpoints.

All ranks take the same course. Rank 0 also writes the files.
"""

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader

from inferpool.models.accelerator.device import is_accelerator, module_of
from inferpool.models.files.run_folder import RunFolder
from inferpool.models.texts import printable
from inferpool.models.training.events import (
    AnyEvent,
    Noted,
    Saved,
    Skipped,
    Stepped,
    Validated,
)
from inferpool.models.training.images import EpochBatches, ImageSource, TrainingBatch
from inferpool.models.training.learner import Learner, NotFiniteError
from inferpool.models.training.recipe import Recipe
from inferpool.workers.training.checkpoints import Checkpoints, NoSpaceError
from inferpool.workers.training.group import RankGroup
from inferpool.workers.training.metrics import MetricsFile, now
from inferpool.workers.training.stopping import StopWatch

_TELL_S = 0.5
"""Time between events about steps."""
_MOST_SHARE = 0.05
"""Largest share of the time for checkpoints at the ends of epochs."""
_MOST_KEPT_BYTES = 1 << 29
"""Most memory for the pixels of held-out images between epochs."""


class TrainingError(Exception):
    """The training cannot go on, and to start the ranks again would not help. One sentence."""


class RunState(msgspec.Struct, kw_only=True):
    """The point that a run has reached, besides the weights."""

    step: int = 0
    epoch: int = 0
    """Epochs that are over."""
    epoch_step: int = 0
    """Steps of the epoch that is under way."""
    best_epoch: int = 0
    """Epoch with the best trial, from 1; 0 before the first one."""
    best_accuracy: float = -1.0
    best_loss: float = math.inf
    seconds: float = 0.0
    """Time of the training until now."""
    began_at: str = ""
    """The moment of the first start, in UTC."""
    faults: dict[str, str] = {}
    """Images that cannot be read, with the reasons."""


@dataclass(slots=True, kw_only=True)
class Course:
    """One rank's way through a run."""

    recipe: Recipe
    folder: RunFolder
    group: RankGroup
    device: torch.device
    learner: Learner
    source: ImageSource
    checkpoints: Checkpoints
    batches: EpochBatches
    training: DataLoader[TrainingBatch]
    held_out: "HeldOut"
    held_out_source: ImageSource
    stop: StopWatch
    metrics: MetricsFile | None
    """None for all ranks but the first."""
    state: RunState = field(default_factory=lambda: RunState(began_at=_utc()))
    losses: list[float] = field(default_factory=list)
    """Losses of this rank in the epoch that is under way."""
    _began: float = field(default_factory=time.monotonic)
    _saved_at: float = field(default_factory=time.monotonic)
    _saving_s: float = 0.0
    _new_faults: dict[int, str] = field(default_factory=dict)

    def run(self) -> bool:
        """Train until the end; return False if the ranks were stopped, after a checkpoint.

        Raises:
            TrainingError: The loss is NaN.
        """
        while self.state.epoch < self.recipe.epochs:
            self.stop.beat()
            began = time.monotonic()
            if not self._run_epoch() or not self._judge(began):
                return False
            self.state.epoch += 1
            self.state.epoch_step = 0
            self.losses.clear()
            is_due = time.monotonic() - self._saved_at > self._saving_s / _MOST_SHARE
            is_due, is_told = self.group.any(is_due, self.stop.is_told)
            if is_due or is_told:
                self.save()
            if is_told:
                return False
        return True

    @property
    def seconds(self) -> float:
        """Time of the training until now, without pauses between restarts."""
        return self.state.seconds + time.monotonic() - self._began

    def tell(self, event: AnyEvent) -> None:
        """Write an event, if this is the first rank."""
        if self.metrics is not None:
            self.metrics.write(event)

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.learner.load(checkpoint["learner"])
        self.state = msgspec.convert(checkpoint["state"], RunState)
        self.checkpoints.saved_best = self.state.best_epoch
        ranks = checkpoint["ranks"]
        place = self.group.place
        if len(ranks) == place.num_ranks:  # others have their own random numbers
            mine = ranks[place.rank]
            self.losses[:] = mine["losses"]
            torch.set_rng_state(mine["random"])
            if is_accelerator(self.device):
                module_of(self.device).set_rng_state(mine["device_random"], self.device)

    def save(self) -> None:
        """Write a checkpoint. All ranks come here together."""
        began = time.monotonic()
        mine: dict[str, object] = {"random": torch.get_rng_state(), "losses": self.losses}
        if is_accelerator(self.device):
            mine["device_random"] = module_of(self.device).get_rng_state(self.device)
        ranks = self.group.gather(mine)
        self._gather_faults()
        if self.group.keeps_files:
            self.state.seconds, self._began = self.seconds, time.monotonic()
            checkpoint = {
                "learner": self.learner.state(),
                "state": msgspec.to_builtins(self.state),
                "ranks": ranks,
            }
            try:
                num_bytes = self.checkpoints.save(
                    self.state.step, checkpoint, best_epoch=self.state.best_epoch
                )
            except NoSpaceError as error:
                self._note(f"{error}; the training goes on, and tries again later")
            else:
                seconds = round(time.monotonic() - began, 3)
                step = self.state.step
                self.tell(Saved(step=step, at=now(), num_bytes=num_bytes, seconds=seconds))
        self._saved_at = time.monotonic()
        self._saving_s = self._saved_at - began

    def _run_epoch(self) -> bool:
        """Run the steps that are left of an epoch; return False after a stop."""
        state, recipe = self.state, self.recipe
        self.learner.begin(head_only=state.epoch < recipe.head_only_epochs)
        self.batches.begin(state.epoch, state.epoch_step)
        told = time.monotonic()
        num_told = 0
        for passes in self._steps():
            self.stop.beat()
            self.losses.append(self._step(passes))
            state.step += 1
            state.epoch_step += 1
            num_told += 1
            elapsed_s = time.monotonic() - told
            if elapsed_s > _TELL_S:
                self._tell_step(num_told, elapsed_s)
                told, num_told = time.monotonic(), 0
            is_due = time.monotonic() - self._saved_at > 60 * recipe.checkpoint_minutes
            is_due, is_told = self.group.any(is_due and self.group.is_first, self.stop.is_told)
            if is_due or is_told:
                self.save()
            if is_told:
                return False
        return True

    def _steps(self) -> Iterator[list[TrainingBatch]]:
        loader = iter(self.training)
        while passes := [*islice(loader, self.learner.accumulate)]:
            for batch in passes:
                self._new_faults.update(batch.faults)
            yield passes

    def _step(self, passes: Sequence[TrainingBatch]) -> float:
        try:
            return self.learner.step(passes)
        except NotFiniteError as error:
            self._keep(passes)
            raise TrainingError(
                f"{error} at step {self.state.step + 1}; its images are kept in {self.folder.nan}. "
                "Try a lower --learning-rate; --resume goes on from the last checkpoint"
            ) from error

    def _keep(self, passes: Sequence[TrainingBatch]) -> None:
        """Write the batch that made the loss NaN."""
        self.folder.nan.mkdir(exist_ok=True)
        torch.save(
            {
                "pixels": torch.cat([batch.pixels for batch in passes]),
                "targets": torch.cat([batch.targets for batch in passes]),
                "images": [self.source.name_of(i) for batch in passes for i in batch.indices],
            },
            self.folder.nan / f"rank-{self.group.place.rank}.pt",
        )

    def _tell_step(self, num_steps: int, elapsed_s: float) -> None:
        self.tell(
            Stepped(
                step=self.state.step,
                at=now(),
                epoch=self.state.epoch + 1,
                loss=round(statistics.fmean(self.losses[-num_steps:]), 5),
                learning_rate=self.learner.learning_rate,
                images_per_s=round(num_steps * self.recipe.batch_size / elapsed_s, 1),
            )
        )

    def _judge(self, began: float) -> bool:
        """Try the network on the held-out images, and keep it if it is the best so far.

        Returns:
            False after a stop: then a run that goes on begins with this trial.
        """
        state = self.state
        self.group.share_buffers(self.learner.judged)
        loss, num_right, num, faults = self.held_out.judge(self.learner, self.stop)
        (is_told,) = self.group.any(self.stop.is_told)
        if is_told:
            self.save()
            return False
        loss_sum, right_sum, num_sum, train_sum, train_num = self.group.sums(
            loss, num_right, num, sum(self.losses), len(self.losses)
        )
        self._gather_faults(faults)
        if not num_sum:
            raise TrainingError("none of the held-out images can be read")
        accuracy, loss = right_sum / num_sum, loss_sum / num_sum
        is_best = (accuracy, -loss) > (state.best_accuracy, -state.best_loss)
        if is_best:
            state.best_accuracy, state.best_loss = accuracy, loss
            state.best_epoch = state.epoch + 1
            if self.group.keeps_files:
                try:
                    self.checkpoints.save_best(state.best_epoch, self.learner.judged)
                except NoSpaceError as error:
                    raise TrainingError(f"{error}; --resume goes on once there is room") from error
        self.tell(
            Validated(
                step=state.step,
                at=now(),
                epoch=state.epoch + 1,
                train_loss=round(train_sum / max(1.0, train_num), 5),
                loss=round(loss, 5),
                accuracy=accuracy,
                is_best=is_best,
                seconds=round(time.monotonic() - began, 3),
            )
        )
        return True

    def _gather_faults(self, held_out: dict[str, str] | None = None) -> None:
        """Report the images that cannot be read, each once."""
        mine = {self.source.name_of(i): reason for i, reason in self._new_faults.items()}
        self._new_faults.clear()
        for found in self.group.gather({**mine, **(held_out or {})}):
            assert isinstance(found, dict)
            for path, reason in found.items():
                if path not in self.state.faults:
                    self.state.faults[path] = reason
                    told = {"path": printable(path), "reason": printable(reason)}
                    event = Skipped(step=self.state.step, at=now(), **told)
                    self.tell(event)

    def _note(self, text: str) -> None:
        self.tell(Noted(step=self.state.step, at=now(), text=text))


def _utc() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class HeldOut:
    """This rank's part of the held-out images. If they are few, they are read only once.

    Args:
        loader: Reads them.
        source: Names them.
        num_bytes: Memory that all of them take as pixels.
    """

    def __init__(
        self, loader: DataLoader[TrainingBatch], source: ImageSource, *, num_bytes: int
    ) -> None:
        self._loader = loader
        self._source = source
        self._keeps = num_bytes <= _MOST_KEPT_BYTES
        self._kept: list[TrainingBatch] = []

    def judge(self, learner: Learner, stop: StopWatch) -> tuple[float, int, int, dict[str, str]]:
        """Return the summed loss, the numbers of right and of all images, and unreadable ones.

        It ends early once the rank is to stop.
        """
        loss, num_right, num = 0.0, 0, 0
        faults: dict[str, str] = {}
        for batch in self._kept or self._loader:
            stop.beat()
            if stop.is_told:
                break
            if self._keeps and len(self._kept) < len(self._loader):
                self._kept.append(batch)
            batch_loss, batch_right = learner.judge(batch)
            loss += batch_loss
            num_right += batch_right
            num += len(batch.targets)
            faults |= {self._source.name_of(i): reason for i, reason in batch.faults.items()}
        return loss, num_right, num, faults
