"""Finds labelled images in a folder or a table, and holds some of them out. No torch."""

import csv
import hashlib
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from inferpool.models.errors import DataError
from inferpool.models.files.image_table import COLUMNS, IMAGE_SUFFIXES, rows_of
from inferpool.models.files.writing import replacing

_PARTS = frozenset(
    ("train", "training", "val", "valid", "validation", "test", "testing"),
)
"""Names of folders that hold a part of the images, with a folder for each label inside."""
_NAMED = 8
"""The most names that a message lists."""
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are served too; see `models.vision.images`."""
_GRAY_MODES = ("1", "L", "LA", "I", "F", "I;16", "I;16B")
_MOST_DECODED = 200
_MOST_DECODED_PIXELS = 100_000_000
"""About two seconds of PNG files; JPEG files are decoded smaller."""
_SMALL_EDGE = 64
"""The least short edge, in pixels, that a JPEG file is decoded to in search of colours."""
_MOST_TINT = 8
"""Largest difference of two channels of gray, of 255."""


@dataclass(frozen=True)
class LabelledImages:
    """Images with the index of the label of each."""

    paths: Sequence[str]
    """Absolute paths; empty if the images come from a user's dataset."""
    targets: Sequence[int]
    """Index into `labels`, for each image."""
    labels: Sequence[str]

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.targets)

    @property
    def num_per_class(self) -> Sequence[int]:
        """Number of images of each label."""
        counts = Counter(self.targets)
        return [counts[index] for index in range(len(self.labels))]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """Facts about images, from a sample of them, for a choice of settings."""

    num_sampled: int
    num_unreadable: int
    """Files of the sample that are no images, by their first bytes."""
    reason: str = ""
    """Path of one of them, and why it cannot be read."""
    short_edge: int = 0
    """Median of the shorter edges, in pixels; 0 if none can be read."""
    aspect: float = 1.0
    """Median of the longer edge divided by the shorter one."""
    is_gray: bool = False
    """True if no image of the sample has a colour."""


def find_parts(source: Path, val: str, seed: int) -> tuple[LabelledImages, LabelledImages]:
    """Find the images to train on, and those to hold out. Blocks.

    Args:
        source: A folder with a subfolder of images for each label, or a CSV file.
        val: The share of each label's images to hold out, such as "0.2"; or another folder or CSV
            file of images to hold out.
        seed: Seed of the choice.

    Raises:
        DataError: The images cannot be used.
    """
    images = find_images(source)
    share = share_of(val)
    if share is None:
        return images, find_held_out(Path(val), images.labels)
    return split(images, share, seed)


def share_of(val: str) -> float | None:
    """Return the share that a text names; None if it names a folder or a file.

    Raises:
        DataError: It is a number, but no share.
    """
    try:
        share = float(val)
    except ValueError:
        return None
    if not 0 < share < 1:
        raise DataError(f"{val} is no share of the images to hold out; give one such as 0.2")
    return share


def find_images(source: Path) -> LabelledImages:
    """Find the images to train on, of at least two labels. Blocks.

    Args:
        source: A folder with a subfolder of images for each label (which may have subfolders), or a
            CSV file with the columns path and label. Its paths are relative to its folder.

    Raises:
        DataError: There is nothing to train on, or something is wrong with it.
    """
    images = _found(source)
    if len(images.labels) == 1:
        raise DataError(
            f"{source} has images of one label alone, {images.labels[0]!r}; a classifier needs two "
            "or more"
        )
    return images


def find_held_out(source: Path, labels: Sequence[str]) -> LabelledImages:
    """Find images to hold out; their labels are some of those that are trained. Blocks.

    Raises:
        DataError: There are none, or they have other labels.
    """
    images = _found(source)
    if others := sorted({*images.labels} - {*labels}):
        raise DataError(
            f"{source} has labels that no image to train on has: {_list(others)}; those to train "
            f"on have {_list(labels)}"
        )
    index_of = {label: index for index, label in enumerate(labels)}
    targets = [index_of[images.labels[target]] for target in images.targets]
    return LabelledImages(images.paths, targets, labels)


