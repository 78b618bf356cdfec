"""One rank of a training run: `torchrun -m inferpool.workers.training.rank RUN`.

`inferpool train` starts the ranks so. They read the recipe and the lists of images in the run's
folder, go on from its newest checkpoint if there is one, and leave a network that can be served.
A rank that cannot go on leaves the reason there and ends well, so that nobody starts it again.
"""

import contextlib
import hashlib
import os
import sys
import traceback
from collections.abc import Mapping
from multiprocessing import resource_tracker
from multiprocessing.forkserver import ensure_running, set_forkserver_preload
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, Subset

from inferpool.models.accelerator.device import is_accelerator, name_of, select
from inferpool.models.accelerator.failures import is_lost_device, raised
from inferpool.models.errors import ModelError
from inferpool.models.files.checkpoint import load_weights
from inferpool.models.files.run_folder import RunFolder
from inferpool.models.sources.networks import build_classifier, head_of
from inferpool.models.sources.trained import transform_of
from inferpool.models.training.augment import training_transform
from inferpool.models.training.datasets import images_of
from inferpool.models.training.events import Noted, Started
from inferpool.models.training.images import (
    EpochBatches,
    HeldOutImages,
    ImageSource,
    TrainingImages,
    collate,
)
from inferpool.models.training.learner import Learner
from inferpool.models.training.recipe import Recipe
from inferpool.models.training.samples import read_samples
from inferpool.workers.inside.allocator import keep_large_buffers
from inferpool.workers.shared.guard import (
    die_with_front_end,
    die_with_parent,
    give_children_defaults,
    give_way_for_memory,
)
from inferpool.workers.training.board import open_board
from inferpool.workers.training.checkpoints import (
    Checkpoints,
    NoSpaceError,
    decoded,
    room_error,
    save_weights,
    write_whole,
)
from inferpool.workers.training.course import Course, HeldOut, TrainingError
from inferpool.workers.training.final import FinalTrial
from inferpool.workers.training.fitting import most_images
from inferpool.workers.training.group import RankGroup, RankPlace
from inferpool.workers.training.metrics import MetricsFile, now
from inferpool.workers.training.stopping import StopWatch, without_signals

_LOST = 1
"""Exit status of a rank that has lost another one: all start again."""
_LOSSES = ("gloo", "Gloo", "NCCL", "Connection", "DataLoader worker", "Broken pipe")
"""Words in errors that say that another process is lost."""
_PREFETCHED = 4
_LEAST_IMAGES = 2
"""Images of a pass: batch norms need more than one."""


def main(argv: list[str]) -> int:
    """Train as the recipe in a folder says; return the exit status."""
    folder = RunFolder(Path(argv[0]))
    die_with_parent(os.getppid())
    give_way_for_memory()
    stop = StopWatch()
    give_children_defaults()
    place = RankPlace.from_environment()
    if folder.failed.exists() and not place.has_several_hosts:
        return 0  # another rank has said why nobody can go on
    try:
        _run(folder, place, stop)
    except _AllKnowError as error:
        _give_up(folder, str(error))
        return 0
    except (TrainingError, ModelError, NoSpaceError) as error:
        _give_up(folder, str(error))
        return _LOST if place.has_several_hosts else 0  # once more, so that all hosts learn why
    except raised() as error:  # a user's network or dataset may raise anything
        is_other = isinstance(error, distributed.DistError | EOFError) or is_lost_device(error)
        if is_other or any(word in str(error) for word in _LOSSES):
            return _LOST
        traceback.print_exc()
        _give_up(folder, f"{type(error).__name__}: {error}")
        return _LOST if place.has_several_hosts else 0
    finally:
        stop.end()
    return 0


class _AllKnowError(Exception):
    """The ranks of all hosts know why nobody can go on."""


