"""Reads TorchServe's `config.properties`, and says what it means in our settings. No torch.

The keys are those of TorchServe 0.12 (`org.pytorch.serve.util.ConfigManager`); the syntax is that
of `java.util.Properties.load`.
"""

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from inferpool.models.errors import SourceError
from inferpool.models.files.reading import read_file
from inferpool.models.torchserve.archive import (
    ARCHIVE_SUFFIXES,
    MANIFEST,
    NUMBERS,
    Archived,
    read_facts,
)
from inferpool.service.settings.archives import settings_of_archive
from inferpool.service.settings.names import SettingsError

DEFAULT_ADDRESSES = {
    "inference_address": "http://127.0.0.1:8080",
    "management_address": "http://127.0.0.1:8081",
    "metrics_address": "http://127.0.0.1:8082",
}
RESPONSE_TIMEOUT_S = 120
"""TorchServe's `default_response_timeout`."""
_MAX_TIMEOUT_S = 300.0
"""Our own `max_timeout_s` where it is not set."""
_PORTS = {
    "inference_address": (80, 443), "management_address": (8081, 8444),
    "metrics_address": (8082, 8445),
}  # fmt: skip
"""The ports of an address without one, for http and https (`org.pytorch.serve.util.Connector`)."""
_ADDRESS = re.compile(r"(https?)://(\[[0-9A-Fa-f:.]+\]|[^:/\[\]]+)(?::([0-9]{1,5}))?/?", re.I)
_MAX_BYTES = 1 << 20
_MOST_MODELS = 1000
_MAX_MODELS_JSON = 1 << 20
_USED = (
    *DEFAULT_ADDRESSES, "model_store", "load_models", "models", "default_workers_per_model",
    "default_response_timeout", "default_startup_timeout", "job_queue_size", "max_request_size",
    "number_of_gpu", "cors_allowed_origin", "certificate_file", "private_key_file",
    "enable_envvars_config", "use_env_allowed_urls", "enable_metrics_api", "metrics_mode",
    "disable_token_authorization", "enable_model_api", "service_envelope",
)  # fmt: skip
_NOT_DONE = {
    "install_py_dep_per_model": (
        "nothing is installed for an archive: run `pip install -r` with its requirements file "
        "yourself"
    ),
    "default_service_handler": "an archive must name its handler",
    "blacklist_env_vars": "handlers see all variables of the environment",
    "decode_input_request": "JSON bodies always reach handlers parsed",
    "limit_max_image_pixels": "set max_image_pixels",
    "enable_grpc_ssl": "TorchServe's gRPC is not served",
    "model_snapshot": "set load_models; snapshots are not read",
    "system_metrics_cmd": "it is not run",
}
"""Keys that ask for what this service does not do, and what holds instead."""
_HARMLESS = {
    "decode_input_request": "true", "limit_max_image_pixels": "true",
    "install_py_dep_per_model": "false", "enable_grpc_ssl": "false", "blacklist_env_vars": "",
    "default_service_handler": "", "system_metrics_cmd": "",
}  # fmt: skip
"""Values of these keys that ask for nothing."""
_NO_EFFECT = (
    "debug", "unregister_model_timeout", "number_of_netty_threads", "netty_client_threads",
    "metrics_config", "model_metrics_auto_detect", "disable_system_metrics", "ipex_enable",
    "cpu_launcher_enable", "cpu_launcher_args", "ipex_gpu_enable", "async_logging",
    "cors_allowed_methods", "cors_allowed_headers", "keystore_pass", "keystore_type",
    "max_response_size", "model_server_home", "prefer_direct_buffer", "allowed_urls",
    "grpc_inference_address", "grpc_management_address", "grpc_inference_port",
    "grpc_management_port", "grpc_inference_max_connection_age_ms",
    "grpc_management_max_connection_age_ms", "grpc_inference_max_connection_age_grace_ms",
    "grpc_management_max_connection_age_grace_ms", "initial_worker_port",
    "initial_distribution_port", "workflow_store", "cpp_log_config", "ts_open_inference_protocol",
    "token_expiration_min", "ts_header_key_sequence_id", "ts_header_key_sequence_start",
    "ts_header_key_sequence_end", "use_native_io", "io_ratio", "metric_time_interval", "version",
    "python", "tsConfigFile", "vmargs",
)  # fmt: skip
"""Keys of TorchServe's that mean nothing here."""
_KNOWN = (*_USED, *_NOT_DONE, *_NO_EFFECT, "keystore")
_VARIABLES = {
    f"TS_{key.removeprefix('ts_').upper()}": key for key in _KNOWN if not key.startswith("use_")
}
"""Keys by the variable that gives them, with `enable_envvars_config`."""
_REFERENCE = re.compile(r"\$\$([^$]+[^$])\$\$")


