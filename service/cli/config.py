"""The verb `config`: prints the settings in force, or describes every setting.

The descriptions come from the settings' fields and the docstrings under them.
"""

import json
import os
import re
import sys
import textwrap
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TextIO

from pydantic.fields import FieldInfo

from inferpool.service.cli.flags import settings_in
from inferpool.service.client.cli.main import nearest
from inferpool.service.settings import loader
from inferpool.service.settings.loader import load
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.names import FLAGS, KEY_SETTINGS, PREFIX, FlagError
from inferpool.service.settings.problems import expected
from inferpool.service.settings.settings import Settings

_GROUPS: Mapping[str, str] = {
    "Address": "host port grpc_port tei torchserve sagemaker front_ends default_model",
    "Keys, TLS and pages": (
        "predict_keys predict_keys_file metrics_keys metrics_keys_file admin_keys admin_keys_file "
        "tls_certificate tls_key page docs cors_origins"
    ),
    "Proxies": "root_path proxy_headers forwarded_allow_ips",
    "Cluster": (
        "cluster_port cluster_host cluster_keys cluster_keys_file cluster_certificate cluster_key "
        "cluster_authority cluster_insecure standby_of"
    ),
    "Limits": (
        "max_connections head_timeout_s body_gap_s write_timeout_s max_body_bytes "
        "max_unfinished_bytes max_unread_bytes stream_buffer_parts stream_buffer_bytes "
        "max_json_bytes arena_bytes max_queue_length "
        "per_key_share quarantine_s max_instances_per_request max_image_pixels show_errors"
    ),
    "Time": "default_timeout_s max_timeout_s drain_timeout_s shutdown_delay_s keep_alive_s",
    "Jobs": "job_store job_retention_s job_share max_jobs max_job_bytes webhook_hosts "
    "webhook_secret_file",
    "Logs": "log_format log_level color",
    "Traces": (
        "trace_endpoint trace_sample_ratio trace_parent_based trace_service_name trace_resource "
        "trace_headers trace_certificate"
    ),
    "This machine": (
        "cache_dir state_file watch watch_policy speed_search "
        "cuda_visible_devices cuda_device_order cuda_mps_pipe_directory"
    ),
}
_MODEL_GROUPS: Mapping[str, str] = {
    "What a model is": "source weights options",
    "How clients ask it": "path envelope form accepts",
    "Where it goes": (
        "replicas devices placement devices_per_replica share gpu_memory_fraction "
        "threads_per_replica prepare_threads decoders"
    ),
    "Its batches": "max_batch_size max_batch_tokens batch_wait_ms objective_p99_ms credit",
    "Its streams": "stream_gap_s max_stream_s max_stream_parts",
    "Its speed": "speed decode",
    "Its faults": "check batch_timeout_s load_timeout_s max_restarts",
}
_OTHERS = "Other"
_OF_A_MODEL = "models.NAME."
_WIDTH = 96
_DEFAULTS = {
    **dict.fromkeys(KEY_SETTINGS, "none"),
    "default_model": "the first model",
    "options": "{}",
}
"""Defaults that are not in the fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingDescription:
    """Description of one setting for its user."""

    group: str
    name: str
    """Name in the file; a model's settings begin with `models.NAME.`."""
    type: str
    default: str
    variable: str
    """Environment variable."""
    flag: str
    """Flag of the command line; empty if there is none."""
    meaning: str


def run(args: Namespace) -> int:
    """Print settings; return the exit status.

    Raises:
        FlagError: The flags make no sense.
        SettingsError: The settings cannot be used.
    """
    if bool(args.describe) != (args.format == "markdown") and args.format in ("toml", "markdown"):
        only = "the settings in force" if args.format == "toml" else "the list of all: --describe"
        raise FlagError(f"--format {args.format} is for {only}")
    if args.describe:
        describe = {"table": _write_text, "markdown": _write_markdown, "json": _write_json}
        describe[args.format](_find(args.describe), sys.stdout)
        return 0
    loaded = load(settings_in(args), os.environ, Path.cwd())
    write = {"table": loader.write_table, "toml": loader.write_toml, "json": loader.write_json}
    write[args.format](loaded.rows(), sys.stdout)
    sys.stderr.writelines(f"inferpool config: {each}\n" for each in loaded.warnings)
    return 0