def split(images: LabelledImages, share: float, seed: int) -> tuple[LabelledImages, LabelledImages]:
    """Divide the images of each label into those to train on and those to hold out.

    The choice follows from the seed and from each path within the images' common folder, so that
    most images stay where they were after others have been added.

    Args:
        images: All images.
        share: Share to hold out, between 0 and 1; at least one image of each label is, and at least
            one is not.
        seed: Seed of the choice.

    Raises:
        DataError: A label has a single image.
    """
    counts = images.num_per_class
    if lonely := [label for label, num in zip(images.labels, counts, strict=True) if num == 1]:
        path = images.paths[images.targets.index(images.labels.index(lonely[0]))]
        raise DataError(
            f"there is a single image of {_list(lonely)}, such as {path}, which cannot be both "
            "trained on and held out; add images, or name others to hold out with --val"
        )
    root = len(os.path.commonpath([min(images.paths), max(images.paths)]))
    by_class: dict[int, list[tuple[bytes, int]]] = defaultdict(list)
    for index, (path, target) in enumerate(zip(images.paths, images.targets, strict=True)):
        text = f"{seed}\0{path[root:]}".encode("utf-8", "surrogateescape")
        by_class[target].append((hashlib.blake2b(text, digest_size=16).digest(), index))
    held_out = {
        index
        for ranked in by_class.values()
        for _, index in sorted(ranked)[: min(max(1, round(share * len(ranked))), len(ranked) - 1)]
    }
    every = range(len(images))
    return (
        _chosen(images, [index for index in every if index not in held_out]),
        _chosen(images, [index for index in every if index in held_out]),
    )