def _run(folder: RunFolder, place: RankPlace, stop: StopWatch) -> None:
    recipe = msgspec.json.decode(folder.recipe.read_bytes(), type=Recipe)
    if recipe.is_idle and hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    torch.set_num_threads(recipe.threads)
    keep_large_buffers()
    device = torch.device(recipe.device)
    if recipe.devices:
        device = torch.device(recipe.device, recipe.devices[place.local_rank])
        select(device)
    group = RankGroup(place, device)
    if place.has_several_hosts:
        _agree(recipe, folder, group)
    course = _prepared(recipe, folder, group, device, stop)
    try:
        stop.begin()
        if course.run():
            stop.pause()
            _hand_over(course)
        elif group.keeps_files:
            folder.stopped.touch()
    finally:
        if course.metrics is not None:
            course.metrics.close()
    group.leave()


def _agree(recipe: Recipe, folder: RunFolder, group: RankGroup) -> None:
    """Check that all hosts train the same, and that none of them has given up.

    Raises:
        _AllKnowError: One has given up.
        TrainingError: They do not train the same.
    """
    reason = folder.failed.read_text("utf-8") if folder.failed.exists() else ""
    if reasons := [str(each) for each in group.gather(reason) if each]:
        raise _AllKnowError(reasons[0])
    own = {**dict.fromkeys(("data", "command", "device", "weights"), ""), "devices": ()}
    same = msgspec.structs.replace(recipe, **own, threads=0, num_workers=0, is_idle=False)
    digest = hashlib.sha256(msgspec.json.encode(same))
    for path in (folder.training, folder.validation):
        images = read_samples(path, recipe.labels)
        for name, target in zip(images.paths, images.targets, strict=True):
            digest.update(f"{os.path.basename(name)}\0{target}\0".encode(errors="replace"))
    if len({*map(str, group.gather(digest.hexdigest()))}) > 1:
        raise TrainingError(
            "the hosts do not train the same: give all of them the same images and settings, and "
            "as many processes; --batch-size must be given if their numbers of GPUs differ"
        )


def _prepared(
    recipe: Recipe, folder: RunFolder, group: RankGroup, device: torch.device, stop: StopWatch
) -> Course:
    place = group.place
    torch.manual_seed(recipe.seed)  # all ranks build the same network
    network, head = _network(recipe, device)
    torch.manual_seed(_seed_of(recipe, place.rank, "network"))
    training, held_out = (
        images_of(recipe, read_samples(path, recipe.labels))
        for path in (folder.training, folder.validation)
    )
    checkpoints = Checkpoints(folder.checkpoints, writer=place.rank)
    if group.keeps_files:
        _make_room(folder, checkpoints, network, recipe)
    accumulate, note = _accumulated(recipe, network, group, device)
    batches = EpochBatches(
        len(training.targets),
        batch_size=recipe.batch_size,
        accumulate=accumulate,
        rank=place.rank,
        num_ranks=place.num_ranks,
        seed=recipe.seed,
    )
    learner = Learner(
        network,
        head,
        recipe,
        num_steps=batches.num_steps * recipe.epochs,
        accumulate=accumulate,
        wrap=group.wrap,
    )
    several = _reading(recipe, device, place.rank)
    dataset = TrainingImages(
        training,
        training_transform(recipe.transform, recipe.augment, flip=recipe.flip),
        seed=recipe.seed,
    )
    pixels = recipe.batch_size // (place.num_ranks * accumulate)
    checkpoint = _checkpoint(checkpoints, group)
    course = Course(
        recipe=recipe,
        folder=folder,
        group=group,
        device=device,
        learner=learner,
        source=training,
        checkpoints=checkpoints,
        batches=batches,
        training=DataLoader(dataset, batch_sampler=batches, collate_fn=collate, **several),
        held_out=_own_part(held_out, place, recipe, batch_size=2 * pixels, **several),
        held_out_source=held_out,
        stop=stop,
        metrics=None,
    )
    if checkpoint is not None:
        course.restore(checkpoint)
        _share_best(course)
    _announce(course, note, len(training.targets), len(held_out.targets))
    return course