class Properties(dict[str, str]):
    """The keys of a `config.properties`, with the values of variables where it asks for them.

    Attributes:
        path: The file.
        lines: The line of each key.
    """

    def __init__(self, path: Path, lines: Mapping[str, int], values: Mapping[str, str]) -> None:
        super().__init__(values)
        self.path = path
        self.lines = dict(lines)
        self.num_visible = 0
        """The GPUs that CUDA_VISIBLE_DEVICES names."""

    def place(self, key: str) -> str:
        """Return the place of a key for errors."""
        line = self.lines.get(key)
        return f"{self.path}{f':{line}' if line else ''}: {key}"

    def is_true(self, key: str, *, default: bool = False) -> bool:
        """Return a value as Java's `Boolean.parseBoolean` does."""
        return self[key].strip().lower() == "true" if key in self else default

    def number(self, key: str, *, least: int = 0) -> int | None:
        """Return a number; None if it is not given.

        Raises:
            SettingsError: It is none.
        """
        text = self.get(key)
        if text is None:
            return None
        if not re.fullmatch(r"[0-9]{1,10}", text.strip()) or int(text) < least:
            raise SettingsError(
                [f"{self.place(key)}: {text[:80]!r} must be a whole number from {least}"]
            )
        return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An address that TorchServe listens at."""

    is_tls: bool
    host: str
    port: int


def read_properties(
    path: Path, environ: Mapping[str, str] | None = None, *, place: str = ""
) -> Properties:
    """Read a `config.properties`.

    Args:
        path: The file.
        environ: The environment, for `$$NAME$$` in values, and for the variables TS_* if
            `enable_envvars_config` is true; None: that of this process.
        place: The place of the setting that names the file, for errors.

    Raises:
        SettingsError: It cannot be read, or names a variable that is not set.
    """
    environ = os.environ if environ is None else environ
    try:
        raw = read_file(path)
        if len(raw) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES:,} bytes")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        shown = f"{place}: {str(path)[:200]}" if place else str(path)
        raise SettingsError([f"{shown} cannot be read: {why}"]) from None
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = raw.decode("latin-1")  # as Java reads such files
    lines: dict[str, int] = {}
    values: dict[str, str] = {}
    for line, key, value in _parse(text):
        lines[key], values[key] = line, value
    properties = Properties(path, lines, values)
    if visible := environ.get("CUDA_VISIBLE_DEVICES"):
        properties.num_visible = len(visible.split(","))
    for key, value in values.items():
        properties[key] = _resolved(properties, key, value, environ)
    if properties.is_true("enable_envvars_config"):
        allows_urls = properties.is_true("use_env_allowed_urls")
        for variable, key in _VARIABLES.items():
            if variable in environ and (key != "allowed_urls" or allows_urls):
                properties[key] = environ[variable]
    return properties


def address_of(properties: Properties, key: str) -> Address:
    """Return one of the three addresses, or its default.

    Raises:
        SettingsError: It cannot be used here.
    """
    text = properties.get(key, DEFAULT_ADDRESSES[key]).strip()
    place = properties.place(key)
    if text.lower().startswith("unix:"):
        raise SettingsError([f"{place}: unix sockets are not served; write http://HOST:PORT"])
    found = _ADDRESS.fullmatch(text)
    port = int(found[3]) if found and found[3] else -1
    if found is None or port > 65535:
        raise SettingsError([f"{place}: {text[:80]!r} is no address; write http://HOST:PORT"])
    is_tls = found[1].lower() == "https"
    return Address(
        is_tls=is_tls, host=found[2].strip("[]"), port=_PORTS[key][is_tls] if port < 0 else port
    )


def settings_of(
    path: Path,
    environ: Mapping[str, str],
    file: Mapping[str, object],
    cwd: Path,
    *,
    place: str = "",
) -> "Meaning":
    """Return what a `config.properties` means.

    Args:
        path: The file, relative to `cwd`.
        environ: The environment.
        file: The table of our own file. What it sets holds against defaults of TorchServe's, and
            what it sets for a model holds.
        cwd: The current folder.
        place: The place of the setting that names the file, for errors.

    Raises:
        SettingsError: It cannot be used; each problem names the file, the line and the key.
    """
    properties = read_properties(cwd / path, environ, place=place)
    properties.path = path
    meaning = Meaning()
    _add_service(meaning, properties)
    _add_models(meaning, properties, cwd)
    _add_timeouts(meaning, properties)
    meaning.warnings += _warnings_of(properties)
    _leave_to(file, meaning.table, properties)
    if meaning.problems:
        raise SettingsError(meaning.problems)
    return meaning


@dataclass(slots=True, kw_only=True)
class Meaning:
    """The meaning of a `config.properties` in our settings."""

    table: dict[str, object] = field(default_factory=dict)
    """The settings, as in our file."""
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def model_of_store(
    archive: Path, properties: Properties, *, name: str | None = None, facts: Archived | None = None
) -> dict[str, object]:
    """Return the settings of a model that is an archive in the `model_store`.

    What `model-config.yaml` says counts more than the file, as with TorchServe.

    Args:
        archive: The archive.
        properties: The file, for its defaults and its key `models`.
        name: The model's name, if it is not the archive's own.
        facts: The archive's facts, if they are known.

    Raises:
        SourceError: It is no such archive.
        SettingsError: A value of the file is wrong.
    """
    facts = facts or read_facts(archive)
    given = {
        key: value
        for key, setting in (
            ("responseTimeout", "default_response_timeout"),
            ("startupTimeout", "default_startup_timeout"),
            ("minWorkers", "default_workers_per_model"),
            ("maxWorkers", "default_workers_per_model"),
        )
        if (value := properties.number(setting))
    }
    given.setdefault("responseTimeout", RESPONSE_TIMEOUT_S)
    given |= _numbers_of(properties, name or facts.name, facts.version)
    is_file = str(archive).endswith(".mar")
    table: dict[str, object] = {
        "source": str(archive) if is_file else f"torchserve:{archive}",
        **settings_of_archive(facts, given),
    }
    options: dict[str, str] = {}
    if name and name != facts.name:
        options["name"] = name
    if envelope := properties.get("service_envelope", "").strip():
        options["envelope"] = envelope
    if options:
        table["options"] = options
    num_gpus = properties.number("number_of_gpu")
    if num_gpus == 0:
        table["devices"] = "cpu"
    elif num_gpus and num_gpus < properties.num_visible:
        table.setdefault("devices", f"cuda:{','.join(map(str, range(num_gpus)))}")
    return table


def key_of_model(name: str) -> str:
    """Return the key of a model in our settings, in which letters are small."""
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).lstrip("._-")[:64] or "model"


def store_of(properties: Properties, cwd: Path) -> Path:
    """Return the folder `model_store`.

    Raises:
        SettingsError: It is not given, or is no folder.
    """
    text = properties.get("model_store")
    if not text:
        raise SettingsError(
            [f"{properties.path}: model_store is not set; load_models names archives in it"]
        )
    if not (cwd / text).is_dir():
        what = f"there is no folder {text} (looked for from {cwd})"
        raise SettingsError([f"{properties.place('model_store')}: {what}"])
    return Path(text)


def _parse(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the key and the value of each property."""
    natural = re.split(r"\r\n|\r|\n", text)
    number = 0
    while number < len(natural):
        first = number + 1
        pieces = [natural[number].lstrip(" \t\f")]
        number += 1
        if not pieces[0] or pieces[0][0] in "#!":
            continue
        while _continues(pieces[-1]):
            pieces[-1] = pieces[-1][:-1]
            if pieces == [""]:
                break  # for Java, the next line then begins anew
            if number < len(natural):
                pieces.append(natural[number].lstrip(" \t\f"))
                number += 1
        line = "".join(pieces)
        found = line and re.match(r"((?:\\.|[^\\=: \t\f])*)[ \t\f]*[=:]?[ \t\f]*", line, re.DOTALL)
        if found:
            yield first, _unescaped(found[1]), _unescaped(line[found.end() :])


