"""How `inferpool config --describe` lists all settings there are, with what each means.

All of it comes from the fields in `service.settings.settings` and the docstrings under them.
"""

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TextIO

from pydantic.fields import FieldInfo

from inferpool.service.cli.parser import nearest
from inferpool.service.settings.formats import cell
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.names import FLAGS, PREFIX
from inferpool.service.settings.problems import expected
from inferpool.service.settings.settings import Settings

_GROUPS: Mapping[str, Sequence[str]] = {
    "Address": ("host", "port", "front_ends", "default_model"),
    "Keys, TLS and pages": (
        *("predict_keys", "predict_keys_file", "metrics_keys", "metrics_keys_file"),
        *(
            "admin_keys",
            "admin_keys_file",
            "tls_certificate",
            "tls_key",
            "page",
            "docs",
            "cors_origins",
        ),
    ),
    "Limits": (
        *("max_connections", "head_timeout_s", "body_gap_s", "write_timeout_s", "max_body_bytes"),
        *("max_unfinished_bytes", "max_unread_bytes"),
        *("max_json_bytes", "arena_bytes", "max_queue_length", "quarantine_s"),
        *("max_instances_per_request", "max_image_pixels", "show_errors"),
    ),
    "Time": (
        *("default_timeout_s", "max_timeout_s", "drain_timeout_s", "shutdown_delay_s"),
        "keep_alive_s",
    ),
    "Logs": ("log_format", "log_level", "color"),
    "Traces": (
        *("trace_endpoint", "trace_sample_ratio", "trace_parent_based", "trace_service_name"),
        *("trace_resource", "trace_headers", "trace_certificate"),
    ),
    "This machine": (
        "cache_dir",
        "speed_search",
        "cuda_visible_devices",
        "cuda_mps_pipe_directory",
    ),
}
_MODEL_GROUPS: Mapping[str, Sequence[str]] = {
    "What a model is": ("source", "weights", "options"),
    "Where it goes": (
        *("replicas", "devices", "placement", "devices_per_replica", "gpu_memory_fraction"),
        *("threads_per_replica", "prepare_threads"),
    ),
    "Its batches": ("max_batch_size", "batch_wait_ms", "objective_p99_ms", "credit"),
    "Its speed": ("speed", "decode"),
    "Its faults": ("batch_timeout_s", "load_timeout_s", "max_restarts"),
}
_OTHERS = "Other"
_OF_A_MODEL = "models.NAME."
_WIDTH = 96
_KEYS = ("predict_keys", "metrics_keys", "admin_keys")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting, as its user needs to know it."""

    group: str
    name: str
    """As in the file; `models.NAME.` stands before those of a model."""
    type: str
    default: str
    variable: str
    """Of the environment."""
    flag: str
    """Of the command line; empty if there is none."""
    meaning: str


def all_settings() -> list[Setting]:
    """Every setting that there is, by group."""
    return [
        *_settings(Settings.model_fields, _GROUPS, ""),
        *_settings(ModelSettings.model_fields, _MODEL_GROUPS, _OF_A_MODEL),
    ]


def settings_of(key: str | Sequence[str]) -> list[Setting]:
    """The settings that a name means: as in the file, as a flag or as a variable; or all.

    Raises:
        KeyError: There is none; says which is near.
    """
    every = all_settings()
    if not isinstance(key, str):
        return every
    wanted = _plain_name(key)
    found = [each for each in every if _plain_name(each.name) == wanted]
    first, _, last = wanted.rpartition(".")
    if not found and (not first or first.startswith("models.")):  # of a model, by its own name
        found = [each for each in every if each.name == f"{_OF_A_MODEL}{last}"]
    if not found:
        names = [each.name.removeprefix(_OF_A_MODEL) for each in every]
        raise KeyError(f"there is no setting {key}; {nearest(last, names)}")
    return found


def _plain_name(key: str) -> str:
    """A setting's name, however it is written."""
    if key.startswith(PREFIX):
        return key.removeprefix(PREFIX).lower().replace("__", ".")
    if key.startswith("--"):
        return next((name for name, flag in FLAGS.items() if flag == key), key)
    return key


def write_text(settings: Sequence[Setting], stream: TextIO) -> None:
    """For people, by group."""
    for group, members in groupby(settings, key=lambda each: each.group):
        stream.write(f"{group}\n{'=' * len(group)}\n")
        for each in members:
            ways = ", ".join(way for way in (each.flag, each.variable) if way)
            stream.write(f"{each.name}  ({ways})\n")
            about = f"{each.type}; by default {each.default}"
            for text in (about, each.meaning):
                stream.write(f"{textwrap.indent(textwrap.fill(text, _WIDTH), '    ')}\n")
        stream.write("\n")


def write_markdown(settings: Sequence[Setting], stream: TextIO) -> None:
    """A table for each group."""
    for group, members in groupby(settings, key=lambda each: each.group):
        stream.write(f"## {group}\n\n| setting | is | default | flag | environment | means |\n")
        stream.write("|---|---|---|---|---|---|\n")
        for each in members:
            cells = (
                *(f"`{each.name}`", each.type, f"`{each.default}`"),
                *(each.flag and f"`{each.flag}`", f"`{each.variable}`", each.meaning),
            )
            stream.write(f"| {' | '.join(text.replace('|', chr(92) + '|') for text in cells)} |\n")
        stream.write("\n")


def write_json(settings: Sequence[Setting], stream: TextIO) -> None:
    """A list of objects."""
    stream.write(f"{json.dumps([asdict(each) for each in settings], indent=2)}\n")


def _settings(
    fields: Mapping[str, FieldInfo], groups: Mapping[str, Sequence[str]], prefix: str
) -> Iterator[Setting]:
    grouped = {name for names in groups.values() for name in names}
    others = [name for name in fields if name not in grouped and name != "models"]
    for group, names in {**groups, _OTHERS: others}.items():
        for name in names:
            field = fields[name]
            variable = f"{PREFIX}MODELS__NAME__" if prefix else PREFIX
            yield Setting(
                group=group if group != _OTHERS or not prefix else f"{_OTHERS} of a model",
                name=prefix + name,
                type=expected(field).replace(" in quotes that is not empty", ""),
                default=_default(name, field),
                variable=variable + name.upper() + ("__KEY" if name == "options" else ""),
                flag=FLAGS.get(name, ""),
                meaning=re.sub(r"\s+", " ", field.description or ""),
            )


def _default(name: str, field: FieldInfo) -> str:
    if name in _KEYS:
        return "none"
    if name == "default_model":
        return "the first model"
    if name == "options":
        return "{}"
    if field.default_factory is not None or name == "arena_bytes":
        return '"auto"'
    return "none" if field.is_required() or field.default is None else cell(field.default)
