"""Events of a training run, as lines of JSON: `metrics.jsonl`. No torch.

Rank 0 appends the lines. The progress bar, the report and other programs read them.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec


class TrainEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """The base of events. Each has the step of the optimizer that it followed, from 0."""

    step: int
    at: float
    """The moment, in seconds since 1970."""


class Started(TrainEvent, frozen=True, kw_only=True, tag="started"):
    """The ranks are ready. After a restart or with --resume the step is not 0."""

    num_steps: int
    """Steps of the whole run."""
    num_epochs: int
    num_ranks: int
    devices: list[str]
    """Names of the ranks' devices."""
    batch_size: int
    num_training: int
    num_validation: int


class Stepped(TrainEvent, frozen=True, kw_only=True, tag="stepped"):
    """A step of the optimizer is done; only some steps are reported, about two a second."""

    epoch: int
    """The epoch that is under way, from 1."""
    loss: float
    """Mean over the steps since the last such event."""
    learning_rate: float
    images_per_s: float
    """Over all ranks, since the last such event."""


class Validated(TrainEvent, frozen=True, kw_only=True, tag="validated"):
    """An epoch is over, and the network was tried on the held-out images."""

    epoch: int
    train_loss: float
    """Mean over the epoch, as trained: with augmentation and label smoothing."""
    loss: float
    """Mean cross entropy of the held-out images."""
    accuracy: float
    is_best: bool
    seconds: float
    """Time of the epoch, with its validation."""


class Saved(TrainEvent, frozen=True, kw_only=True, tag="saved"):
    """A checkpoint is on the disk."""

    num_bytes: int
    seconds: float


class Skipped(TrainEvent, frozen=True, kw_only=True, tag="skipped"):
    """An image cannot be read: another one took its place, or none in the validation."""

    path: str
    reason: str


class Noted(TrainEvent, frozen=True, kw_only=True, tag="noted"):
    """Something that the user should know, such as a batch that was halved."""

    text: str
    is_lasting: bool = False
    """True if it stays true when the run goes on from an earlier checkpoint, as a process's end."""


class RunEnded(TrainEvent, frozen=True, kw_only=True, tag="ended"):
    """The ranks are done. Without this line they were killed."""

    status: Literal["done", "stopped", "failed"]
    """`stopped`: by a signal, after a checkpoint."""
    reason: str = ""
    """One sentence, if it failed."""


AnyEvent = Started | Stepped | Validated | Saved | Skipped | Noted | RunEnded

_decoder = msgspec.json.Decoder(AnyEvent)


def read_events(lines: Iterable[bytes]) -> Iterator[AnyEvent]:
    """Yield the events of lines; a last line that is cut off, and unknown events, are left out."""
    for line in lines:
        if not line.endswith(b"\n"):
            return
        try:
            yield _decoder.decode(line)
        except msgspec.DecodeError:
            continue
