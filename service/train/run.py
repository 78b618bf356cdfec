"""Trains as the settings say, from the images to a folder that can be served.

It runs in the command's process: it reads the images, plans, starts the ranks, and writes the
report. The ranks, in processes of their own, do the rest.
"""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import Literal

import msgspec

from inferpool.models.errors import DataError, ModelError
from inferpool.models.files.run_folder import RunFolder, read_card
from inferpool.models.files.writing import lock, replacing
from inferpool.models.texts import described, printable
from inferpool.models.training.events import AnyEvent, Noted, RunEnded, read_events
from inferpool.models.training.recipe import Recipe
from inferpool.models.training.samples import (
    ImageFacts,
    LabelledImages,
    find_parts,
    read_samples,
    share_of,
    split,
    survey,
    write_samples,
)
from inferpool.service.settings.names import FlagError
from inferpool.service.train.planning import Plan, plan
from inferpool.service.train.progress import TrainProgress
from inferpool.service.train.settings import TrainSettings, write_settings
from inferpool.workers.host.devices import Host, find_host
from inferpool.workers.host.nvml import GpuState, read_nvml

_MAY_CHANGE = (
    *("data", "device", "devices", "threads", "num_workers", "is_idle"),
    *("checkpoint_minutes", "command", "tensorboard"),
)
"""Fields of a recipe that may change when a run goes on: they change no weights."""
_BUSY = 0.1
"""Share of a GPU's memory in use above which others use it."""
_BF16_SINCE = (8, 0)
"""Compute capability of the first NVIDIA GPUs with bf16: CUDA C++ Programming Guide, table of
arithmetic instructions."""

