"""Texts that say what is wrong with a setting and where it is written."""

import errno
import os
import re
from collections.abc import Sequence
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic.fields import FieldInfo

from inferpool.service.client.urls import without_password
from inferpool.service.settings.keys import Keys
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.model_sources import did_you_mean
from inferpool.service.settings.names import FLAGS, GONE, PREFIX, Key, dotted, way_to_set
from inferpool.service.settings.settings import Settings
from inferpool.service.settings.tracing import TraceHeaders

PIPE_WAIT_S = 10.0
"""How long to wait for data if a file of settings or keys is a pipe."""


def unknown(key: Key) -> str:
    """Describe a key of the file that is not a setting."""
    name = key[-1]
    here, there, where = Settings.model_fields, ModelSettings.model_fields, "a model: [models.NAME]"
    if name in GONE:
        return f"{dotted(key)}: it {GONE[name]}"
    if len(key) > 1:
        here, there, where = there, here, "the top of the file"
    if name in there:
        return f"{dotted(key)}: this setting belongs to {where}"
    return f"{dotted(key)}: there is no such setting{_or_nearest(name, list(here))}"


def unknown_argument(name: str) -> str:
    """Describe a keyword argument that is not a setting."""
    if name in GONE:
        return f"{name}: it {GONE[name]}"
    fields = [*Settings.model_fields, *ModelSettings.model_fields]
    hint = did_you_mean(name, fields).rstrip()
    return f"{name}: there is no such setting; {hint or 'inferpool config --describe lists all'}"


def unknown_variable(parts: Sequence[str]) -> str:
    """Describe a variable, split at double underscores, that is not a setting."""
    if parts[-1] in GONE:
        return f"it {GONE[parts[-1]]}"
    if parts[0] == "models" and len(parts) == 3:
        stem = f"{PREFIX}MODELS__{parts[1].upper()}__"
        names = [stem + field.upper() for field in ModelSettings.model_fields]
    else:
        names = [PREFIX + field.upper() for field in Settings.model_fields if field != "models"]
        if parts[0].startswith("model"):
            example = f"{PREFIX}MODELS__RESNET__REPLICAS"
            return f"there is no such setting; those of a model are written like {example}"
    here, there = Settings.model_fields, ModelSettings.model_fields
    if len(parts) == 1 and parts[0] in there:
        return f"this setting belongs to a model: {PREFIX}MODELS__NAME__{parts[0].upper()}"
    if len(parts) == 3 and parts[2] in here:
        return f"this setting belongs to no model: {PREFIX}{parts[2].upper()}"
    return f"there is no such setting{_or_nearest(PREFIX + '__'.join(parts).upper(), names)}"


def with_ways(text: str) -> str:
    """Return a text with the variable after each setting in it that no flag gives.

    A name of one word may be any word, and is left alone.
    """

    def way(found: re.Match[str]) -> str:
        name = found[0]
        of_model = name in ModelSettings.model_fields
        is_setting = "_" in name and (of_model or name in Settings.model_fields)
        if not is_setting or name in FLAGS:
            return name
        return f"{name} ({way_to_set(name, of_model=of_model)})"

    return re.sub(r"(?<![\w.\"'/(-])[a-z][a-z0-9_]+(?![\w.=(-]| \()", way, text)


def _or_nearest(name: str, candidates: Sequence[str]) -> str:
    hint = did_you_mean(name, candidates).rstrip()
    return f"; {hint}" if hint else f"; there are {', '.join(candidates)}"


def shown(value: object) -> str:
    """Return a value as it was given, shortened, and without the password if it is a URL."""
    try:
        text = without_password(repr(value))
    except RecursionError:
        text = f"a {type(value).__name__} in which there are too many others"
    return text if len(text) <= 80 else f"{text[:77]}..."


def unreadable(error: OSError | ValueError) -> str:
    """Describe why keys cannot be read from a file, without showing anything in it."""
    if isinstance(error, FileNotFoundError):
        # Do not show where a link leads: that name may be a key too.
        return f"there is no file of keys to read: {os.strerror(errno.ENOENT)}"
    if isinstance(error, OSError):
        return f"the file of keys cannot be read: {error.strerror}"
    is_content = isinstance(error, UnicodeDecodeError)
    reason = "it is not UTF-8" if is_content else "no file can have this name"
    return f"the file of keys cannot be read: {reason}"


def expected(field: FieldInfo) -> str:
    """Describe the values that a field accepts."""
    return _expected_of(field.annotation, field.metadata)


def _expected_of(annotation: object, metadata: Sequence[object]) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join(_expected_of(arg, metadata) for arg in args if arg is not type(None))
    if origin is Annotated:
        return _expected_of(args[0], [each for info in args[1:] for each in info.metadata])
    if origin is Literal:
        return " or ".join(f'"{choice}"' for choice in args)
    if annotation is bool:
        return "true or false"
    if annotation is str:
        return f"a text in quotes {_length_of(metadata)}characters"
    if annotation is Keys:
        return "keys"
    if annotation is TraceHeaders:
        return "headers"
    if origin is Sequence:
        each = _expected_of(args[0], ()).removeprefix("a ").replace("text in", "texts in")
        return f"a list {_length_of(metadata)}{each}"
    if annotation not in (int, float):
        return "a table" if annotation is object else f"a table {_length_of(metadata)}entries"
    return f"{'a whole number' if annotation is int else 'a number'}{_range_of(metadata)}"


def _length_of(metadata: Sequence[object]) -> str:
    low = next((each.min_length for each in metadata if isinstance(each, MinLen)), 0)
    high = next((each.max_length for each in metadata if isinstance(each, MaxLen)), None)
    if high is None:
        return "of "
    return f"of {low} to {high} " if low else f"of up to {high} "


def _range_of(metadata: Sequence[object]) -> str:
    low = next((each.ge for each in metadata if isinstance(each, Ge)), None)
    high = next((each.le for each in metadata if isinstance(each, Le)), None)
    below = next((each.lt for each in metadata if isinstance(each, Lt)), None)
    end = f"below {_plain(below)}" if high is None else f"up to {_plain(high)}"
    if any(isinstance(each, Gt) for each in metadata):
        return f" above 0 and {end}"
    return f" from {_plain(low)} {end.removeprefix('up ')}"


def _plain(bound: object) -> str:
    """Return a bound without an exponent, as a person would write it."""
    return str(int(bound)) if isinstance(bound, float) and bound.is_integer() else str(bound)