def _continues(line: str) -> bool:
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _unescaped(text: str) -> str:
    letters = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}

    def of(found: re.Match[str]) -> str:
        each = found[1]
        return chr(int(each[1:], 16)) if len(each) == 5 else letters.get(each, each)

    return re.sub(r"\\(u[0-9A-Fa-f]{4}|.)", of, text, flags=re.DOTALL)


def _resolved(properties: Properties, key: str, value: str, environ: Mapping[str, str]) -> str:
    def of(found: re.Match[str]) -> str:
        if found[1] not in environ:
            raise SettingsError(
                [f"{properties.place(key)}: the variable {found[1]} is not set in the environment"]
            )
        return environ[found[1]]

    return _REFERENCE.sub(of, value)


def _add_service(meaning: Meaning, properties: Properties) -> None:
    """Add the settings that are not those of a model."""
    table = meaning.table
    table["torchserve"] = str(properties.path)  # it may serve no model
    address = address_of(properties, "inference_address")
    table["host"], table["port"] = address.host, address.port
    if "keystore" in properties:
        meaning.problems.append(
            f"{properties.place('keystore')}: keystores of Java are not read; `openssl pkcs12 -in "
            "KEYSTORE -nodes -out both.pem` writes a PEM file, which certificate_file and "
            "private_key_file can name"
        )
    elif address.is_tls:
        files = [properties.get(key) for key in ("certificate_file", "private_key_file")]
        if all(files):
            table["tls_certificate"], table["tls_key"] = files
        else:
            meaning.problems.append(
                f"{properties.place('inference_address')}: https needs certificate_file and "
                "private_key_file"
            )
    if num := properties.number("job_queue_size", least=1):
        table["max_queue_length"] = num
    if num := properties.number("max_request_size", least=1):
        table["max_body_bytes"] = max(num, 1024)  # our least
    if origin := properties.get("cors_allowed_origin", "").strip():
        table["cors_origins"] = origin
    if (num := properties.number("number_of_gpu")) and not properties.num_visible:
        table["cuda_visible_devices"] = ",".join(map(str, range(min(num, 64))))


