"""Judges the trained network as it will be served, and hands it over. Runs in all ranks."""

import csv
import io
import math
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import version

import msgspec
import numpy as np
import torch

from inferpool.models.base import load_model
from inferpool.models.errors import InputError
from inferpool.models.files.run_folder import Card, DataCard, RunFolder, ScoreCard
from inferpool.models.item import Item
from inferpool.models.sources.trained import TrainedClassifier
from inferpool.models.spec import Placement, TensorHeader
from inferpool.models.training.images import ImageFiles, ImageSource
from inferpool.models.training.recipe import Recipe
from inferpool.models.training.scores import wilson
from inferpool.workers.training.checkpoints import write_whole
from inferpool.workers.training.group import RankGroup

_BATCH = 8
_LEAST_SCORE = 1e-12
"""Scores are float32, and one of 0 would make the loss infinite."""
_PACKAGES = ("inferpool", "torch", "torchvision", "pillow")

Answer = tuple[int, int, float, float]
"""An image's number, the predicted class, its score, and the score of the right class."""


class FinalTrial:
    """The end of a run: its best weights, judged, with a card that says what they are."""

    def __init__(
        self, recipe: Recipe, folder: RunFolder, group: RankGroup, device: torch.device
    ) -> None:
        self._recipe = recipe
        self._folder = folder
        self._group = group
        self._device = device

    def judge(self, held_out: ImageSource) -> list[Answer]:
        """Return the served network's answers for this rank's part of the held-out images.

        The weights and the labels lie in the folder. Images that cannot be read are left out.
        """
        place = self._group.place
        model = TrainedClassifier(self._folder.path, card=self._card(_NO_DATA, _NO_SCORES))
        load_model(model, Placement(devices=(str(self._device),), num_threads=self._recipe.threads))
        answers: list[Answer] = []
        targets = held_out.targets
        mine = range(place.rank, len(targets), place.num_ranks)
        for begin in range(0, len(mine), _BATCH):
            read = [*self._read(model, held_out, mine[begin : begin + _BATCH])]
            if not read:
                continue
            with torch.inference_mode():
                batch = model.collate([features for _, features in read])
                outputs = model.forward(batch)
                outputs = model.postprocess({k: tensor.cpu() for k, tensor in outputs.items()})
            for (index, _), row in zip(read, outputs["probabilities"], strict=True):
                best = int(row.argmax())
                answers.append((index, best, float(row[best]), float(row[targets[index]])))
        return answers

    def write(
        self,
        answers: Sequence[Answer],
        training: ImageSource,
        held_out: ImageSource,
        *,
        faults: dict[str, str],
        best_epoch: int,
        seconds: float,
        images_per_s: float,
        began: str,
    ) -> Card:
        """Write the answers, the unreadable images and, last of all, the card.

        Raises:
            NoSpaceError: There is no room for one of them.
        """
        labels, targets = self._recipe.labels, held_out.targets
        table = _csv(
            ("path", "label", "predicted", "score"),
            (
                (held_out.name_of(i), labels[targets[i]], labels[found], f"{score:.6f}")
                for i, found, score, _ in answers
            ),
        )
        writer = self._group.place.rank
        write_whole(self._folder.predictions, table, writer=writer)
        skipped = _csv(("path", "reason"), sorted(faults.items()))
        write_whole(self._folder.skipped, skipped, writer=writer)
        num_right = sum(found == targets[i] for i, found, _, _ in answers)
        low, high = wilson(num_right, len(answers))
        losses = [-math.log(max(right, _LEAST_SCORE)) for *_, right in answers]
        counts = Counter([*training.targets, *targets])
        card = self._card(
            DataCard(
                source=self._recipe.data,
                num_training=len(training.targets),
                num_validation=len(targets),
                num_skipped=len(faults),
                per_class={label: counts[index] for index, label in enumerate(labels)},
            ),
            ScoreCard(
                accuracy=num_right / max(1, len(answers)),
                low=low,
                high=high,
                num_right=num_right,
                num_images=len(answers),
                loss=sum(losses) / max(1, len(losses)),
                epochs=self._recipe.epochs,
                best_epoch=best_epoch,
                seconds=round(seconds, 1),
                images_per_s=round(images_per_s, 1),
            ),
            began=began,
        )
        encoded = msgspec.json.format(msgspec.json.encode(card), indent=2)
        write_whole(self._folder.card, encoded, writer=writer)
        return card

    def _card(self, data: DataCard, scores: ScoreCard, *, began: str = "") -> Card:
        recipe = self._recipe
        return Card(
            model=recipe.model,
            options=recipe.options,
            transform=recipe.transform,
            data=data,
            scores=scores,
            versions={
                "python": platform.python_version(),
                **{name: version(name) for name in _PACKAGES},
            },
            command=recipe.command,
            began=began,
        )

    def _read(
        self, model: TrainedClassifier, source: ImageSource, indices: Sequence[int]
    ) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        for index in indices:
            try:
                yield index, dict(model.preprocess(_item(source, index)))
            except (InputError, OSError):
                continue


_NO_DATA = DataCard(source="", num_training=0, num_validation=0, per_class={})
_NO_SCORES = ScoreCard(
    accuracy=0.0,
    low=0.0,
    high=1.0,
    num_right=0,
    num_images=0,
    loss=0.0,
    epochs=0,
    best_epoch=0,
    seconds=0.0,
    images_per_s=0.0,
)


def _item(source: ImageSource, index: int) -> Item:
    """Return an image as a client would send it: a file's bytes, or pixels."""
    if isinstance(source, ImageFiles):
        return Item(kind="image", payload=memoryview(source.bytes_of(index)))
    pixels = np.asarray(source.read(index))
    header = TensorHeader("image", "uint8", pixels.shape, 0)
    return Item(kind="tensors", payload=memoryview(bytearray(pixels.tobytes())), headers=[header])


def _csv(columns: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue().encode("utf-8", "surrogateescape")