def _make_room(
    folder: RunFolder, checkpoints: Checkpoints, network: nn.Module, recipe: Recipe
) -> None:
    """Create the folder of checkpoints.

    Raises:
        TrainingError: They will not fit on the disk.
    """
    folder.checkpoints.mkdir(exist_ok=True)
    has_average, used = bool(recipe.ema_decay), checkpoints.num_bytes
    if reason := room_error(folder.path, network, has_average=has_average, used=used):
        raise TrainingError(reason)


def _own_part(
    images: ImageSource, place: RankPlace, recipe: Recipe, *, batch_size: int, **reading: Any
) -> HeldOut:
    """Return the held-out images that this rank computes."""
    mine = range(place.rank, len(images.targets), place.num_ranks)
    trial = Subset(HeldOutImages(images, transform_of(recipe.transform)), mine)
    loader = DataLoader(trial, batch_size=batch_size, collate_fn=collate, **reading)
    return HeldOut(loader, images, num_bytes=len(mine) * 3 * recipe.transform.crop**2)


def _seed_of(recipe: Recipe, rank: int, use: str) -> int:
    """Return a seed for a rank, which no run with another seed has for any rank."""
    digest = hashlib.sha256(f"{recipe.seed} {rank} {use}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # all 63 bits that torch has


def _network(recipe: Recipe, device: torch.device) -> tuple[nn.Module, nn.Module]:
    num_classes = len(recipe.labels)
    weights = None if recipe.weights == "none" else recipe.weights
    network = build_classifier(
        recipe.model, weights, num_classes=num_classes, options=recipe.options
    )
    if recipe.channels_last:
        network = network.to(memory_format=torch.channels_last)
    network = network.to(device)
    if recipe.sync_batchnorm:
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    return network, head_of(network, num_classes)


def _accumulated(
    recipe: Recipe, network: nn.Module, group: RankGroup, device: torch.device
) -> tuple[int, str]:
    """Return how many passes make a step, and what to say if they are more than was asked for.

    Raises:
        TrainingError: Not even two images fit into the memory.
    """
    edge, place = recipe.transform.crop, group.place
    if recipe.batch_size % (place.num_ranks * recipe.accumulate):
        raise TrainingError(
            f"a batch of {recipe.batch_size} images cannot be divided evenly among "
            f"{place.num_ranks} processes with {recipe.accumulate} passes each: name "
            "another number of processes"
        )
    fits = group.least(most_images(network, edge, device, place.num_local))
    accumulate = recipe.accumulate
    while (images := recipe.batch_size // (place.num_ranks * accumulate)) > fits:
        if images <= _LEAST_IMAGES or images % 2:
            raise TrainingError(
                f"the memory of {name_of(device)} has room for {fits} images of {edge} x {edge} at "
                f"once, and {recipe.model} is to train on {images}: give a smaller --batch-size or "
                "--image-size"
            )
        accumulate *= 2
    if accumulate == recipe.accumulate:
        return accumulate, ""
    return accumulate, (
        f"the memory of {name_of(device)} has room for {fits} images at once: each step takes "
        f"{accumulate} passes of {images} images"
    )


def _checkpoint(checkpoints: Checkpoints, group: RankGroup) -> dict[str, Any] | None:
    """Return the newest checkpoint of all ranks, which may be on another host."""
    steps = group.gather(checkpoints.newest_step)
    newest = max(int(str(step)) for step in steps)
    if not newest:
        return None
    source = steps.index(newest)
    data = checkpoints.read() if steps[group.place.rank] == newest else None
    if any(step != newest for step in steps):
        data = group.broadcast(data if group.place.rank == source else None, source)
    assert data is not None, "a rank has it, or was sent it"
    return decoded(data)


def _share_best(course: Course) -> None:
    """Send the best weights to hosts that have joined since; any may be the first."""
    path = course.checkpoints.best(course.state.best_epoch)
    if not course.state.best_epoch:
        return
    has = [bool(each) for each in course.group.gather(path.exists())]
    if all(has) or not any(has):
        return
    source = has.index(True)
    is_source = course.group.place.rank == source
    data = course.group.broadcast(path.read_bytes() if is_source else None, source)
    if course.group.keeps_files and not path.exists():
        write_whole(path, data, writer=course.group.place.rank)


def _reading(recipe: Recipe, device: torch.device, rank: int) -> Mapping[str, Any]:
    """Return how a `DataLoader` reads images."""
    # It draws a number whenever it begins: from its own generator, or a run that goes on in the
    # middle of an epoch would have drawn more of them. Its readers are seeded with that number.
    generator = torch.Generator().manual_seed(_seed_of(recipe, rank, "readers"))
    common = {"pin_memory": is_accelerator(device), "generator": generator}
    if not recipe.num_workers:
        return common
    set_forkserver_preload(["torch", "inferpool.models.training.images"])
    resource_tracker.ensure_running()  # else the forkserver starts it, and it unblocks signals
    with without_signals():  # torchrun's agent sends them to the readers, too
        ensure_running()
    return {
        **common,
        "num_workers": recipe.num_workers,
        "multiprocessing_context": "forkserver",
        "persistent_workers": True,
        "prefetch_factor": _PREFETCHED,
        "worker_init_fn": _begin_reader,
    }


def _begin_reader(number: int) -> None:
    die_with_front_end()
    give_way_for_memory()


def _announce(course: Course, note: str, num_training: int, num_validation: int) -> None:
    """Begin the metrics, and report the ranks and the images."""
    group, recipe, step = course.group, course.recipe, course.state.step
    devices = [str(name) for name in group.gather(name_of(course.device))]
    if group.is_first:
        board = None
        if recipe.tensorboard:
            board = open_board(course.folder.tensorboard, purge_step=step + 1)
        course.metrics = MetricsFile(course.folder.metrics, after_step=step, board=board)
    course.tell(
        Started(
            step=step,
            at=now(),
            num_steps=course.batches.num_steps * recipe.epochs,
            num_epochs=recipe.epochs,
            num_ranks=group.place.num_ranks,
            devices=devices,
            batch_size=recipe.batch_size,
            num_training=num_training,
            num_validation=num_validation,
        )
    )
    if note:
        course.tell(Noted(step=step, at=now(), text=note))


def _hand_over(course: Course) -> None:
    """Write the best weights, judge them as they will be served, and write the card."""
    group, folder, recipe, state = course.group, course.folder, course.recipe, course.state
    writer = group.place.rank
    if group.keeps_files:  # each host has all of it, since any of them may be asked to serve it
        network, _ = _network(msgspec.structs.replace(recipe, weights="none"), torch.device("cpu"))
        load_weights(network, course.checkpoints.best(state.best_epoch))
        save_weights(folder.weights, network, writer=writer)
        labels = "".join(f"{label}\n" for label in recipe.labels)
        write_whole(folder.labels, labels.encode(), writer=writer)
    group.wait()
    seconds = course.seconds
    final = FinalTrial(recipe, folder, group, course.device)
    gathered = group.gather(final.judge(course.held_out_source))
    if group.keeps_files:
        final.write(
            sorted(answer for found in gathered for answer in found),  # type: ignore[attr-defined]
            course.source,
            course.held_out_source,
            faults=state.faults,
            best_epoch=state.best_epoch,
            seconds=seconds,
            images_per_s=state.step * recipe.batch_size / max(seconds, 1e-9),
            began=state.began_at,
        )
        course.checkpoints.remove()
    group.wait()


def _give_up(folder: RunFolder, reason: str) -> None:
    """Leave the reason; the first rank's counts."""
    with (
        contextlib.suppress(OSError),  # it is there already, or the disk is full
        folder.failed.open("x", encoding="utf-8", errors="backslashreplace") as file,
    ):
        file.write(" ".join(reason.split()))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