def _leave_to(file: Mapping[str, Any], table: dict[str, Any], properties: Properties) -> None:
    """Remove the settings that our own file gives, where TorchServe's does not name them."""
    derived = ["default_timeout_s", "max_timeout_s", "default_model"]
    if "inference_address" not in properties:
        derived += ["host", "port"]
    for name in derived:
        if name in file:
            table.pop(name, None)
    models = file.get("models")
    for name, model in table.get("models", {}).items():
        own = models.get(name) if isinstance(models, dict) else None
        for key in own if isinstance(own, dict) else ():
            model.pop(key, None)


def _add_timeouts(meaning: Meaning, properties: Properties) -> None:
    """Add the time of calls, for which TorchServe has no bound.

    It is twice the time of the slowest batch, so that a call behind one that hangs is answered.
    """
    timeouts: list[Any] = [properties.number("default_response_timeout", least=1)]
    models: Any = meaning.table.get("models", {})
    timeouts += [model.get("batch_timeout_s") for model in models.values()]
    longest = 2.0 * max([each for each in timeouts if each] or [RESPONSE_TIMEOUT_S])
    meaning.table["default_timeout_s"] = longest
    if longest > _MAX_TIMEOUT_S:
        meaning.table["max_timeout_s"] = longest


def _add_models(meaning: Meaning, properties: Properties, cwd: Path) -> None:
    wanted = properties.get("load_models", "").strip()
    models: dict[str, dict[str, object]] = {}
    taken: dict[tuple[str, str], Path] = {}
    place = properties.place("load_models")
    if not wanted:
        meaning.table["models"] = models
        return
    is_all = wanted.lower() == "all"
    store = store_of(properties, cwd)
    for name, path in _all_of(store, cwd) if is_all else _named(meaning, wanted, store, place):
        try:
            facts = read_facts(cwd / path)
            table = model_of_store(path, properties, name=name, facts=facts)
        except SourceError as error:
            text = f"{place}: {path.name} is not served: {error}"
            (meaning.warnings if is_all else meaning.problems).append(text)
            continue
        name = name or facts.name
        if other := taken.get((name, facts.version)):
            meaning.problems.append(
                f"{place}: {path.name} and {other.name} are both version {facts.version} of "
                f"{name}; name them apart: NAME={path.name}"
            )
            continue
        taken[name, facts.version] = path
        key = key_of_model(name)
        if key in models:
            key = key_of_model(f"{name[: 63 - len(facts.version)]}-{facts.version}")
        if key in models:
            meaning.problems.append(
                f"{place}: two models are called {key} here, where names have small letters; name "
                f"them apart: NAME={path.name}"
            )
            continue
        models[key] = table
        meaning.warnings += warnings_of_archive(facts)
    meaning.table["models"] = models
    if models:
        meaning.table["default_model"] = next(iter(models))


