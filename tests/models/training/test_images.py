from itertools import chain
from typing import get_args

import pytest
import torch
from PIL import Image

from inferpool.models.errors import ModelError
from inferpool.models.files.run_folder import TransformCard
from inferpool.models.sources.trained import transform_of
from inferpool.models.training.augment import training_transform
from inferpool.models.training.images import (
    EpochBatches,
    HeldOutImages,
    ImageFiles,
    TrainingImages,
    collate,
)
from inferpool.models.training.recipe import Augmentation
from inferpool.models.vision.photos import sample_jpegs

SEEN = TransformCard(resize=32, crop=32, mean=(0.5,) * 3, std=(0.5,) * 3)


@pytest.fixture
def photos(tmp_path):
    paths = []
    for number, data in enumerate(sample_jpegs()[:6]):
        paths.append(tmp_path / f"{number}.jpg")
        paths[-1].write_bytes(data)
    return paths


def images(paths, seed=0, augment="autoaugment"):
    source = ImageFiles([str(path) for path in paths], [i % 2 for i in range(len(paths))])
    return TrainingImages(source, training_transform(SEEN, augment, flip=True), seed=seed)


@pytest.mark.parametrize("augment", get_args(Augmentation))
def test_the_changes_of_an_image_depend_on_seed_epoch_and_index_alone(photos, augment):
    dataset = images(photos, augment=augment)
    torch.manual_seed(1)
    first = dataset[3, 2].pixels
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert torch.equal(dataset[3, 2].pixels, first)
    assert torch.equal(torch.get_rng_state(), before), "the network's random numbers stay"
    assert first.shape == (1, 3, 32, 32)
    assert first.dtype == torch.uint8
    others = [dataset[epoch, 2].pixels for epoch in range(8)]
    others += [images(photos, seed, augment)[3, 2].pixels for seed in range(1, 4)]
    assert not all(torch.equal(other, first) for other in others)


def test_the_next_image_of_its_class_stands_for_one_that_is_broken(photos):
    photos[2].write_bytes(b"junk")
    batch = collate([images(photos)[0, index] for index in range(6)])
    assert batch.indices == [0, 1, 4, 3, 4, 5]
    assert batch.targets.tolist() == [0, 1, 0, 1, 0, 1]
    assert [*batch.faults] == [2]
    assert "no image" in batch.faults[2]


def test_a_class_without_any_readable_image_is_an_error(photos):
    for path in photos[::2]:
        path.unlink()
    with pytest.raises(ModelError, match=r"no image of the class of .*0\.jpg can be read"):
        images(photos)[0, 0]


def test_held_out_images_are_seen_as_they_are_served(photos):
    photos[1].write_bytes(b"")
    transform = transform_of(SEEN)
    source = ImageFiles([str(path) for path in photos], [0] * 6)
    dataset = HeldOutImages(source, transform)
    batch = collate([dataset[index] for index in range(6)])
    assert batch.indices == [0, 2, 3, 4, 5]
    assert [*batch.faults] == [1]
    with Image.open(photos[0]) as image:
        exact = transform.pixels(image.convert("RGB")).permute(2, 0, 1)
    assert torch.equal(batch.pixels[0], exact)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_any_number_of_ranks_sees_the_same_images_in_each_step(accumulate):
    def steps(num_ranks, first_step=0):
        ranks = []
        for rank in range(num_ranks):
            batches = EpochBatches(
                50, batch_size=8, accumulate=accumulate, rank=rank, num_ranks=num_ranks, seed=3
            )
            batches.begin(2, first_step)
            found = [*batches]
            assert len(found) == len(batches)
            starts = range(0, len(found), accumulate)
            ranks.append([[*chain(*found[i : i + accumulate])] for i in starts])
        return [sorted(key for rank in ranks for key in rank[i]) for i in range(len(ranks[0]))]

    assert len(steps(1)) == 50 // 8
    assert steps(1) == steps(2) == steps(4)
    assert steps(2, first_step=4) == steps(1)[4:]
    seen = {index for step in steps(1) for _, index in step}
    assert len(seen) == 48
