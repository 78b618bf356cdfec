"""Chooses the parts of a plan: devices, ranks, the view of images, the length. No torch.

Each part uses the settings that are given, and refuses impossible ones.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from inferpool.models.files.run_folder import TransformCard
from inferpool.models.training.recipe import Augmentation, Precision
from inferpool.models.training.samples import ImageFacts, LabelledImages
from inferpool.service.settings.names import FlagError
from inferpool.service.train import choices
from inferpool.service.train.settings import TrainSettings
from inferpool.workers.host.devices import Host, parse_devices

CPU = "cpu"
_PLAIN = (0.5, 0.5, 0.5)
"""Mean and deviation of pixels for random weights: pixels then run from -1 to 1."""

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainMachine:
    """The devices and processes of a run on this host."""

    device: str
    """Kind of the ranks' devices."""
    indices: Sequence[int]
    """Indices that torch gives the devices, one for each rank of this host; empty on CPUs."""
    names: Sequence[str]
    num_ranks: int
    precision: Precision


def machine_for(
    settings: TrainSettings, host: Host, has_bf16: Callable[[str], bool], busy: Collection[str]
) -> TrainMachine:
    """Choose the devices and the number of ranks of this host."""
    indices = _indices(settings.devices, host, busy)
    kind = host.accelerator.kind if indices else CPU
    if indices:
        num_ranks = given(settings.processes, len(indices))
        if num_ranks > len(indices):
            raise FlagError(
                f"--processes: {num_ranks} are more than the {count(len(indices), 'device')}, and "
                "each process needs one of its own"
            )
    else:
        num_ranks = given(settings.processes, 1)
        if settings.sync_batchnorm:
            raise FlagError(
                "--sync-batchnorm: batch norms use the statistics of all processes on GPUs only, "
                "and this run is on the CPU"
            )
    if settings.precision == "bf16" and not has_bf16(kind):
        raise FlagError(f"--precision: this {kind} does not compute in bf16; take fp32")
    precision: Precision = "bf16" if indices and has_bf16(kind) else "fp32"
    return TrainMachine(
        device=kind,
        indices=indices[:num_ranks],
        names=[str(host.gpus[index]) for index in indices[:num_ranks]],
        num_ranks=num_ranks,
        precision=precision if settings.precision == "auto" else settings.precision,
    )


def _indices(devices: str, host: Host, busy: Collection[str]) -> list[int]:
    """Return the positions of the chosen GPUs among the host's; none for the CPU.

    They are torch's indices, since torch counts the visible GPUs.
    """
    gpus = host.gpus[:1] if host.gpus and host.gpus[0].sliced_from else host.gpus
    names = parse_devices(devices)  # CUDA shows a process a single slice of a GPU
    if names == (CPU,) or (names == ("auto",) and not gpus):
        return []
    if names == ("auto",):
        free = [place for place, gpu in enumerate(gpus) if gpu.uuid not in busy]
        if not free:
            raise FlagError(
                "--devices: other processes use all GPUs; name those to train on, or cpu"
            )
        return free
    found: list[int] = []
    for name in names:
        kind, colon, number = name.partition(":")
        places = [
            place
            for place, gpu in enumerate(gpus)
            if gpu.kind == kind and (not colon or gpu.index == int(number))
        ]
        if not places:
            there = ", ".join(host.describe())
            why = f" ({host.problem})" if host.problem else ""
            raise FlagError(f"--devices: there is no {name} on this host, only {there}{why}")
        found += places
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainView:
    """How the network sees the images."""

    transform: TransformCard
    augment: Augmentation
    flip: bool
    reason: str
    """Why images are not mirrored, if that was chosen."""


