"""Says what the network of a folder in Hugging Face's form is for. No torch.

`config.json` names the network's class: that of transformers for the task that it was trained for.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from inferpool.models.files.reading import read_file

CONFIG_FILE = "config.json"
Task = Literal["classification", "detection", "segmentation"]
_TASKS: dict[str, Task] = {
    "ForImageClassification": "classification",
    "ForObjectDetection": "detection",
    "ForSemanticSegmentation": "segmentation",
}


class _Config(msgspec.Struct):
    architectures: Sequence[str] | None = None


def architectures_of(folder: Path) -> Sequence[str]:
    """Return the classes that the folder's `config.json` names; none if it cannot be read."""
    try:
        path = folder / CONFIG_FILE
        if not path.is_file():
            return ()
        return msgspec.json.decode(read_file(path), type=_Config).architectures or ()
    except (OSError, ValueError, RecursionError):  # msgspec's are ValueErrors
        return ()


def task_of(architecture: str) -> Task | None:
    """Return what a class of transformers is for; None if this server has no answers for it."""
    found = (task for suffix, task in _TASKS.items() if architecture.endswith(suffix))
    return next(found, None)


def is_picture_folder(folder: Path) -> bool:
    """Return whether a folder has a network for pictures that `transformers:FOLDER` serves."""
    return any(task_of(each) for each in architectures_of(folder))


def no_picture_folder(folder: Path) -> str:
    """Return why `transformers:FOLDER` does not serve a folder."""
    found = architectures_of(folder)
    if not os.path.isfile(folder / CONFIG_FILE):
        return f"{folder} has no {CONFIG_FILE}: a folder of transformers is one that has it"
    called = f"names {', '.join(found)}" if found else "names no class in `architectures`"
    return (
        f"{folder}/{CONFIG_FILE} {called}; served are networks of "
        f"{', '.join(f'*{suffix}' for suffix in _TASKS)}, and encoders of texts as encoder:FOLDER"
    )