def survey(images: LabelledImages, most: int = 2000) -> ImageFacts:
    """Return facts about images, evenly spaced in their order. Blocks: 2,000 take a second.

    Only the first bytes of each are read, and up to 200 are decoded until one has a colour.
    """
    from PIL import Image

    num = min(most, len(images.paths))
    chosen = [images.paths[index * len(images.paths) // num] for index in range(num)]
    edges, aspects, modes = [], [], {}
    reason, num_unreadable = "", 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, about sizes and damaged metadata
        for path in chosen:
            try:
                with Image.open(path, formats=_FORMATS) as image:
                    short, long = sorted(image.size)
                    modes[path] = image.mode
            except Exception as error:  # damaged files make Pillow raise almost anything
                num_unreadable += 1
                reason = reason or f"{path}: {error}"
                continue
            edges.append(short)
            aspects.append(long / max(1, short))
        is_gray = bool(edges) and _are_gray(modes)
    return ImageFacts(
        num_sampled=num,
        num_unreadable=num_unreadable,
        reason=reason,
        short_edge=int(median(edges)) if edges else 0,
        aspect=median(aspects) if aspects else 1.0,
        is_gray=is_gray,
    )


def write_samples(path: Path, images: LabelledImages) -> None:
    """Write paths and labels as CSV, so that the file is there whole or not at all.

    Raises:
        OSError: It cannot be written.
    """
    with (
        replacing(path) as draft,
        draft.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file,
    ):
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        pairs = zip(images.paths, images.targets, strict=True)
        writer.writerows((each, images.labels[target]) for each, target in pairs)


def read_samples(path: Path, labels: Sequence[str]) -> LabelledImages:
    """Read what `write_samples` wrote. The images may be gone since then.

    Raises:
        DataError: It cannot be read, or has a label that is not one of these.
    """
    index_of = {label: index for index, label in enumerate(labels)}
    paths, targets = [], []
    for line, (name, label) in rows_of(path):
        if label not in index_of:
            raise DataError(f"{path}, line {line}: there is no label {label!r}")
        paths.append(name)
        targets.append(index_of[label])
    return LabelledImages(paths, targets, labels)


def _found(source: Path) -> LabelledImages:
    try:
        if source.is_dir():
            pairs = _of_folder(source)
        elif not source.exists():
            raise DataError(f"there is no folder or file {source}")
        elif source.suffix.lower() == ".csv":
            pairs = _of_table(source)
        else:
            raise DataError(f"{source} is neither a folder of images nor a .csv file")
    except OSError as error:
        where = error.filename or source
        raise DataError(f"{where} cannot be read: {error.strerror or error}") from error
    labels = sorted({label for _, label in pairs})
    index_of = {label: index for index, label in enumerate(labels)}
    paths = [path for path, _ in pairs]
    return LabelledImages(paths, [index_of[label] for _, label in pairs], labels)


def _of_folder(folder: Path) -> list[tuple[str, str]]:
    """Return the path and the label of each image in the subfolders."""
    folders = sorted(each for each in folder.iterdir() if each.is_dir() and _is_shown(each.name))
    if not folders:
        if any(_is_image(each.name) for each in folder.iterdir()):
            raise DataError(
                f"{folder} has images, but no subfolders: put the images of each label into a "
                "subfolder that has its name"
            )
        raise DataError(f"{folder} has no images: it needs a subfolder of images for each label")
    if {each.name.lower() for each in folders} <= _PARTS and _have_folders(folders):
        names = [each.name for each in folders]
        raise DataError(
            f"{folder} has the folders {_list(names)}, which are no labels: train on one of them, "
            "and name another as --val"
        )
    found: list[tuple[str, str]] = []
    for each in folders:
        if reason := unfit_label(each.name):
            raise DataError(f"{folder}: the subfolder {each.name!r} cannot be a label: {reason}")
        paths = sorted(_images_below(each.absolute()))
        if not paths:
            raise DataError(f"{each} has no images, so {each.name!r} cannot be a label")
        found.extend((path, each.name) for path in paths)
    return found


def _images_below(folder: Path) -> Iterator[str]:
    """Yield the images of a folder and of those inside it; links are followed, once each."""
    seen = set()
    for here, folders, files in os.walk(folder, followlinks=True, onerror=_fail):
        status = os.stat(here)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = [each for each in folders if _is_shown(each)]
        yield from (os.path.join(here, each) for each in files if _is_image(each))


def _of_table(table: Path) -> list[tuple[str, str]]:
    """Return the path and the label of each row, after a look at whether the file is there."""
    folder = str(table.absolute().parent)
    lines: dict[str, int] = {}
    found = []
    for line, (name, label) in rows_of(table):
        where = f"{table}, line {line}"
        name, label = name.lstrip(), label.strip()
        if reason := unfit_label(label):
            raise DataError(f"{where}: {label!r} cannot be a label: {reason}")
        path = os.path.normpath(os.path.join(folder, name))
        if not name or not os.path.isfile(path):
            raise DataError(f"{where}: there is no file {name!r} (looked for in {folder})")
        if path in lines:
            raise DataError(f"{where}: {name!r} is in line {lines[path]} too; list it once")
        lines[path] = line
        found.append((path, label))
    if not found:
        raise DataError(f"{table} names no images: there is no line after that of the columns")
    return found


def unfit_label(label: str) -> str:
    """Return why a text cannot be a label; empty if it can."""
    if not label.strip():
        return "it is empty"
    if len(label.splitlines()) > 1 or label.splitlines()[0] != label:
        return "it has a line break"
    try:
        label.encode()
    except UnicodeEncodeError:
        return "it is not UTF-8"
    return ""


def _are_gray(modes: Mapping[str, str]) -> bool:
    """Return whether no image has a colour, by their modes and the pixels of some of them."""
    from PIL import Image, ImageChops

    coloured = [path for path, mode in modes.items() if mode not in _GRAY_MODES]
    num = min(_MOST_DECODED, len(coloured))
    num_pixels = 0
    for path in (coloured[index * len(coloured) // num] for index in range(num)):
        try:
            with Image.open(path, formats=_FORMATS) as image:
                image.draft("RGB", (_SMALL_EDGE, _SMALL_EDGE))
                num_pixels += image.width * image.height
                if num_pixels > _MOST_DECODED_PIXELS:
                    break
                image.info.pop("transparency", None)
                red, green, blue = image.convert("RGB").split()
        except Exception:  # damaged; the training reports it
            continue
        for each in (green, blue):
            if any(ImageChops.difference(red, each).histogram()[_MOST_TINT + 1 :]):
                return False
    return True


def _have_folders(folders: Iterable[Path]) -> bool:
    return all(any(each.is_dir() for each in folder.iterdir()) for folder in folders)


def _chosen(images: LabelledImages, indices: Sequence[int]) -> LabelledImages:
    paths = [images.paths[index] for index in indices]
    return LabelledImages(paths, [images.targets[index] for index in indices], images.labels)


def _is_shown(name: str) -> bool:
    return not name.startswith(".")


def _is_image(name: str) -> bool:
    return _is_shown(name) and os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def _fail(error: OSError) -> None:
    raise error


def _list(names: Collection[str]) -> str:
    """Return names with commas between, the first few of many."""
    shown = ", ".join(map(repr, list(names)[:_NAMED]))
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"
