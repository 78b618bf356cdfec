"""Finds the versions of models in a folder, and what each is."""

import os
import tomllib
from dataclasses import dataclass
from errno import EFBIG
from pathlib import Path
from typing import Any

from inferpool.models.attached import MODEL_FILE_SUFFIXES
from inferpool.models.errors import DataError
from inferpool.models.files.hugging_face import form_of
from inferpool.models.files.image_table import rows_of
from inferpool.models.files.kinds import ARCHIVE_MANIFEST
from inferpool.models.files.reading import read_file
from inferpool.models.files.run_folder import RunFolder, has_begun, is_run, why_no_run
from inferpool.service.settings.model import MODEL_NAME

SETTINGS_FILE = "model.toml"
_WEIGHT_SUFFIXES = (".pth", ".safetensors", ".pt")
_OF_FOLDERS = ("encoder:", "reranker:", "transformers:", "torchserve:")
"""Beginnings of sources that have weights in their folder."""
_MAX_FILES = 10_000
"""Files of a version that are looked at."""

Signature = tuple[tuple[str, int, int], ...]
"""The files of a version: path, size and time of the last change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundVersion:
    """The highest version of a model in the folder."""

    number: int
    folder: Path
    files: Signature


def read_version(folder: Path) -> dict[str, Any]:
    """Return the settings of the model in the folder of a version.

    They are those in `model.toml` of the model's folder, then of the version's own. The files say
    the rest: the folder of a training run is the source; one file of torch's is the source, or the
    weights if the source is given.

    Raises:
        ValueError: It cannot be told what to serve; says why.
        OSError: A file cannot be read.
    """
    settings: dict[str, Any] = {}
    for place in (folder.parent, folder):
        file = place / SETTINGS_FILE
        try:
            settings |= tomllib.loads(read_file(file).decode())
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
    marks = ("config.json", ARCHIVE_MANIFEST)
    if "source" not in settings and any((folder / name).is_file() for name in marks):
        settings["source"] = f"{form_of(folder) or 'encoder'}:{folder}"
    if "source" not in settings and (is_run(folder) or has_begun(folder)):
        if not is_run(folder):
            raise ValueError(why_no_run(folder))
        return settings | {"source": _text_of(folder)}
    key = "weights" if "source" in settings else "source"
    if key in settings or str(settings.get("source")).startswith(_OF_FOLDERS):
        return settings
    suffixes = _WEIGHT_SUFFIXES if key == "weights" else MODEL_FILE_SUFFIXES
    files = [each for each in sorted(folder.iterdir()) if each.suffix in suffixes]
    if len(files) == 1:
        settings[key] = _text_of(files[0])
    elif files or key == "source":
        names = ", ".join(each.name for each in files) or "none"
        raise ValueError(
            f"one {', '.join(suffixes)} file is wanted, and there are: {names}; or name the {key} "
            f"in {SETTINGS_FILE}"
        )
    return settings


def validation_of(source: str) -> str | None:
    """Return what a version may be judged by: the run that it comes from, if its images are there.

    Blocks.
    """
    run = RunFolder(Path(source))
    if not is_run(run.path) or not run.validation.is_file():
        return None
    try:
        first = next((path for _, (path, _) in rows_of(run.validation)), None)
    except DataError:
        return None
    return source if first is not None and os.path.isfile(first) else None


def find_versions(folder: Path) -> dict[str, FoundVersion | OSError]:
    """Return the highest version of each model that has one, or why that cannot be told now.

    Raises:
        OSError: The folder cannot be read.
    """
    found: dict[str, FoundVersion | OSError] = {}
    for model in sorted(folder.iterdir()):
        if not MODEL_NAME.fullmatch(model.name) or not model.is_dir():
            continue
        try:
            folders = sorted(each for each in model.iterdir() if _is_version(each))
            numbered = {int(each.name): each for each in folders}  # of 07 and 7 the latter
            for number in sorted(numbered, reverse=True):
                if files := _files_of(numbered[number]):
                    found[model.name] = FoundVersion(
                        number=number, folder=numbered[number].absolute(), files=files
                    )
                    break
        except OSError as error:  # it may change while it is read
            found[model.name] = error
    return found


def _is_version(folder: Path) -> bool:
    return folder.name.isascii() and folder.name.isdecimal() and folder.is_dir()


def _files_of(version: Path) -> Signature:
    """Return the files of a version, and those of the model's settings; none if it has none."""
    files = []
    for place, _, names in os.walk(version):
        for name in names:
            path = Path(place, name)
            stat = path.stat() if path.exists() else path.lstat()  # a link to nothing
            files.append((str(path.relative_to(version)), stat.st_size, stat.st_mtime_ns))
            if len(files) > _MAX_FILES:
                raise OSError(EFBIG, f"{version} has more than {_MAX_FILES} files")
    if not files:  # the first may be on its way
        return ()
    settings = version.parent / SETTINGS_FILE
    if settings.is_file():
        stat = settings.stat()
        files.append((f"../{SETTINGS_FILE}", stat.st_size, stat.st_mtime_ns))
    return tuple(sorted(files))


def _text_of(path: Path) -> str:
    text = str(path)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{path.name!r} is not UTF-8; rename it") from None
    return text
