"""A rank that writes the gradients of one batch: `torchrun -m … DIGITS OUTPUT`."""

import sys
from pathlib import Path

import msgspec
import torch

from inferpool.models.files.run_folder import TransformCard
from inferpool.models.sources.networks import build_classifier, head_of
from inferpool.models.training.augment import training_transform
from inferpool.models.training.images import EpochBatches, ImageFiles, TrainingImages, collate
from inferpool.models.training.learner import Learner
from inferpool.models.training.samples import find_images
from inferpool.workers.training.group import RankGroup, RankPlace
from tests.models.training.test_learner import RECIPE

_SEEN = TransformCard(resize=32, crop=32, mean=(0.5,) * 3, std=(0.5,) * 3)


def main(digits: str, output: str) -> None:
    group = RankGroup(RankPlace.from_environment(), torch.device("cpu"))
    images = find_images(Path(digits))
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
    place = group.place
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
    if group.is_first:
        torch.save({name: p.grad for name, p in network.named_parameters()}, output)
    group.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