def warnings_of_archive(facts: Archived) -> list[str]:
    """Return texts about what an archive asks for in vain."""
    name = facts.path.name
    found = []
    if facts.unread:
        found.append(
            f"{name}: {facts.model.config_file}: {', '.join(facts.unread)} has no effect: only "
            "numbers at the start of a line are read; set it for the model"
        )
    return found


def _all_of(store: Path, cwd: Path) -> Iterator[tuple[None, Path]]:
    """Yield the archives of a folder: files by their names, and folders with a manifest."""
    for each in islice(sorted((cwd / store).iterdir()), _MOST_MODELS):
        is_file = each.is_file() and each.name.endswith(ARCHIVE_SUFFIXES)
        if not each.name.startswith(".") and (is_file or (each / MANIFEST).is_file()):
            yield None, store / each.name


def _named(
    meaning: Meaning, wanted: str, store: Path, place: str
) -> Iterator[tuple[str | None, Path]]:
    for each in wanted.split(","):
        name, _, file = each.rpartition("=")
        file = file.strip()
        if not file:
            continue
        if "://" in file:
            meaning.problems.append(
                f"{place}: {file[:100]}: nothing is loaded from a URL; download it to model_store"
            )
        elif "/" in file or "\\" in file or file in (".", ".."):
            meaning.problems.append(
                f"{place}: {file[:100]}: name a file or folder in model_store, without a path"
            )
        else:
            yield name.strip() or None, store / file


def _numbers_of(properties: Properties, name: str, version: str) -> dict[str, int]:
    """Return what the key `models` says about a version of a model."""
    text = properties.get("models")
    if not text:
        return {}
    place = properties.place("models")
    try:
        table: Any = json.loads(text) if len(text) <= _MAX_MODELS_JSON else None
    except (ValueError, RecursionError) as error:
        raise SettingsError([f"{place}: is not JSON: {error}"]) from None
    if not isinstance(table, dict):
        raise SettingsError([f'{place}: write {{"NAME": {{"VERSION": {{"batchSize": 4}}}}}}'])
    versions = table.get(name)
    found = versions.get(version) if isinstance(versions, dict) else None
    if not isinstance(found, dict):
        return {}
    return {key: found[key] for key in NUMBERS if type(found.get(key)) is int and found[key] > 0}


def _warnings_of(properties: Properties) -> Sequence[str]:
    found = []
    for key, why in _NOT_DONE.items():
        if key in properties and properties[key].strip().lower() != _HARMLESS.get(key, "-"):
            found.append(f"{properties.place(key)}: has no effect: {why}")
    if vain := [key for key in _NO_EFFECT if key in properties]:
        found.append(f"{properties.path}: these keys have no effect here: {', '.join(vain)}")
    for key in properties:
        if key not in _KNOWN:
            near = next(iter(difflib.get_close_matches(key, _KNOWN, 1)), None)
            hint = f"; did you mean {near}?" if near else ""
            found.append(f"{properties.place(key)}: there is no such key in TorchServe 0.12{hint}")
    return found