How = Literal["new", "resume", "overwrite"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOutcome:
    """The end of a run."""

    status: Literal["done", "stopped", "failed"]
    reason: str = ""
    """One sentence, if it failed."""
    signum: int = 0
    """The signal that stopped it."""


@dataclass(frozen=True, slots=True)
class RunImages:
    """The images of a run."""

    training: LabelledImages
    held_out: LabelledImages
    facts: ImageFacts | None


def train(
    settings: TrainSettings, *, how: How, images_are_named: bool, command: str, is_quiet: bool
) -> TrainOutcome:
    """Train a network, and write a folder that can be served.

    Args:
        settings: The settings.
        how: How to begin: anew, or from a folder that exists.
        images_are_named: True if the images are given again for a resumed run.
        command: The command line, for the card.
        is_quiet: True to show nothing.

    Raises:
        FlagError: The settings do not fit the images, the network, the host or the folder.
    """
    _check_texts(settings)
    folder = RunFolder(Path(settings.output).absolute())
    if how == "overwrite" and Path(settings.weights).absolute().is_relative_to(folder.path):
        raise FlagError(f"--weights: {settings.weights} lies in the run that --overwrite removes")
    with _locked(folder, how):
        try:
            images = _images(settings, folder, how=how, images_are_named=images_are_named)
            planned = _planned(settings, images)
        except ModelError as error:
            raise FlagError(str(error)) from error
        recipe = msgspec.structs.replace(
            planned.recipe, command=command, tensorboard=settings.tensorboard
        )
        if how == "resume":
            _check_same(folder, recipe)
        try:
            if how != "resume":
                _clear(folder)
            _write(folder, planned, images, recipe)
        except OSError as error:
            raise FlagError(f"--output: {folder.path}: {error.strerror or error}") from error
        if not is_quiet:
            sys.stderr.writelines(f"{sentence}\n" for sentence in planned.sentences)
        return _run(folder, settings, planned, is_quiet=is_quiet)


def _run(
    folder: RunFolder, settings: TrainSettings, planned: Plan, *, is_quiet: bool
) -> TrainOutcome:
    from inferpool.workers.training.launch import RankLaunch, RanksLostError, run_ranks

    least, most = settings.num_nodes
    launch: RankLaunch = RankLaunch(
        num_ranks=planned.num_ranks,
        min_nodes=least,
        max_nodes=most,
        rendezvous=settings.rdzv,
        run_id=settings.rdzv_id,
        max_restarts=settings.max_restarts,
    )
    progress = TrainProgress(sys.stderr, folder.metrics, is_quiet=is_quiet)
    progress.start()
    signum, lost = 0, ""
    try:
        signum = run_ranks(
            folder.path, launch, lambda text: _append(folder, Noted, text=text, is_lasting=True)
        )
    except RanksLostError as error:
        lost = str(error)
    finally:
        progress.stop()
    outcome = _outcome(folder, signum, lost)
    _append(folder, RunEnded, status=outcome.status, reason=outcome.reason)
    if outcome.status == "done":
        _report(folder, planned, is_quiet=is_quiet)
    return outcome


def _outcome(folder: RunFolder, signum: int, lost: str) -> TrainOutcome:
    if folder.failed.exists():
        reason = folder.failed.read_text("utf-8") or "the disk is full"
        folder.failed.unlink()
        return TrainOutcome(status="failed", reason=reason)
    if lost:
        return TrainOutcome(status="failed", reason=lost)
    if folder.stopped.exists() or signum:
        folder.stopped.unlink(missing_ok=True)
        return TrainOutcome(status="stopped", signum=signum)
    return TrainOutcome(status="done")


def _report(folder: RunFolder, planned: Plan, *, is_quiet: bool) -> None:
    from inferpool.service.train.report import summary, write_report

    if not folder.card.exists():
        return
    card = read_card(folder.path)
    text = StringIO()
    write_settings(planned.settings, text)
    try:
        write_report(folder, card, settings=text.getvalue())
    except OSError as error:
        sys.stderr.write(f"the report cannot be written: {error.strerror or error}\n")
    if not is_quiet:
        sys.stdout.writelines(f"{line}\n" for line in summary(folder, card))


def _events(folder: RunFolder) -> list[AnyEvent]:
    if not folder.metrics.exists():
        return []
    with folder.metrics.open("rb") as lines:
        return list(read_events(lines))


def _append(folder: RunFolder, kind: Callable[..., AnyEvent], **facts: object) -> None:
    """Add a line to the metrics, with the step of the last one."""
    step = max((event.step for event in _events(folder)), default=0)
    event = kind(step=step, at=round(time.time(), 3), **facts)
    with contextlib.suppress(OSError), folder.metrics.open("ab") as file:
        file.write(msgspec.json.encode(event) + b"\n")


def _check_texts(settings: TrainSettings) -> None:
    """Refuse paths that a file of settings and a card cannot hold.

    Raises:
        FlagError: One is not UTF-8.
    """
    for name in ("data", "val", "output", "weights", "model", "dataset"):
        value = getattr(settings, name)
        if printable(value) != value:
            flag = "DATA" if name == "data" else f"--{name}"
            raise FlagError(f"{flag}: {printable(value)} is not UTF-8; rename it")


@contextlib.contextmanager
def _locked(folder: RunFolder, how: How) -> Iterator[None]:
    """Lock the folder of the run against other processes.

    Raises:
        FlagError: Another process has it, or the folder cannot be used.
    """
    where = f"--output: {folder.path}"
    if how == "resume" and not folder.recipe.exists():
        raise FlagError(f"--resume: there is no run to go on with in {folder.path}")
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        # A run that never began leaves its lock.
        if not folder.lock.exists() and any(folder.path.iterdir()):
            raise FlagError(f"{where} has other files; name a new folder")
        file = folder.lock.open("w")
    except OSError as error:
        raise FlagError(f"{where}: {error.strerror or error}") from error
    with file:
        try:
            lock(file)
        except BlockingIOError:
            raise FlagError(f"{where}: another process trains there") from None
        if how == "new" and folder.recipe.exists():
            raise FlagError(
                f"{where} holds a run: --resume goes on with it, --overwrite begins anew"
            )
        if how == "resume" and folder.card.exists():
            raise FlagError(
                f"the run in {folder.path} has ended: `inferpool serve {folder.path}` serves "
                "it, and --overwrite begins anew"
            )
        yield


def _clear(folder: RunFolder) -> None:
    """Remove the files of an earlier run, and nothing else."""
    for path in folder.files:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _images(
    settings: TrainSettings, folder: RunFolder, *, how: How, images_are_named: bool
) -> RunImages:
    """Find the images, or read the list of a run that has begun.

    Raises:
        DataError: They cannot be used.
    """
    if how != "resume":
        return _found(settings)
    before = msgspec.json.decode(folder.recipe.read_bytes(), type=Recipe)
    if not images_are_named:
        training, held_out = (
            read_samples(path, before.labels) for path in (folder.training, folder.validation)
        )
        return RunImages(training, held_out, None if settings.dataset else survey(training))
    images = _found(settings)
    if list(images.training.labels) != list(before.labels):
        raise DataError(
            f"the checkpoint in {folder.path} is for the labels {', '.join(before.labels)}, but "
            f"{settings.data} has {', '.join(images.training.labels)}"
        )
    for path, now in ((folder.training, images.training), (folder.validation, images.held_out)):
        if list(read_samples(path, before.labels).paths) != list(now.paths):
            raise DataError(
                f"{settings.data} has other images than when the run began; leave it out, and "
                "--resume goes on with those of then"
            )
    return images


def _found(settings: TrainSettings) -> RunImages:
    if not settings.dataset:
        training, held_out = find_parts(Path(settings.data), settings.val, settings.seed)
        return RunImages(training, held_out, survey(training))
    from inferpool.models.training.datasets import facts_of, labelled, open_dataset

    try:
        dataset = open_dataset(settings.dataset, settings.dataset_options)
        images, facts = labelled(dataset, settings.dataset), facts_of(dataset)
    except ModelError:
        raise
    except Exception as error:  # a user's dataset may raise anything
        raise DataError(f"{settings.dataset} fails: {described(error)}") from error
    if share_of(settings.val) is None:
        raise DataError("--val: of a --dataset, give the share to hold out, such as 0.2")
    training, held_out = split(images, float(settings.val), settings.seed)
    return RunImages(training, held_out, facts)


def _planned(settings: TrainSettings, images: RunImages) -> Plan:
    """Return the plan for the network on this host.

    Raises:
        ModelError: The network cannot be built, or has no weights.
        FlagError: The settings do not fit the images, the network or the host.
    """
    from inferpool.models.sources.networks import (
        build_classifier,
        can_compute,
        head_of,
        native_transform,
    )

    num_classes = len(images.training.labels)
    weights = None if settings.weights.lower() == "none" else settings.weights
    # With its weights: else each rank would download them, and find each fault again.
    network = build_classifier(
        settings.model, weights, num_classes=num_classes, options=settings.options
    )
    head_of(network, num_classes)
    host = find_host(
        os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER", "")
    )
    os.environ |= host.accelerator.environment  # for the ranks, which count GPUs in that order
    return plan(
        settings,
        images.training,
        images.held_out,
        images.facts,
        native=native_transform(settings.model, weights),
        fits=cache(lambda edge: can_compute(network, edge, num_classes)),
        host=host,
        has_bf16=partial(_has_bf16, host),
        busy=_busy(host),
    )


def _busy(host: Host) -> set[str]:
    """Return the UUIDs of GPUs with memory in use, for instance by a service."""
    return {
        gpu.uuid
        for gpu in _gpus(host)
        if gpu.total_bytes and (gpu.used_bytes or 0) > _BUSY * gpu.total_bytes
    }


def _has_bf16(host: Host, kind: str) -> bool:
    """Return whether all devices of a kind compute in bf16."""
    if kind == "cpu":
        return True
    capabilities = [gpu.capability for gpu in _gpus(host)]
    return bool(capabilities) and all(each and each >= _BF16_SINCE for each in capabilities)


def _gpus(host: Host) -> Sequence[GpuState]:
    return read_nvml(host.accelerator.library).gpus if host.gpus else ()


def _check_same(folder: RunFolder, recipe: Recipe) -> None:
    """Refuse to resume a run with other settings.

    Raises:
        FlagError: A setting that affects the weights has changed; the message names it.
    """
    before = msgspec.json.decode(folder.recipe.read_bytes(), type=Recipe)
    changed = [
        name
        for name in Recipe.__struct_fields__
        if name not in _MAY_CHANGE and getattr(before, name) != getattr(recipe, name)
    ]
    if changed:
        told = "; ".join(
            f"{name} was {getattr(before, name)!r} and is {getattr(recipe, name)!r}"
            for name in changed
        )
        raise FlagError(f"--resume goes on as the run began, but {told}")


def _write(folder: RunFolder, planned: Plan, images: RunImages, recipe: Recipe) -> None:
    write_samples(folder.training, images.training)
    write_samples(folder.validation, images.held_out)
    with folder.settings.open("w", encoding="utf-8") as file:
        write_settings(planned.settings, file)
    with replacing(folder.recipe) as draft:
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(recipe), indent=2))
