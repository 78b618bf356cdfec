"""A rank that writes the gradients of one batch: `torchrun -m … DIGITS OUTPUT`."""

import sys
from pathlib import Path

import torch

from inferpool.models.files.run_folder import TransformCard
from inferpool.models.sources.networks import build_classifier, head_of
from inferpool.models.training.augment import training_transform
from inferpool.models.training.images import EpochBatches, ImageFiles, TrainingImages, collate
from inferpool.models.training.learner import Learner
from inferpool.models.training.recipe import Recipe
from inferpool.models.training.samples import find_images
from inferpool.workers.training.group import RankGroup, RankPlace

_SEEN = TransformCard(resize=32, crop=32, mean=(0.5,) * 3, std=(0.5,) * 3)


def main(digits: str, output: str) -> None:
    group = RankGroup(RankPlace.from_environment(), torch.device("cpu"))
    images = find_images(Path(digits))
    recipe = Recipe(
        model="torchvision:resnet18",
        weights="none",
        options={},
        labels=images.labels,
        transform=_SEEN,
        epochs=1,
        head_only_epochs=0,
        batch_size=16,
        learning_rate=0.001,
        warmup=0.1,
        weight_decay=0.05,
        label_smoothing=0.1,
        ema_decay=0.0,
        augment="shift",
        flip=True,
        freeze_norm=True,
        precision="fp32",
        channels_last=False,
        seed=0,
        num_workers=0,
        checkpoint_minutes=5,
        device="cpu",
        threads=1,
        is_idle=False,
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
