"""The folder of a training run: its files, and the card that says what they are. No torch."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from inferpool.models.attached import CARD_FILE
from inferpool.models.errors import SourceError
from inferpool.models.files.kinds import what_it_is
from inferpool.models.files.reading import read_file

VERSION = 1


class TransformCard(msgspec.Struct, frozen=True, kw_only=True):
    """The way from a picture to a network's input; `ImageTransform` applies it."""

    resize: int
    """Short edge after resizing, in pixels."""
    crop: int
    """Both edges after cropping the middle, in pixels."""
    interpolation: Literal["bilinear", "bicubic", "nearest", "lanczos"] = "bilinear"
    mean: tuple[float, float, float]
    """Means of red, green and blue, each between 0 and 1."""
    std: tuple[float, float, float]


class DataCard(msgspec.Struct, frozen=True, kw_only=True):
    """The images that a run was trained and judged on."""

    source: str
    """The folder, table or dataset class, as the command named it."""
    num_training: int
    num_validation: int
    num_skipped: int = 0
    """Images that could not be read."""
    per_class: Mapping[str, int]
    """Number of images of each label, those of the validation included."""


class ScoreCard(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a run on its validation images, computed as `speed = "exact"` serves them."""

    accuracy: float
    low: float
    """Lower end of the 95 % confidence interval of the accuracy (Wilson, 1927)."""
    high: float
    num_right: int
    num_images: int
    loss: float
    epochs: int
    best_epoch: int
    """Epoch of the weights that are kept, counted from 1."""
    seconds: float
    """Time of the training, without pauses between restarts."""
    images_per_s: float
    """Images trained on each second, over all ranks."""


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """Contents and origin of a run's folder: `card.json`."""

    format: Literal["inferpool-run"] = "inferpool-run"
    version: int = VERSION
    model: str
    """Source of the network: `torchvision:NAME`, `efficientnet_lite0` or `package.module:Class`."""
    options: Mapping[str, object]
    """Keyword arguments of its builder, besides the number of classes."""
    transform: TransformCard
    data: DataCard
    scores: ScoreCard
    versions: Mapping[str, str]
    """Versions of inferpool, Python, torch, torchvision and Pillow."""
    command: str
    began: str
    """The moment of the start, in UTC (RFC 3339)."""


class _Versioned(msgspec.Struct):
    version: int


class RunFolder:
    """The files of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.card = path / CARD_FILE
        """The card; it is written last, so a folder that has it can be served."""
        self.weights = path / "model.safetensors"
        """Weights of the best epoch, as safetensors."""
        self.labels = path / "labels.txt"
        """Names of the classes, one a line, by index."""
        self.settings = path / "train.toml"
        """All settings of the run, as a file for `inferpool train --config`."""
        self.recipe = path / "recipe.json"
        """The `Recipe` that the ranks read, as JSON."""
        self.training = path / "training.csv"
        """Paths and labels of the images that are trained on, as CSV."""
        self.validation = path / "validation.csv"
        """Paths and labels of the images that are held out, as CSV; absolute paths."""
        self.predictions = path / "predictions.csv"
        """Answers for the held-out images, as CSV: path, label, predicted, score."""
        self.skipped = path / "skipped.csv"
        """Images that could not be read, with the reasons, as CSV: path, reason."""
        self.metrics = path / "metrics.jsonl"
        """The events of the run, as lines of JSON; see `models.training.events`."""
        self.tensorboard = path / "tensorboard"
        """The folder of TensorBoard's event files."""
        self.report = path / "report.html"
        """The report, as a page."""
        self.checkpoints = path / "checkpoints"
        """The folder of checkpoints."""
        self.nan = path / "nan"
        """The folder of the batches at which the loss became NaN."""
        self.failed = path / "failed"
        """The reason why the ranks gave up, in one sentence, while the command goes on."""
        self.stopped = path / "stopped"
        """A mark that the ranks were told to stop, while the command goes on."""
        self.lock = path / "lock"
        """The file that a process which writes to the folder has locked."""

    @property
    def files(self) -> list[Path]:
        """All that a run may leave, besides the lock."""
        return [each for each in vars(self).values() if each not in (self.path, self.lock)]


def is_run(path: Path) -> bool:
    """Return whether a path is the folder of a run that has ended well."""
    return os.path.isfile(path / CARD_FILE)  # never raises, for any text


def has_begun(path: Path) -> bool:
    """Return whether a path is the folder of a run, which may not have ended."""
    return os.path.isfile(RunFolder(path).recipe)


def why_no_run(folder: Path) -> str:
    """Return why a path is not the folder of a run that has ended well, and what to do."""
    if has_begun(folder):
        return (
            f"the run in {folder} has not ended: `inferpool train --output {folder} --resume` goes "
            "on with it"
        )
    if known := what_it_is(folder):
        return known
    if os.path.isfile(folder):
        return f"{folder} is a file of an unknown kind, and no folder of a training run"
    if os.path.isdir(folder):
        text = f"{folder} is no folder of a finished training run: it has no {CARD_FILE}"
        is_network = os.path.isfile(folder / "config.json")
        return text if is_network else f"{text}; nor one of transformers: it has no config.json"
    return f"there is no folder {folder} (looked for from {Path.cwd()})"


def read_card(folder: Path) -> Card:
    """Read the card of a run.

    Raises:
        SourceError: The folder has none, or it cannot be read.
    """
    path = folder / CARD_FILE
    try:
        content = read_file(path)
        version = msgspec.json.decode(content, type=_Versioned).version
        if version > VERSION:
            raise SourceError(
                f"{path} has version {version}, but this inferpool reads versions up to {VERSION}"
            )
        return msgspec.json.decode(content, type=Card)
    except (FileNotFoundError, NotADirectoryError):
        raise SourceError(why_no_run(folder)) from None
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SourceError(f"{path} is no card of a training run: {error}") from error


def read_labels(folder: Path) -> list[str]:
    """Read the names of a run's classes, by index.

    Raises:
        SourceError: They cannot be read.
    """
    path = RunFolder(folder).labels
    try:
        return path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"the labels in {path} cannot be read: {error}") from error