def _find(key: str | Sequence[str]) -> list[SettingDescription]:
    """Return the settings that a name in the file, a flag or a variable stands for; or all.

    Raises:
        FlagError: No setting has this name; the error names a similar one.
    """
    every = [
        *_describe(Settings.model_fields, _GROUPS, ""),
        *_describe(ModelSettings.model_fields, _MODEL_GROUPS, _OF_A_MODEL),
    ]
    if not isinstance(key, str):
        return every
    wanted = _name_in_file(key)
    found = [each for each in every if _name_in_file(each.name) == wanted]
    first, _, last = wanted.rpartition(".")
    if not found and (not first or first.startswith("models.")):  # a setting of a model
        found = [each for each in every if each.name == f"{_OF_A_MODEL}{last}"]
    if not found:
        names = [each.name.removeprefix(_OF_A_MODEL) for each in every]
        raise FlagError(f"--describe: there is no setting {key}; {nearest(last, names)}")
    return found


def _name_in_file(key: str) -> str:
    if key.startswith(PREFIX):
        return key.removeprefix(PREFIX).lower().replace("__", ".")
    if key.startswith("--"):
        return next((name for name, flag in FLAGS.items() if flag == key), key)
    return key


def _describe(
    fields: Mapping[str, FieldInfo], groups: Mapping[str, str], prefix: str
) -> Iterator[SettingDescription]:
    grouped = " ".join(groups.values()).split()
    others = " ".join(name for name in fields if name not in grouped and name != "models")
    variable = f"{PREFIX}MODELS__NAME__" if prefix else PREFIX
    for group, names in {**groups, _OTHERS: others}.items():
        for name in names.split():
            field = fields[name]
            yield SettingDescription(
                group=group if group != _OTHERS or not prefix else f"{_OTHERS} of a model",
                name=prefix + name,
                type=expected(field).replace(" in quotes", ""),
                default=_default(name, field),
                variable=variable + name.upper() + ("__KEY" if name == "options" else ""),
                flag=FLAGS.get(name, ""),
                meaning=re.sub(r"\s+", " ", field.description or ""),
            )


def _default(name: str, field: FieldInfo) -> str:
    if name in _DEFAULTS:
        return _DEFAULTS[name]
    if field.default_factory is not None:
        return '"auto"'
    return "none" if field.is_required() or field.default is None else loader.cell(field.default)


def _write_text(settings: Sequence[SettingDescription], stream: TextIO) -> None:
    for group, members in groupby(settings, key=lambda each: each.group):
        stream.write(f"{group}\n{'=' * len(group)}\n")
        for each in members:
            ways = ", ".join(way for way in (each.flag, each.variable) if way)
            stream.write(f"{each.name}  ({ways})\n")
            for text in (f"{each.type}; by default {each.default}", each.meaning):
                stream.write(f"{textwrap.indent(textwrap.fill(text, _WIDTH), '    ')}\n")
        stream.write("\n")


def _write_markdown(settings: Sequence[SettingDescription], stream: TextIO) -> None:
    for group, members in groupby(settings, key=lambda each: each.group):
        stream.write(f"## {group}\n\n| setting | is | default | flag | environment | means |\n")
        stream.write("|---|---|---|---|---|---|\n")
        for each in members:
            flag = each.flag and f"`{each.flag}`"
            cells = (f"`{each.name}`", each.type, f"`{each.default}`", flag, f"`{each.variable}`")
            escaped = (text.replace("|", "\\|") for text in (*cells, each.meaning))
            stream.write(f"| {' | '.join(escaped)} |\n")
        stream.write("\n")


def _write_json(settings: Sequence[SettingDescription], stream: TextIO) -> None:
    stream.write(f"{json.dumps([asdict(each) for each in settings], indent=2)}\n")
