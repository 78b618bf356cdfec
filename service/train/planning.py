"""Turns settings and images into the recipe of a training run, and explains the choices.

It runs in the command's process, before anything is computed. No torch.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from inferpool.models.files.run_folder import TransformCard
from inferpool.models.training.recipe import Recipe
from inferpool.models.training.samples import ImageFacts, LabelledImages
from inferpool.service.settings.names import FlagError
from inferpool.service.train import choices
from inferpool.service.train.parts import (
    CPU,
    TrainLengths,
    TrainMachine,
    TrainView,
    count,
    given,
    lengths_for,
    machine_for,
    view_for,
)
from inferpool.service.train.settings import TrainSettings
from inferpool.workers.host.devices import Host

_LONG = 2.0
"""Ratio of the edges above which the plan says that the ends of images are not seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The decisions before a training run begins."""

    recipe: Recipe
    settings: TrainSettings
    """The settings with the choices. Those that depend on the host stay `auto`."""
    num_ranks: int
    """Ranks of this host."""
    sentences: Sequence[str]
    """Lines for the user, in the order to be shown."""


def plan(
    settings: TrainSettings,
    training: LabelledImages,
    validation: LabelledImages,
    facts: ImageFacts | None,
    *,
    native: TransformCard | None,
    fits: Callable[[int], bool],
    host: Host,
    has_bf16: Callable[[str], bool],
    busy: Collection[str] = (),
) -> Plan:
    """Decide all numbers of a training run.

    Args:
        settings: The user's settings.
        training: Images to train on.
        validation: Images that are held out.
        facts: Facts about the images; None if they are unknown.
        native: Preparation of images for the network's published weights; None if unknown.
        fits: Returns whether the network accepts images with this edge, in pixels.
        host: The devices of this host.
        has_bf16: Returns whether a kind of device, such as "cpu", computes in bf16.
        busy: UUIDs of GPUs that others use; they are used only if they are named.

    Raises:
        FlagError: The settings do not fit the images, the network or this host.
    """
    _check_images(training, validation, facts)
    machine = machine_for(settings, host, has_bf16, busy)
    shown = view_for(settings, training, facts, native, fits)
    lengths = lengths_for(settings, training, machine)
    recipe = _recipe(settings, training, facts, host, machine, shown, lengths)
    chosen = _chosen(settings, recipe)
    sentences = [
        *_on_images(training, validation, facts, shown),
        *_on_view(facts, shown),
        *_on_lengths(settings, lengths),
        *_on_machine(settings, machine, recipe, host),
    ]
    if chosen:
        named = " ".join(_flag(name, value) for name, value in chosen.items())
        sentences.append(f"chosen by itself: {named}")
    return Plan(
        recipe=recipe,
        settings=settings.model_copy(update=chosen),
        num_ranks=machine.num_ranks,
        sentences=sentences,
    )


def _recipe(
    settings: TrainSettings,
    training: LabelledImages,
    facts: ImageFacts | None,
    host: Host,
    machine: TrainMachine,
    shown: TrainView,
    lengths: TrainLengths,
) -> Recipe:
    on_cpu = machine.device == CPU
    threads = given(settings.threads, max(1, host.num_cores // machine.num_ranks))
    return Recipe(
        model=settings.model,
        weights="none" if settings.weights.lower() == "none" else settings.weights,
        options=dict(settings.options),
        labels=list(training.labels),
        transform=shown.transform,
        data=settings.data or settings.dataset,
        dataset=settings.dataset,
        dataset_options=dict(settings.dataset_options),
        epochs=lengths.epochs,
        head_only_epochs=lengths.head_only_epochs,
        batch_size=lengths.batch_size,
        accumulate=lengths.accumulate,
        learning_rate=lengths.learning_rate,
        warmup=settings.warmup,
        weight_decay=settings.weight_decay,
        label_smoothing=settings.label_smoothing,
        ema_decay=lengths.ema_decay,
        class_weights=choices.balanced(training.num_per_class)
        if settings.class_weights == "balanced"
        else None,
        augment=shown.augment,
        flip=shown.flip,
        freeze_norm=settings.freeze_norm,
        sync_batchnorm=settings.sync_batchnorm,
        precision=machine.precision,
        channels_last=given(settings.channels_last, not on_cpu and machine.precision == "bf16"),
        seed=settings.seed,
        num_workers=given(
            settings.workers,
            choices.readers_for(
                len(training), facts, host.num_cores // machine.num_ranks, on_cpu=on_cpu
            ),
        ),
        checkpoint_minutes=settings.checkpoint_minutes,
        device=machine.device,
        devices=machine.indices,
        threads=threads,
        is_idle=on_cpu and settings.priority == "idle",
    )


def _check_images(
    training: LabelledImages, validation: LabelledImages, facts: ImageFacts | None
) -> None:
    if len(training.labels) < 2:
        raise FlagError("a classifier needs images of two labels or more")
    if not len(validation):
        raise FlagError("--val: no image is held out, so nothing would judge the network")
    if facts and facts.num_sampled and facts.num_unreadable == facts.num_sampled:
        raise FlagError(
            f"none of the {count(facts.num_sampled, 'file')} looked at can be read as an image, "
            f"such as {facts.reason}"
        )


def _on_images(
    training: LabelledImages, validation: LabelledImages, facts: ImageFacts | None, view: TrainView
) -> Iterator[str]:
    kind = f" ({view.reason}: not mirrored)" if view.reason else ""
    yield (
        f"{count(len(training), 'image')} to train on, {len(validation):,} held out, "
        f"{count(len(training.labels), 'label')}{kind}"
    )
    if shared := len({*training.paths} & {*validation.paths}):
        yield (
            f"{count(shared, 'image')} held out are also trained on, so the accuracy will be "
            "better than it is for new ones"
        )
    if facts and facts.num_unreadable:
        yield (
            f"{facts.num_unreadable:,} of {facts.num_sampled:,} images looked at cannot be read, "
            f"such as {facts.reason}"
        )


def _on_view(facts: ImageFacts | None, view: TrainView) -> Iterator[str]:
    edge = view.transform.crop
    if not facts or not facts.short_edge:
        yield f"the network sees {edge} x {edge} pixels"
        return
    short = facts.short_edge
    size = f"{short} x {short}" if facts.aspect == 1 else f"{short} along the shorter edge"
    yield f"most images have {size} pixels; the network sees {edge} x {edge}"
    if facts.aspect >= _LONG:
        yield (
            f"most images are {facts.aspect:.1f} times as long as wide, and only the middle of "
            "each is seen"
        )


def _on_lengths(settings: TrainSettings, lengths: TrainLengths) -> Iterator[str]:
    if settings.has_weights:
        origin = f"from the weights {settings.weights}"
    elif settings.weights.lower() == "none":
        origin = "from random weights"
    else:
        origin = "from weights as the class makes them"
    yield (
        f"{count(lengths.epochs, 'epoch')} of {count(lengths.steps_per_epoch, 'step')} of "
        f"{count(lengths.batch_size, 'image')}, rate {lengths.learning_rate:g}, {origin}"
    )
    if lengths.head_only_epochs:
        yield (
            f"the last layer alone is trained in the first "
            f"{count(lengths.head_only_epochs, 'epoch')}"
        )


def _on_machine(
    settings: TrainSettings, machine: TrainMachine, recipe: Recipe, host: Host
) -> Iterator[str]:
    ranks, threads = count(machine.num_ranks, "process"), count(recipe.threads, "thread")
    each = " each" if machine.num_ranks > 1 else ""
    if machine.names:
        yield f"{ranks} on {', '.join(machine.names)}, in {recipe.precision}"
    else:
        idle = ", on cores that nobody else wants" if recipe.is_idle else ""
        yield f"{ranks} on the CPU with {threads}{each}{idle}, in {recipe.precision}"
        if machine.num_ranks > host.num_cores:
            yield (
                f"they share {count(host.num_cores, 'core')}, so fewer processes would be faster"
            )
        if host.problem and settings.devices == "auto":
            yield f"no GPU is used: {host.problem}"
    if settings.nodes != "1":
        yield f"{settings.nodes.replace(':', ' to ')} hosts meet at {settings.rdzv}"


def _chosen(settings: TrainSettings, recipe: Recipe) -> dict[str, object]:
    """Return the choices for settings that were `auto`, without those that depend on the host."""
    values: dict[str, object] = {
        "epochs": recipe.epochs,
        "head_only_epochs": recipe.head_only_epochs,
        "batch_size": recipe.batch_size,
        "accumulate": recipe.accumulate,
        "learning_rate": recipe.learning_rate,
        "ema_decay": recipe.ema_decay,
        "augment": recipe.augment,
        "flip": recipe.flip,
        "image_size": recipe.transform.crop,
        "precision": recipe.precision,
        "channels_last": recipe.channels_last,
    }
    return {name: value for name, value in values.items() if getattr(settings, name) == "auto"}


def _flag(name: str, value: object) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value:g}" if isinstance(value, float) else f"--{flag} {value}"
