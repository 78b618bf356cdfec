"""The gradients of one batch, computed by one rank or several."""

import os
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from inferpool.models.files.run_folder import TransformCard
from inferpool.models.sources.networks import build_classifier, head_of
from inferpool.models.training.augment import training_transform
from inferpool.models.training.images import EpochBatches, ImageFiles, TrainingImages, collate
from inferpool.models.training.learner import Learner
from inferpool.models.training.samples import find_images
from inferpool.workers.training.group import RankGroup, RankPlace
from tests.models.training.test_learner import RECIPE

_SEEN = TransformCard(resize=32, crop=32, mean=(0.5,) * 3, std=(0.5,) * 3)


def write_gradients(digits: Path, output: Path) -> None:
    """Have the first of several ranks write them. Runs in each rank."""
    torch.set_num_threads(1)
    found = gradients(digits, RankPlace.from_environment())
    if os.environ["RANK"] == "0":
        torch.save(found, output)


def gradients(digits: Path, place: RankPlace) -> dict[str, Tensor]:
    """Return the gradients by the names of their parameters. Runs in each rank."""
    group = RankGroup(place, torch.device("cpu"))
    images = find_images(digits)
    recipe = msgspec.structs.replace(
        RECIPE,
        model="torchvision:resnet18",
        labels=images.labels,
        batch_size=16,
        label_smoothing=0.1,
        ema_decay=0.0,
        freeze_norm=True,
    )
    torch.manual_seed(0)
    network = build_classifier(recipe.model, None, num_classes=10, options={}).double()
    batches = EpochBatches(
        len(images),
        batch_size=recipe.batch_size,
        accumulate=2,
        rank=place.rank,
        num_ranks=place.num_ranks,
        seed=0,
    )
    source = ImageFiles(images.paths, images.targets)
    dataset = TrainingImages(source, training_transform(_SEEN, "shift", flip=True), seed=0)
    learner = Learner(
        network, head_of(network, 10), recipe, num_steps=10, accumulate=2, wrap=group.wrap
    )
    learner.begin(head_only=False)
    keys = iter(batches)
    passes = [collate([dataset[key] for key in next(keys)]) for _ in range(2)]
    learner.gradients(passes)
    group.leave()
    found = {name: each.grad for name, each in network.named_parameters()}
    return {name: grad for name, grad in found.items() if grad is not None}