def view_for(
    settings: TrainSettings,
    training: LabelledImages,
    facts: ImageFacts | None,
    native: TransformCard | None,
    fits: Callable[[int], bool],
) -> TrainView:
    """Choose how the network sees the images."""
    has_weights = settings.has_weights
    short_edge = facts.short_edge if facts else 0
    kind = choices.kind_of(training.labels)
    is_gray = facts is not None and facts.is_gray
    is_plain = is_gray or kind in ("digits", "letters")
    usual = native.crop if native else choices.USUAL_EDGE
    if settings.image_size == "auto":
        edge = choices.edge_for(short_edge, usual, has_weights=has_weights, fits=fits)
        if edge is None:
            raise FlagError(
                f"--model: {settings.model} takes no images of any usual size up to {usual} x "
                f"{usual}; give the one that it takes as --image-size"
            )
    else:
        edge = settings.image_size
        if not fits(edge):
            raise FlagError(
                f"--image-size: {settings.model} takes no images of {edge} x {edge} pixels"
            )
    resize = edge
    if native and has_weights and not is_plain:
        published = round(edge * native.resize / native.crop)
        # Smaller images would be enlarged before they are cut.
        resize = published if short_edge >= published else edge
    augment: Literal["shift", "crop"] = "shift" if is_plain else "crop"
    reason = kind or ("gray" if is_gray else "")
    return TrainView(
        transform=TransformCard(
            resize=resize,
            crop=edge,
            interpolation=native.interpolation if native else "bilinear",
            mean=native.mean if native and has_weights else _PLAIN,
            std=native.std if native and has_weights else _PLAIN,
        ),
        augment=augment if settings.augment == "auto" else settings.augment,
        flip=given(settings.flip, not reason),
        reason=reason if settings.flip == "auto" else "",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainLengths:
    """The length of a run, and its steps."""

    epochs: int
    head_only_epochs: int
    steps_per_epoch: int
    batch_size: int
    accumulate: int
    learning_rate: float
    ema_decay: float


def lengths_for(
    settings: TrainSettings, training: LabelledImages, machine: TrainMachine
) -> TrainLengths:
    """Choose the length of a run, and its steps."""
    num, has_weights = len(training), settings.has_weights
    epochs = given(settings.epochs, choices.epochs_for(num, has_weights=has_weights))
    head_only = given(settings.head_only_epochs, int(has_weights and epochs > 1))
    if head_only > epochs:
        raise FlagError(
            f"--head-only-epochs: {head_only} are more than all {epochs} epochs of the run"
        )
    accumulate = given(settings.accumulate, 1)
    batch_size = _batch(settings, num, machine.num_ranks, accumulate)
    steps = num // batch_size
    return TrainLengths(
        epochs=epochs,
        head_only_epochs=head_only,
        steps_per_epoch=steps,
        batch_size=batch_size,
        accumulate=accumulate,
        learning_rate=given(
            settings.learning_rate, choices.rate_for(batch_size, has_weights=has_weights)
        ),
        ema_decay=given(settings.ema_decay, choices.decay_for(epochs * steps, steps)),
    )


def _batch(settings: TrainSettings, num_images: int, num_ranks: int, accumulate: int) -> int:
    """Return the images of a step, a number that all ranks and passes divide evenly."""
    least, most = settings.num_nodes
    multiple = num_ranks * accumulate * math.lcm(*range(least, most + 1))
    shares = f"{count(num_ranks * most, 'process')} with {count(accumulate, 'pass')} a step each"
    size = given(settings.batch_size, choices.batch_for(num_images, multiple))
    if size > num_images:
        raise FlagError(
            f"--batch-size: {count(size, 'image')} a step are more than the {num_images:,} to "
            "train on"
            if settings.batch_size != "auto"
            else f"there are {count(num_images, 'image')} to train on, fewer than {shares} need"
        )
    if size < 2 * multiple:
        raise FlagError(
            f"--batch-size: {count(size, 'image')} a step are too few for {shares}, which take two "
            f"images at least; take {2 * multiple} or more"
        )
    if size % multiple:
        lower = size // multiple * multiple
        raise FlagError(
            f"--batch-size: {shares} do not divide {size} images evenly; take {lower} or "
            f"{lower + multiple}"
        )
    return size


def given(value: Value | Literal["auto"], otherwise: Value) -> Value:
    """Return the user's value, or else the chosen one."""
    return otherwise if value == "auto" else value


def count(num: int, noun: str) -> str:
    """Return a number of things: "1 image", "1,437 images"."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{num:,} {noun if num == 1 else plural}"
