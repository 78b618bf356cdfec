"""Helpers that handlers of TorchServe import from `ts.utils.util`. Worker processes only."""

import inspect
import json
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from inferpool.models.errors import ModelError

logger = logging.getLogger(__name__)

ENTITY = re.compile("&(?:[a-z0-9]+|#[0-9]{1,6}|#x[0-9a-f]{1,6});")
CLEANUP_REGEX = re.compile("<.*?>|" + ENTITY.pattern)
"""Tags and entities of HTML."""


class PredictionException(Exception):  # noqa: N818 - the name that users' handlers import
    """A handler raises it to answer its whole batch with a status and a message of its own."""

    def __init__(self, message: str, error_code: int = 500) -> None:
        super().__init__(message)
        self.message = message
        self.error_code = error_code

    def __str__(self) -> str:
        """Return the message with the status."""
        return f"{self.message} : {self.error_code}"


def list_classes_from_module(
    module: ModuleType, parent_class: type | None = None
) -> list[type[Any]]:
    """Return the classes that a module defines itself, by name; those of a parent, if given."""
    return [
        each
        for _, each in inspect.getmembers(module, inspect.isclass)
        if each.__module__ == module.__name__ and issubclass(each, parent_class or object)
    ]


def load_label_mapping(mapping_file_path: str | os.PathLike[str]) -> dict[str, str] | None:
    """Read the names of classes by their numbers, as text; None if there is no such file.

    Raises:
        ModelError: The file holds something else.
    """
    path = Path(mapping_file_path)
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f'{path} must hold an object such as {{"0": "cat", "1": "dog"}}')
    listed = found.get("object_type_names")  # as older examples of TorchServe have them
    if isinstance(listed, list):
        return {str(number): name for number, name in enumerate(listed)}
    names = {}
    for number, name in found.items():
        # ImageNet's file has an identifier and a name for each: ["n01440764", "tench"].
        names[number] = name[-1] if isinstance(name, list) and name else name
        if not isinstance(names[number], str):
            raise ModelError(f"{path}: class {number!r} has no text as its name, but {name!r}")
    return names


def map_class_to_label(
    probs: list[Any],
    mapping: dict[str, str] | None = None,
    lbl_classes: Sequence[Sequence[int]] | None = None,
) -> list[dict[str, Any]]:
    """Return an object of names and values for each row.

    Args:
        probs: Values of each row.
        mapping: Names of classes by their numbers as text; by default the numbers.
        lbl_classes: Numbers of the classes of each row's values; by default 0, 1, 2...

    Raises:
        KeyError: The mapping lacks a class.
    """
    if not isinstance(probs, list):
        raise TypeError(f"the values to name must be a list, not {type(probs).__name__}")
    rows = [range(len(row)) for row in probs] if lbl_classes is None else lbl_classes
    return [
        {
            str(number) if mapping is None else mapping[str(number)]: value
            for number, value in zip(numbers, values, strict=False)
        }
        for numbers, values in zip(rows, probs, strict=False)
    ]


def get_yaml_config(yaml_file_path: str | os.PathLike[str]) -> Any:
    """Read a file of YAML, without objects of Python."""
    import yaml

    return yaml.safe_load(Path(yaml_file_path).read_bytes())


def check_valid_pt2_backend(backend: str) -> bool:
    """Return whether `torch.compile` has a backend of this name, and log if it has none."""
    if backend in torch.compiler.list_backends(exclude_tags=()):
        return True
    logger.warning("torch.compile has no backend %r", backend)
    return False
